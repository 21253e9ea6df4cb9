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
from scanl.ops import exact
from scanl.serve.limits import MEBIBYTE, Limits
from scanl.serve.texts import Texts, Writing

log = logging.getLogger("scanl.serve")

Finish = Literal["stop", "length", "time", "error"]


class BusyError(ScanlError):
    """All streams are taken, or the server ends."""


class SessionBusyError(ScanlError):
    """A session has a request that has not ended."""


class Piece(NamedTuple):
    """A part of an answer: its text, its tokens, and why the answer ends with it, if it does."""

    text: str
    tokens: tuple[int, ...]
    finish: Finish | None = None


@dataclass(frozen=True)
class Wish:
    """What a request asks for. tokens: the prompt, at least one unless the session has some.   length: most new tokens.

    session: id of the session that it continues, None for none.
    """

    tokens: Sequence[int]
    length: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stops: Sequence[str] = ()
    session: str | None = None


@dataclass(eq=False)
class Answer:
    """An answer that is being written. deliver: called with each piece, in the engine's thread."""

    wish: Wish
    deliver: Callable[[Piece], None]
    session: Session | None
    writing: Writing
    deadline: float
    count: int = 0
    handle: int | None = field(default=None, init=False)  # of its stream, once it has joined


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

    def __init__(self, model: LanguageModel, texts: Texts, limits: Limits) -> None:
        self.model, self.texts, self.limits = model, texts, limits
        self._lock = threading.Lock()  # of the next four
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # the one that was idle for longest first
        self._taken: set[str] = set()  # sessions with an answer
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

    def submit(self, wish: Wish, deliver: Callable[[Piece], None]) -> Answer:
        """Begin an answer. Raises ConfigError for what the limits do not allow, BusyError and SessionBusyError."""
        if wish.length > self.limits.tokens:
            raise ConfigError(f"completions: max_tokens is {wish.length}, expected at most {self.limits.tokens}")
        odd = next((token for token in wish.tokens if not 0 <= token < self.model.vocab_size), None)
        if odd is not None:
            vocabulary = f"0 to {self.model.vocab_size - 1} because of the model"
            raise ConfigError(f"completions: prompt has token {odd}, expected {vocabulary}")
        with self._lock:
            if self._closed:
                raise BusyError("completions: the server is ending, expected a request to another one")
            if self._count >= self.limits.streams:
                raise BusyError(
                    f"completions: {self._count} answers are being written, expected fewer than "
                    f"{self.limits.streams}; try again later"
                )
            if wish.session in self._taken:
                raise SessionBusyError(
                    f"completions: session {wish.session!r} has an answer that has not ended, expected one at a time"
                )
            session = None if wish.session is None else self._sessions.get(wish.session)
            begun = 0 if session is None else len(session)
            if not begun and not wish.tokens:
                raise ConfigError("completions: prompt is empty, expected at least one token")
            total = begun + len(wish.tokens) + wish.length
            if total > self.limits.context:
                raise ConfigError(
                    f"completions: session, prompt and max_tokens are {total} tokens, expected at most "
                    f"{self.limits.context}"
                )
            if wish.session is not None:
                self._taken.add(wish.session)
                session = self._sessions.pop(wish.session, None) or Session(self.model, store=self._store)
            self._count += 1
        writing = Writing(self.texts.decoder(wish.tokens), wish.stops, self.texts.ends)
        answer = Answer(wish, deliver, session, writing, time.monotonic() + self.limits.seconds)
        self._commands.put(lambda: self._join(answer))
        return answer

    def cancel(self, answer: Answer) -> None:
        """End an answer whose client has gone. Nothing happens if it has ended."""
        self._commands.put(lambda: self._leave(answer))

    def close(self) -> None:
        """Take no further answers, write those that have begun to their ends, and end the thread."""
        with self._lock:
            self._closed = True
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        with exact():
            while self._obey() or self._answers:
                try:
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
        for handle, token in self._streams.step().items():
            answer = self._answers[handle]
            answer.count += 1
            text, ends = answer.writing.add(token)
            finish: Finish | None = "stop" if ends else "length" if answer.count == answer.wish.length else None
            if finish == "length":
                text += answer.writing.end()
            answer.deliver(Piece(text, (token,), finish))
            if finish is not None:
                self._leave(answer)
        now = time.monotonic()
        for answer in [answer for answer in self._answers.values() if answer.deadline < now]:
            answer.deliver(Piece(answer.writing.end(), (), "time"))
            self._leave(answer)

    def _join(self, answer: Answer) -> None:
        wish = answer.wish
        options = {name: getattr(wish, name) for name in ("temperature", "top_k", "top_p", "seed")}
        try:
            answer.handle = self._streams.join(wish.tokens, session=answer.session, **options)
        except Exception:
            log.exception("a request could not begin")
            answer.deliver(Piece("", (), "error"))
            self._release(answer, answer.session)
            return
        self._answers[answer.handle] = answer

    def _leave(self, answer: Answer) -> None:
        if answer.handle is None or self._answers.pop(answer.handle, None) is None:
            return
        self._release(answer, self._streams.leave(answer.handle))

    def _fail(self) -> None:
        """End all answers after an error. Their sessions are lost."""
        answers, self._answers = list(self._answers.values()), {}
        self._streams = Streams(self.model, store=self._store)
        for answer in answers:
            answer.deliver(Piece("", (), "error"))
            self._release(answer, None)

    def _release(self, answer: Answer, session: Session | None) -> None:
        with self._lock:
            self._count -= 1
            if answer.wish.session is not None:
                self._taken.remove(answer.wish.session)
                if session is not None:
                    self._sessions[answer.wish.session] = session
                while len(self._sessions) > self.limits.sessions:
                    self._sessions.popitem(last=False)
