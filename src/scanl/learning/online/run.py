"""A run of `scanl learn`: from a stream to predictions, scores and checkpoints."""

import copy
import gc
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch

from scanl.errors import CheckpointError, DataError
from scanl.learning.online.columns import Item
from scanl.learning.online.config import LearnConfig
from scanl.learning.online.folder import OnlineFolder, RowFile
from scanl.learning.online.late import Known, LateTruths
from scanl.learning.online.online import Online
from scanl.learning.online.prequential import Prequential
from scanl.learning.online.stream import MAX_SHOWN_LINES, Report, Stream
from scanl.learning.run.config import make_stack


class OnlineRun:
    """A run of `scanl learn`. report: takes a line for the user.

    Attributes: `stream`; `loop`, `scores` and `late`, once the first sample has been read; `skipped` lines; samples
    that were `scored`; truths that came `too_late`; `drifts`, the samples where the errors changed.
    """

    loop: Prequential | None = None
    scores: Any
    late: LateTruths

    def __init__(self, config: LearnConfig, folder: OnlineFolder | None, report: Report) -> None:
        config.check()
        self.config, self.folder, self.report = config, folder, report
        self._notes: list[str] = []  # about the stream, until it is known that it can be learnt from
        self.stream = Stream(config, self._note)
        self.skipped = self.scored = self.too_late = 0
        self.drifts: list[int] = []
        self.tables: list[RowFile] = []
        self.stopped = self._reading = False
        self._saved = time.monotonic()
        stored = None if folder is None else folder.stored()
        if stored is not None:
            self._restore(stored)

    def _note(self, line: str) -> None:
        self._notes.append(line)
        if self.loop is not None:
            self._tell()

    def _tell(self) -> None:
        for line in self._notes:
            self.report(line)
        self._notes.clear()

    def _begin(self) -> Prequential:
        """Make the loop, by what the stream says of its samples."""
        from scanl.learning.online.scores import Scores

        stream, scoring, kind = self.config.stream, self.config.scoring, self.stream.kind()
        names = scoring.metrics or kind.metrics
        self.scores = Scores(kind, names, scoring.window, scoring.fade, scoring.drift)
        self.late = LateTruths(self.stream.horizon, stream.delay, stream.key is not None)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.config.run.seed)
            stack, learning = make_stack(self.config.stack), vars(self.config.learning)
            learner = Online(stack, kind, **learning, fade=scoring.fade, waiting=stream.waiting, scores=self.scores)
        self.loop = learner.begin(self.stream.inputs)
        self._tell()
        return self.loop

    def _open_tables(self, sizes: list[int] | None) -> None:
        if self.folder is None or self.loop is None:
            return
        bank = ["rate"] if len(self.config.learning.lr) > 1 else []
        first, second = (None, None) if sizes is None else sizes
        predictions = RowFile(self.folder.predictions, ["sample", "line", *self.loop.kind.columns, *bank], first)
        self.tables = [predictions, RowFile(self.folder.scores, ["sample", *self.scores.get()], second)]

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
            self._tell()
            self._save()
            if not self.stopped and self.tables and self.loop is not None:
                self._write_scores(self.loop.count - 1)
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
        items, most = self.stream.items(), self.config.stream.samples
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
        loop = self.loop or self._begin()
        if not self.tables:
            self._open_tables(None)
        self._read(loop, item)
        self.stream.lines = item.number
        if loop.count - 1 == self.config.learning.compile_after:
            for reason in dict.fromkeys(chain(*(learner.reasons for learner in loop.bank.learners))):
                self.report(f"it runs operation by operation, not as a kernel: {reason}")

    def _read(self, loop: Prequential, item: Item) -> None:
        """Answer the sample of a line, and learn the truths that become known by it."""
        truth = None if item.truth is None else loop.kind.read(item.truth)
        if item.inputs is None:  # a truth alone
            if item.key in self.late.keys:
                self._learn(loop, [(self.late.keys.pop(item.key), truth)])
            elif not loop.given_up:
                raise DataError(f"line {item.number}: no sample {item.key!r} waits for a truth")
            else:
                self.too_late += 1
                if self.too_late == 1:
                    late = f"line {item.number}: the truth of {item.key!r} comes too late"
                    self.report(f"{late}; such truths are counted")
            return
        self._learn(loop, self.late.before(truth))
        index, answer = loop.count, loop.answer(item.inputs)
        self.late.forget(loop.queue[0].index)
        self._write(loop, index, item.number, answer)
        self._learn(loop, self.late.after(index, truth, item.key))

    def _learn(self, loop: Prequential, known: Known) -> None:
        for index, truth in known:
            if truth is None:
                loop.skip(index)
                continue
            loop.learn(truth, index)
            self.scored += 1
            if self.scores.drift:
                self.drifts.append(index)
                self.report(f"drift at sample {index}")
            if self.tables and self.scored % self.config.scoring.score_every == 0:
                self._write_scores(index)

    def _write_scores(self, index: int) -> None:
        self.tables[1].append([index, *self.scores.get().values()])

    def _write(self, loop: Prequential, index: int, line: int, answer: Any) -> None:
        if not self.tables:
            return
        rates = self.config.learning.lr
        rate = [rates[loop.bank.best]] if len(rates) > 1 else []
        self.tables[0].append([index, line, *loop.kind.fields(answer), *rate])

    def _save(self) -> None:
        self._saved = time.monotonic()
        if self.folder is None or self.loop is None:
            return
        self.folder.save(
            {
                "loop": self.loop.state_dict(),
                "scores": self.scores.state_dict(),
                **self.stream.state_dict(),
                **self.late.state_dict(),
                "counts": [self.stream.lines, self.skipped, self.scored, self.stream.before, self.too_late],
                "drifts": self.drifts,
                "sizes": [table.settle() for table in self.tables],
            }
        )

    def _restore(self, stored: dict[str, Any]) -> None:
        """Go on from a checkpoint. Raises CheckpointError for one of another form, before a line is read."""
        assert self.folder is not None
        try:
            self._try(self._read_checkpoint(copy.deepcopy(stored)))
            self._read_checkpoint(stored)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(
                f"learn: {self.folder.checkpoint} is of another form: {' '.join(str(error).split())}; resume with the "
                "version that wrote it"
            ) from error
        self._open_tables(stored["sizes"] or None)

    def _read_checkpoint(self, stored: dict[str, Any]) -> Prequential:
        is_class, count, inputs = stored["kind"]
        one = stored["loop"]["bank"]["learners"][0]["model"]
        sizes, classes = stored["sizes"], max(stored["classes"], 2)
        if sizes and not (len(sizes) == 2 and all(isinstance(size, int) and size >= 0 for size in sizes)):
            raise ValueError(f"its tables have the sizes {sizes}")
        outputs = max(classes, count) if is_class else count
        if inputs != len(stored["loop"]["scaling"]["mean"]) or all(outputs not in each.shape for each in one.values()):
            raise ValueError(f"it has {inputs} inputs and {outputs} outputs, which its model has not")
        self.stream.load_state_dict(stored)
        loop = self._begin()
        loop.load_state_dict(stored["loop"])
        self.scores.load_state_dict(stored["scores"])
        self.stream.lines, self.skipped, self.scored, self.stream.before, self.too_late = stored["counts"]
        self.late.ahead, self.late.keys = deque(stored["ahead"]), dict(stored["keys"])
        hidden = [(index, None if truth is None else loop.kind.read(truth)) for index, truth in stored["hidden"]]
        self.late.hidden = deque(hidden)
        self.drifts = list(map(int, stored["drifts"]))
        return loop

    def _try(self, loop: Prequential) -> None:
        """Read a sample and learn from it, so that an error in a checkpoint is found."""
        for sample in list(loop.queue):
            if sample.target is None:
                loop.skip(sample.index)
        for _ in range(self.config.learning.block):
            answer = loop.answer([0.0] * self.stream.inputs)
            loop.learn(next(iter(answer), "class") if isinstance(answer, dict) else answer)

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


def stderr(text: str) -> None:
    """Report a line to the user."""
    print(f"scanl: {text}", file=sys.stderr, flush=True)
