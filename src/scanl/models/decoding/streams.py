"""Many texts at once: streams of any age share a batch, and join and leave at any step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scanl.errors import ConfigError, ScanlError, ShapeError
from scanl.layers.state import State, cat, index
from scanl.models.decoding.cursor import as_text
from scanl.models.decoding.decodable import Decodable
from scanl.models.decoding.sampling import Choice, as_generator, check_largest, check_options
from scanl.models.decoding.session import Session, store_of
from scanl.models.decoding.state_store import StateStore
from scanl.whole import whole_number


@dataclass(eq=False)
class DecodedText:
    """A text that grows by a token at each step, how its tokens are drawn, and the last of them."""

    session: Session
    choice: Choice
    token: int = 0


class StreamsError(ScanlError):
    """Some streams cannot go on. errors: the reason of each, by its handle.   tokens: of the others in this step."""

    def __init__(self, errors: dict[int, Exception], tokens: dict[int, int]) -> None:
        super().__init__("; ".join(f"stream {handle}: {error}" for handle, error in errors.items()))
        self.errors, self.tokens = errors, tokens


class Streams:
    """Texts that a model continues together, a token each at each step.

        streams = Streams(model)
        a = streams.join(prompt, temperature=0)
        tokens = streams.step()  # {a: token}
        b = streams.join(other, seed=1)
        tokens = streams.step()  # {a: token, b: token}
        session = streams.leave(a)

    The tokens of a stream are those that `generate` draws with the same options, whatever streams are beside it; up to
    rounding, and within `exact` to the bit. A prompt is read alone, in pieces, between the steps of the others. What
    the store knows of its beginning is not read again. One thread at a time may use an object of this class.

    Args:
        model: its weights must not change meanwhile.
        store: of states by their texts; None for a new one in memory.
        piece: tokens of prompts that a step reads at most. Fewer let the other streams wait less.
    """

    def __init__(self, model: Decodable, *, store: StateStore | None = None, piece: int = 256) -> None:
        self.model = model
        self.piece = whole_number("streams", "piece", piece, 1)
        self.store = store_of("streams", model, store)
        self._next = 0
        self._waiting: dict[int, DecodedText] = {}  # their prompts are not read to the end
        self._failed: dict[int, DecodedText] = {}
        self._batch: list[DecodedText] = []  # with those that have left or failed since the last step
        self._rows: dict[int, int] = {}  # in the batch, in order
        self._state: State = None  # of the batch

    def __len__(self) -> int:
        """Return the number of streams."""
        return len(self._streams())

    @property
    def _device(self) -> torch.device:
        return self.model.device

    def _streams(self) -> list[DecodedText]:
        return [*self._waiting.values(), *self._failed.values(), *(self._batch[row] for row in self._rows.values())]

    def join(
        self,
        prompt: Tensor | Sequence[int] = (),
        *,
        session: Session | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | torch.Generator | None = None,
    ) -> int:
        """Add a stream that continues a prompt (T,) or (1, T), and return its handle. Nothing is read before `step`.

        session: the text to which the prompt is added, which may then be empty. The session is the stream's until it
        leaves.   temperature, top_k, top_p, seed: as in `LanguageModel.generate`.
        """
        check_options("join", temperature, top_k, top_p)
        choice = Choice(temperature, top_k, top_p, as_generator("join", seed, self._device))
        text = as_text(self.model, "join", "prompt", prompt)
        if not text and (session is None or not len(session)):
            raise ShapeError("join: prompt has no token, expected at least 1")
        if session is None:
            session = Session(self.model, text, store=self.store)
        elif session.model is not self.model:
            raise ConfigError("join: session is of another model, expected Session(model) of this one")
        elif any(session is stream.session for stream in self._streams()):
            raise ConfigError("join: session is that of another stream, expected session.fork()")
        else:
            session.keep()
            session.append(text)
        self._next += 1
        self._waiting[self._next] = DecodedText(session, choice)
        return self._next

    @torch.inference_mode()
    def step(self) -> dict[int, int]:
        """Return the next token of each stream by its handle. A stream whose prompt is not read to the end has none.

        Prompts are read in the order in which the streams joined, `piece` tokens in all.

        Raises StreamsError, which has the tokens of the others, when a stream cannot go on: its logits are not finite,
        or its prompt cannot be read. Such a stream takes part in no further step; `leave` returns its session.
        """
        errors: dict[int, Exception] = {}
        tokens = self._step_batch(errors) | self._read_prompts(errors)
        if errors:
            raise StreamsError(errors, tokens)
        return tokens

    def leave(self, handle: int) -> Session:
        """Remove a stream, and return its session: the text with all tokens so far, and its state."""
        for streams in (self._waiting, self._failed):
            if handle in streams:
                return streams.pop(handle).session
        if handle not in self._rows:
            raise ConfigError(f"leave: handle is {handle!r}, expected that of a stream which has joined and not left")
        self._settle(handle)
        session = self._batch[self._rows.pop(handle)].session
        session.keep()
        return session

    def _step_batch(self, errors: dict[int, Exception]) -> dict[int, int]:
        self._remove_rows()
        if not self._batch:
            return {}
        pending = torch.tensor([[stream.token] for stream in self._batch], device=self._device)
        logits, self._state = self.model.decode_logits(pending, self._state)
        likeliest, largest = logits.argmax(-1).tolist(), logits.amax(-1).tolist()
        for row, (handle, stream) in enumerate(zip(list(self._rows), self._batch, strict=True)):
            try:
                check_largest(largest[row])
                greedy = stream.choice.temperature == 0
                stream.token = likeliest[row] if greedy else int(stream.choice(logits[row : row + 1]))
            except Exception as error:  # of this row alone; `step` raises it once the others have their tokens
                errors[handle], self._failed[handle] = error, stream
                del self._rows[handle]
                continue
            stream.session.take(stream.token)
        for handle, row in self._rows.items():
            session = self._batch[row].session
            if (len(session) - 1) % session.every == 0:
                self._settle(handle)
        return {handle: self._batch[row].token for handle, row in self._rows.items()}

    def _read_prompts(self, errors: dict[int, Exception]) -> dict[int, int]:
        """Read prompts. A stream whose prompt has been read enters the batch with its first token."""
        tokens, states, room = {}, [], self.piece
        for handle, stream in list(self._waiting.items()):
            unread = stream.session.pending.shape[1]
            try:
                if unread > room:
                    stream.session.read(room)
                    break
                stream.token = int(stream.session.draw(stream.choice))
            except Exception as error:  # of this stream alone, as in a row of the batch
                errors[handle], self._failed[handle] = error, self._waiting.pop(handle)
                continue
            tokens[handle] = stream.token
            states.append(stream.session.state)
            del self._waiting[handle]
            self._rows[handle] = len(self._batch)
            self._batch.append(stream)
            room -= unread
        if states:
            self._state = cat(states if self._state is None else [self._state, *states])
        return tokens

    def _settle(self, handle: int) -> None:
        """Give a stream's session its row of the batch's state."""
        row = self._rows[handle]
        session = self._batch[row].session
        session.commit(index(self._state, [row]), len(session) - 1)

    def _remove_rows(self) -> None:
        """Remove the rows of streams that have left."""
        rows = list(self._rows.values())
        if len(rows) < len(self._batch):
            self._state = index(self._state, rows) if rows else None
            self._batch = [self._batch[row] for row in rows]
            self._rows = {handle: row for row, handle in enumerate(self._rows)}
