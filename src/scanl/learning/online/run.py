"""What `scanl learn` does: from a stream to predictions, scores and checkpoints."""

import copy
import gc
import math
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

import scanl.tasks  # registers the streams  # noqa: F401
from scanl.data import sources
from scanl.data.base import IGNORED
from scanl.data.questions import Numbers
from scanl.errors import CheckpointError, ConfigError, DataError, nearest
from scanl.learning.online import reading
from scanl.learning.online.answers import AnswerClass, Answering, AnswerNumbers, likeliest
from scanl.learning.online.build import make_loop
from scanl.learning.online.config import LearnConfig
from scanl.learning.online.folder import OnlineFolder, Rows
from scanl.learning.online.prequential import Prequential
from scanl.learning.online.reading import Columns, Item, Row
from scanl.tasks.stream import StreamTask

MAX_SHOWN_LINES = 10  # skipped lines that are reported one by one

Report = Callable[[str], None]


class Run:
    """A run of `scanl learn`. report: takes a line for the user.

    Attributes: loop, once the first sample has been read; `lines`, the number of the last line; `skipped` lines.
    """

    def __init__(self, config: LearnConfig, folder: OnlineFolder | None, report: Report) -> None:
        config.check()
        self.config, self.folder, self.report = config, folder, report
        self.lines = self.skipped = self.scored = 0
        self.columns: Columns | None = None
        self.form = reading.Form()
        self.before = 0  # lines of a file that is followed, before it was cut
        self.known: set[Any] = set()  # names of columns
        self.unread = 0  # names of columns that came later
        self.late = 0  # truths of samples that wait no more
        self.loop: Prequential | None = None
        self.scores: Any = None
        self.ahead: deque[int] = deque()  # samples whose truth is the value of a later line
        self.hidden: deque[tuple[int, Any]] = deque()  # truths that are not known yet
        self.keys: dict[Any, int] = {}  # of samples that wait for their truth
        self.drifts: list[int] = []
        self.tables: list[Rows] = []
        self.stopped = self._reading = False
        self._saved = time.monotonic()
        stored = None if folder is None else folder.stored()
        if stored is not None:
            self._restore(stored)

    # -- the stream

    def items(self) -> Iterator[Item | DataError]:
        """Yield the samples of the stream, after those that were read before."""
        data, skip = str(self.config.stream.data), self.lines
        if not self.config.run.replayed:
            skip = 0
        if data.startswith("river:"):
            target, question, classes, found = reading.river_rows(data.removeprefix("river:"), skip)
            self.config.stream.target = target
            self.config.stream.question = self.config.stream.question or question
            self.config.stream.classes = max(classes, 2) if question == "class" else self.config.stream.classes
            yield from self._from_rows(found)
        elif data == "-" or Path(data).is_file():
            if skip and data != "-" and reading.shorter(Path(data), skip - self.before):
                if not self.config.stream.follow:
                    raise DataError(
                        f"learn: {data} has fewer than the {skip - self.before} lines that were read before; put it "
                        "back, or read what it has now: --replayed false"
                    )
                self._cut(self.lines, 0)
            if data == "-":
                lines: Iterable[bytes] = reading.standard_input()
            elif self.config.stream.follow:
                lines = reading.followed_lines(Path(data), partial(self._cut, self.before))
            else:
                lines = reading.file_lines(Path(data))
            yield from self._from_rows(reading.rows(lines, max(0, skip - self.before), self.form, self.before))
        else:
            yield from self._from_stream(data, skip)

    def _cut(self, before: int, count: int) -> None:
        """Let a file begin again after `count` lines of this process. before: lines of the files before it."""
        self.before = before + count
        self.report(f"the file was cut after line {self.before}; it is read from its begin")

    def _from_rows(self, rows: Iterable[Row | DataError]) -> Iterator[Item | DataError]:
        chosen = self.config.stream
        for row in rows:
            if isinstance(row, DataError):
                yield row
                continue
            if self.columns is None:
                self.columns = Columns.of(
                    row, chosen.target, chosen.question, chosen.horizon, chosen.key, chosen.leave_out
                )
                if self.columns.text:
                    self.report(f"text is not read: {', '.join(self.columns.text)}")
            if self.unread < MAX_SHOWN_LINES and row.values.keys() - self.known:
                self._note(row, self.columns)
            try:
                yield self.columns.item(row)
            except DataError as error:
                yield error

    def _note(self, row: Row, columns: Columns) -> None:
        """Say which columns of a row the first one had not."""
        self.known |= {columns.target, columns.key, *columns.names, *columns.text, *self.config.stream.leave_out}
        for name in row.values.keys() - self.known:
            self.known.add(name)
            self.unread += 1
            self.report(f"line {row.number}: column {name!r} is not read, because the first line has none")

    def _from_stream(self, name: str, skip: int) -> Iterator[Item]:
        known = [each for each in sources.names() if issubclass(sources.get(each), StreamTask)]
        if name not in known:
            if "/" in name or "." in name:
                raise ConfigError(f"learn: data is {name!r}, which does not exist; name a file, a stream, or -")
            raise nearest("stream", name, known)
        entry: Any = sources.get(name)
        stream = entry.open(
            {"data_options": self.config.stream.data_options, "seed": self.config.run.seed, "eval_examples": 1}
        )
        question = stream.question
        if self.loop is None:
            number = isinstance(question, Numbers)
            kind = self._kind("number" if number else "class", question.count if number else question.classes)
            self._begin(kind, question.inputs.count)
        for number, (x, y) in enumerate(islice(stream.stream(), skip, None), skip + 1):
            none = y == IGNORED if isinstance(y, int) else not math.isfinite(y[0])
            yield Item(number, x, None if none else y, None)

    # -- the loop

    def _kind(self, question: str, count: int = 1) -> Answering:
        chosen = self.config.stream
        if question == "class":
            return AnswerClass(max(chosen.classes, count), chosen.feedback)
        ahead = self.columns is not None and self.columns.horizon is not None
        return AnswerNumbers(count, self.config.learning.span, chosen.feedback and not ahead)

    def _begin(self, kind: Answering, inputs: int) -> None:
        """Make the loop and the tables."""
        from scanl.learning.online.scores import Scores

        learning, scoring = self.config.learning, self.config.scoring
        names = scoring.metrics or kind.metrics
        self.scores = Scores(kind, names, scoring.window, scoring.fade, scoring.drift)
        self.loop = make_loop(
            kind,
            inputs,
            self.config.stack,
            algorithm=learning.algorithm,
            algorithm_options=learning.algorithm_options,
            optimizer=learning.optimizer,
            lr=learning.lr,
            weight_decay=learning.weight_decay,
            clip=learning.clip,
            block=learning.block,
            compile_after=learning.compile_after,
            span=learning.span,
            fade=scoring.fade,
            waiting=self.config.stream.waiting,
            seed=self.config.run.seed,
            scores=self.scores,
        )
        self.kind, self.inputs = kind, inputs

    def _open_tables(self, sizes: list[int] | None) -> None:
        if self.folder is None or self.loop is None:
            return
        kind = self.kind
        answers = ["prediction", "probability"] if isinstance(kind, AnswerClass) else ["prediction"]
        if isinstance(kind, AnswerNumbers) and kind.count > 1:
            answers = [f"prediction {i}" for i in range(kind.count)]
        bank = ["rate"] if len(self.config.learning.lr) > 1 else []
        first, second = (None, None) if sizes is None else sizes
        predictions = Rows(self.folder.predictions, ["sample", "line", *answers, *bank], first)
        self.tables = [predictions, Rows(self.folder.scores, ["sample", *self.scores.get()], second)]

    def learn(self, progress: Callable[[int], None] = lambda count: None) -> bool:
        """Read the stream to its end. Return whether a signal ended it before. progress: takes the count of samples.

        Raises DataError at a line that cannot be read, unless such lines are skipped. The run is saved then.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(self.config.run.threads)
        frozen = gc.get_freeze_count()  # what the caller has frozen stays so
        if not frozen:
            gc.collect()
            gc.freeze()  # the library's objects are not walked through again and again
        try:
            with self._signals():
                self._each(progress)
            self._save()
            if not self.stopped and self.tables and self.loop is not None:
                self.tables[1].append([self.loop.count - 1, *self.scores.get().values()])
        except DataError:
            self._save()
            raise
        finally:
            if not frozen:
                gc.unfreeze()
            torch.set_num_threads(threads)
            with ExitStack() as tables:
                for table in self.tables:
                    tables.callback(table.close)
        return self.stopped

    def _each(self, progress: Callable[[int], None]) -> None:
        items, most = self.items(), self.config.stream.samples
        while not self.stopped:
            if self.loop is not None and most is not None and self.loop.count >= most:
                break
            try:
                self._reading = True
                item = next(items, None)
            except KeyboardInterrupt:
                self.stopped = True
                break
            finally:
                self._reading = False
            if item is None:
                break
            try:
                if isinstance(item, DataError):
                    raise item
                self._take(item)
            except DataError as error:
                self._refuse(error)
            if self.loop is not None:
                progress(self.loop.count)
            if time.monotonic() - self._saved > self.config.run.save_seconds:
                self._save()

    def _refuse(self, error: DataError) -> None:
        if self.config.stream.on_error == "stop":
            advice = "correct it, or give --on-error skip"
            raise DataError(f"learn: {error}; {advice}") from None
        self.skipped += 1
        if self.skipped <= MAX_SHOWN_LINES:
            self.report(f"{error}; skipped" + ("; no more are reported" if self.skipped == MAX_SHOWN_LINES else ""))

    def _take(self, item: Item) -> None:
        if self.loop is None:
            assert self.columns is not None
            self._begin(self._kind(self.columns.question), len(self.columns.names))
        assert self.loop is not None
        if not self.tables:
            self._open_tables(None)
        self._read(self.loop, item)
        self.lines = item.number
        if self.loop.count - 1 == self.config.learning.compile_after:
            for reason in dict.fromkeys(chain(*(learner.reasons for learner in self.loop.bank.learners))):
                self.report(f"it runs operation by operation, not as a kernel: {reason}")

    def _read(self, loop: Prequential, item: Item) -> None:
        chosen = self.config.stream
        ahead = self.columns.horizon if self.columns is not None else None
        truth = None if item.truth is None else self.kind.read(item.truth)
        if item.inputs is None:  # a truth alone
            if item.key in self.keys:
                self._learn(self.keys.pop(item.key), truth)
            elif loop.given_up:
                self.late += 1
                if self.late == 1:
                    self.report(
                        f"line {item.number}: the truth of {item.key!r} comes too late; such truths are counted"
                    )
            else:
                raise DataError(f"line {item.number}: no sample {item.key!r} waits for a truth")
            return
        if ahead is not None and len(self.ahead) == ahead:
            self._reveal(self.ahead.popleft(), truth)
        index = loop.count
        answer = loop.answer(item.inputs)
        while self.keys and next(iter(self.keys.values())) < loop.queue[0].index:  # it was given up
            del self.keys[next(iter(self.keys))]
        self._write(index, item.number, answer)
        if ahead is not None:
            self.ahead.append(index)
        elif truth is None and chosen.key is not None:
            self.keys[item.key] = index
        else:
            self._reveal(index, truth)

    def _reveal(self, index: int, truth: Any) -> None:
        """Let the truth of a sample be known, after the delay."""
        self.hidden.append((index, truth))
        if len(self.hidden) > self.config.stream.delay:
            self._learn(*self.hidden.popleft())

    def _learn(self, index: int, truth: Any) -> None:
        assert self.loop is not None
        if truth is None:
            self.loop.skip(index)
            return
        self.loop.learn(truth, index)
        self.scored += 1
        if self.scores.drift:
            self.drifts.append(index)
            self.report(f"drift at sample {index}")
        if self.tables and self.scored % self.config.scoring.score_every == 0:
            self.tables[1].append([index, *self.scores.get().values()])

    def _write(self, index: int, line: int, answer: Any) -> None:
        if not self.tables:
            return
        assert self.loop is not None
        if isinstance(answer, dict):
            best = likeliest(answer)
            fields = [best, answer.get(best)]
        else:
            fields = answer if isinstance(answer, list) else [answer]
        rates = self.config.learning.lr
        self.tables[0].append([index, line, *fields, *([rates[self.loop.bank.best]] if len(rates) > 1 else [])])

    # -- checkpoints

    def _save(self) -> None:
        self._saved = time.monotonic()
        if self.folder is None or self.loop is None:
            return
        columns = None if self.columns is None else vars(self.columns)
        self.folder.save(
            {
                "loop": self.loop.state_dict(),
                "scores": self.scores.state_dict(),
                "kind": [isinstance(self.kind, AnswerClass), getattr(self.kind, "count", 1), self.inputs],
                "classes": self.config.stream.classes,
                "columns": columns,
                "form": vars(self.form),
                "counts": [self.lines, self.skipped, self.scored, self.before, self.late],
                "ahead": list(self.ahead),
                "hidden": [[index, _plain(truth)] for index, truth in self.hidden],
                "keys": list(self.keys.items()),
                "drifts": self.drifts,
                "sizes": [table.settle() for table in self.tables],
            }
        )

    def _restore(self, stored: dict[str, Any]) -> None:
        """Go on from a checkpoint. Raises CheckpointError for one of another form, before a line is read."""
        assert self.folder is not None
        try:
            self._read_checkpoint(copy.deepcopy(stored), trial=True)
            self._read_checkpoint(stored)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(
                f"learn: {self.folder.checkpoint} is of another form: {' '.join(str(error).split())}; resume with the "
                "version that wrote it"
            ) from error
        self._open_tables(stored["sizes"] or None)

    def _read_checkpoint(self, stored: dict[str, Any], trial: bool = False) -> None:
        """trial: let the loop read a sample, too, and learn from it, so that what it cannot use is found."""
        self.columns = None if stored["columns"] is None else Columns(**stored["columns"])
        self.form, self.config.stream.classes = reading.Form(**stored["form"]), stored["classes"]
        is_class, count, inputs = stored["kind"]
        one = stored["loop"]["bank"]["learners"][0]["model"]
        sizes, classes = stored["sizes"], max(stored["classes"], 2)
        if sizes and not (len(sizes) == 2 and all(isinstance(size, int) and size >= 0 for size in sizes)):
            raise ValueError(f"its tables have the sizes {sizes}")
        outputs = max(classes, count) if is_class else count
        if inputs != len(stored["loop"]["scaling"]["mean"]) or all(outputs not in each.shape for each in one.values()):
            raise ValueError(f"it has {inputs} inputs and {outputs} outputs, which its model has not")
        self._begin(self._kind("class" if is_class else "number", count), inputs)
        assert self.loop is not None
        self.loop.load_state_dict(stored["loop"])
        self.scores.load_state_dict(stored["scores"])
        self.lines, self.skipped, self.scored, self.before, self.late = stored["counts"]
        self.ahead, self.keys = deque(stored["ahead"]), dict(stored["keys"])
        self.hidden = deque(
            (index, None if truth is None else self.kind.read(truth)) for index, truth in stored["hidden"]
        )
        self.drifts = list(map(int, stored["drifts"]))
        if trial:
            for sample in list(self.loop.queue):
                if sample.target is None:
                    self.loop.skip(sample.index)
            for _ in range(self.config.learning.block):
                answer = self.loop.answer([0.0] * inputs)
                self.loop.learn(next(iter(answer), "class") if isinstance(answer, dict) else answer)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """End at SIGINT or SIGTERM: at once while a line is awaited, else after the present sample."""

        def end(_number: int, _frame: Any) -> None:
            self.stopped = True
            if self._reading:
                raise KeyboardInterrupt

        try:
            before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread, which alone gets signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _plain(truth: Any) -> Any:
    return truth.tolist() if hasattr(truth, "tolist") else truth


def stderr(text: str) -> None:
    """Report a line to the user."""
    print(f"scanl: {text}", file=sys.stderr, flush=True)
