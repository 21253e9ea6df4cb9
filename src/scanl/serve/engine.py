"""The thread in which a model writes all answers of a server, a token of each at a time."""

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from scanl.errors import ConfigError, ScanlError
from scanl.models import LanguageModel, Session, StateStore, Streams
from scanl.models.decoding.streams import StreamsError
from scanl.ops import exact
from scanl.serve.limits import MEBIBYTE, Limits
from scanl.serve.texts import CONTEXT, VocabularyText, Writing

log = logging.getLogger("scanl.serve")

Finish = Literal["stop", "length", "time", "error"]


class BusyError(ScanlError):
    """All streams are taken, or the server ends."""


class SessionBusyError(ScanlError):
    """A session has a request that has not ended."""


class AnswerPiece(NamedTuple):
    """A part of an answer: its text, its tokens, and why the answer ends with it, if it does.

    error: of an answer that ends with "error"; None when the reason is in the log alone.
    """

    text: str
    tokens: tuple[int, ...]
    finish: Finish | None = None
    error: ScanlError | None = None


@dataclass(frozen=True)
class Wish:
    """A request. prompt: a text or tokens; empty for the beginning of a text, or to continue the session.

    length: most new tokens.   session: id of the session that it continues, None for none.
    is_whole: whether its client sees the answer only once it has ended.
    """

    prompt: str | Sequence[int]
    length: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stops: Sequence[str] = ()
    session: str | None = None
    is_whole: bool = False


@dataclass(eq=False)
class Answer:
    """An answer that is being written. deliver: called with each piece, in the engine's thread.

    prompt: its tokens.   begun: tokens of the session before them.
    """

    wish: Wish
    deliver: Callable[[AnswerPiece], None]
    session: Session | None
    begun: int
    prompt: list[int]
    writing: Writing
    deadline: float
    count: int = 0
    handle: int | None = field(default=None, init=False)  # of its stream, once it has joined
    is_over: bool = field(default=False, init=False)
    ended: int = field(default=0, init=False)  # tokens of the session when it ended


class Engine:
    """Writes the answers of a server: one batch, in which each answer is a stream that joins and leaves at any step.

    The tokens of an answer are those that `generate` draws with the same options, to the bit, whatever other answers
    there are: the thread runs within `scanl.exact`.

    `submit` and `cancel` may be called from any thread.

    Args:
        model: its weights must not change meanwhile.
        texts: how its tokens are written.
        limits: of streams, sessions, tokens, time and memory.
    """

    def __init__(self, model: LanguageModel, texts: VocabularyText, limits: Limits) -> None:
        self.model, self.texts, self.limits = model, texts, limits
        self._lock = threading.Lock()  # of the next four
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # the one that was idle for longest first
        self._taken: set[str | None] = set()  # sessions with an answer
        self._count = 0  # answers that have not ended
        self._closed = False
        self._store = StateStore(model, limit=limits.memory * MEBIBYTE)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: dict[int, Answer] = {}  # by the handle of the stream
        self._streams = Streams(model, store=self._store)
        self._thread = threading.Thread(target=self._run, name="scanl.serve", daemon=True)
        self._thread.start()

    @property
    def active(self) -> int:
        """Number of answers that have not ended."""
        return self._count

    def submit(self, wish: Wish, deliver: Callable[[AnswerPiece], None]) -> Answer:
        """Begin an answer. Raises ConfigError for what the limits do not allow, BusyError and SessionBusyError."""
        if wish.length > self.limits.tokens:
            raise ConfigError(f"completions: max_tokens is {wish.length}, expected at most {self.limits.tokens}")
        with self._lock:
            self._check_open()
            if self._count >= self.limits.streams:
                raise BusyError(
                    f"completions: {self._count} answers are being written, expected fewer than "
                    f"{self.limits.streams}; try again later"
                )
            if wish.session in self._taken:
                raise SessionBusyError(
                    f"completions: session {wish.session!r} has an answer that has not ended, expected one at a time"
                )
            session = None
            if wish.session is not None:
                self._taken.add(wish.session)
                session = self._sessions.get(wish.session) or Session(self.model, store=self._store)
            self._count += 1
        try:
            begun, before = (0, []) if session is None else (len(session), session.last(CONTEXT))
            prompt = self._prompt(wish, begun)
            writing = Writing(self.texts.decoder([*before, *prompt]), wish.stops, self.texts.ends)
            answer = Answer(wish, deliver, session, begun, prompt, writing, time.monotonic() + self.limits.seconds)
            with self._lock:
                self._check_open()
                if wish.session is not None:
                    self._sessions.pop(wish.session, None)
                self._commands.put(lambda: self._join(answer))
        except BaseException:
            with self._lock:
                self._count -= 1
                self._taken.discard(wish.session)
            raise
        return answer

    def _prompt(self, wish: Wish, begun: int) -> list[int]:
        """Return the tokens of a prompt. Raises ConfigError for what the model or the limits do not allow."""
        prompt = self.texts.encode(wish.prompt, not begun) if isinstance(wish.prompt, str) else list(wish.prompt)
        if not begun and not wish.prompt:
            prompt = list(self.texts.start)
        odd = next((token for token in prompt if not 0 <= token < self.model.vocab_size), None)
        if odd is not None:
            vocabulary = f"0 to {self.model.vocab_size - 1} because of the model"
            raise ConfigError(f"completions: prompt has token {odd}, expected {vocabulary}")
        if not begun and not prompt:
            raise ConfigError("completions: prompt is empty, expected at least one token")
        total = begun + len(prompt) + wish.length
        if total > self.limits.context:
            raise ConfigError(
                f"completions: session, prompt and max_tokens are {total} tokens, expected at most "
                f"{self.limits.context}"
            )
        return prompt

    def _check_open(self) -> None:
        if self._closed:
            raise BusyError("completions: the server is ending, expected a request to another one")

    def cancel(self, answer: Answer, seen: int | None = None) -> None:
        """End an answer whose client has gone after so many tokens, None for before any. Its session keeps these alone.

        The answer may have ended: only its session, unless that has gone on, then loses what was not seen.
        """
        if answer.is_over:
            self._cut_idle(answer, seen)
        else:
            self._commands.put(lambda: self._abandon(answer, seen))

    def close(self) -> None:
        """Take no further answers, write those that have begun to their ends, and end the thread."""
        with self._lock:
            self._closed = True
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        with exact():
            while True:
                try:
                    if not self._obey() and not self._answers:
                        return
                    self._step()
                except Exception:  # of one step, which has no place for a single answer: all end, and the server lives
                    log.exception("a step failed; its answers end")
                    self._fail()

    def _obey(self) -> bool:
        """Run the commands that have come; wait for one when nothing is being written. False once closed."""
        while not (self._closed and self._commands.empty()):
            try:
                command = self._commands.get(block=not self._answers)
            except queue.Empty:
                return True
            if command is not None:
                command()
        return False

    def _step(self) -> None:
        try:
            tokens = self._streams.step()
        except StreamsError as failure:
            tokens = failure.tokens
            for handle, error in failure.errors.items():
                self._end_by(self._answers[handle], error)
        now = time.monotonic()
        for handle, answer in list(self._answers.items()):
            try:
                if handle in tokens:
                    self._write(answer, tokens[handle])
                if answer.deadline < now and not answer.is_over:
                    self._end(
                        answer, AnswerPiece(answer.writing.end(), (), "stop" if answer.writing.is_stopped else "time")
                    )
            except Exception as error:  # of this answer's text
                self._end_by(answer, error)

    def _write(self, answer: Answer, token: int) -> None:
        answer.count += 1
        text, ends = answer.writing.add(token)
        if not ends and answer.count < answer.wish.length:
            answer.deliver(AnswerPiece(text, (token,)))
            return
        if not ends:
            text += answer.writing.end()
        self._end(answer, AnswerPiece(text, (token,), "stop" if ends or answer.writing.is_stopped else "length"))

    def _join(self, answer: Answer) -> None:
        wish = answer.wish
        options = {name: getattr(wish, name) for name in ("temperature", "top_k", "top_p", "seed")}
        try:
            answer.handle = self._streams.join(answer.prompt, session=answer.session, **options)
        except Exception as error:
            self._end_by(answer, error)
        else:
            self._answers[answer.handle] = answer

    def _end_by(self, answer: Answer, error: Exception) -> None:
        """End one answer by an error, which its client has as one line."""
        if not isinstance(error, ScanlError):
            log.error("an answer ends by an error", exc_info=error)
        self._end(answer, AnswerPiece("", (), "error", error if isinstance(error, ScanlError) else None))

    def _end(self, answer: Answer, last: AnswerPiece) -> None:
        """Free an answer's place and its session, and then deliver its last piece: its client may use both at once."""
        is_unseen = last.finish == "error" and (answer.wish.is_whole or not answer.count)
        try:
            self._leave(answer, None if is_unseen else answer.count)
        finally:
            answer.deliver(last)

    def _abandon(self, answer: Answer, seen: int | None) -> None:
        if answer.is_over:
            self._cut_idle(answer, seen)
        else:
            self._leave(answer, seen)

    def _leave(self, answer: Answer, seen: int | None) -> None:
        if answer.is_over:
            return
        try:
            if answer.handle is not None and self._answers.pop(answer.handle, None) is not None:
                self._streams.leave(answer.handle)
        finally:
            with self._lock:
                answer.is_over = True
                self._count -= 1
                self._taken.discard(answer.wish.session)
                self._cut(answer, seen)

    def _cut_idle(self, answer: Answer, seen: int | None) -> None:
        """Cut the session of an answer that has ended, unless it has gone on."""
        with self._lock:
            name, session = answer.wish.session, answer.session
            if session is None or name is None or name in self._taken or self._sessions.get(name) is not session:
                return
            if len(session) == answer.ended:
                self._cut(answer, seen)

    def _cut(self, answer: Answer, seen: int | None) -> None:
        """Keep of a session what its client has seen in the first `seen` tokens: neither letters of a stop, nor those
        that were held back. None: the request has not been."""
        session, name = answer.session, answer.wish.session
        if session is None or name is None:
            return
        count, text = (-len(answer.prompt), "") if seen is None else answer.writing.kept(seen)
        session.rewind(answer.begun + len(answer.prompt) + count)
        session.append(self.texts.encode(text, begins=False) if text else [])
        answer.ended = len(session)
        self._sessions.pop(name, None)
        if len(session):
            self._sessions[name] = session
        while len(self._sessions) > self.limits.sessions:
            self._sessions.popitem(last=False)

    def _fail(self) -> None:
        """End all answers after an error that is of none of them. Their sessions keep what their clients have seen."""
        answers, self._answers = list(self._answers.values()), {}
        self._streams = Streams(self.model, store=self._store)
        for answer in answers:
            try:
                self._end(answer, AnswerPiece("", (), "error"))
            except Exception:
                log.exception("a session is lost")
