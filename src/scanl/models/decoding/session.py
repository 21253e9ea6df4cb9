"""A conversation with a language model: each turn costs its own tokens, and any earlier token can be gone back to."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from scanl.errors import CheckpointError, ConfigError
from scanl.layers.state import State
from scanl.models.decoding.cursor import Cursor, as_text
from scanl.models.decoding.decodable import Decodable
from scanl.models.decoding.state_files import ReadText, read_text, write_text
from scanl.models.decoding.state_store import StateStore
from scanl.whole import whole_number


class Session(Cursor):
    """A text of a model that goes on turn by turn, in a batch of one. `generate` continues it:

        session = Session(model)
        for token in model.generate(prompt, session=session, max_new_tokens=50): ...
        for token in model.generate(answer, session=session, max_new_tokens=50): ...  # reads `answer` alone

    It holds all tokens, 4 bytes each, and the state after them, but for the last ones, which are pending. States along
    the way are in the store: the state before each turn, and one about every `every` tokens.

    Args:
        model: its weights must not change while the session lives.
        tokens: the text so far, (n,) or (1, n); of its beginning, what the store knows is not read again.
        store: where the states along the way are kept; None for a new one in memory. Sessions may share a store.
        every: number of tokens between states in the store. A prompt is read in pieces of this length.
    """

    def __init__(
        self,
        model: Decodable,
        tokens: Tensor | Sequence[int] = (),
        *,
        store: StateStore | None = None,
        every: int = 256,
    ) -> None:
        self.every = whole_number("session", "every", every, 1)
        text = as_text(model, "session", "tokens", tokens)
        self.store = store_of("session", model, store)
        length, state = self.store.longest(text[:-1])
        super().__init__(model, text, state, length)

    def read(self, limit: int | None = None) -> None:
        """Read pending tokens, at most `limit`, but for the last of the text. The next turn then begins sooner."""
        limit = len(self) if limit is None else whole_number("read", "limit", limit)
        with torch.inference_mode():
            self._read_until(min(self._length + limit, len(self) - 1))

    def rewind(self, length: int) -> None:
        """Go back to the first `length` tokens. What follows the last state in the store is pending again."""
        length = whole_number("rewind", "length", length)
        if length > len(self):
            raise ConfigError(f"rewind: length is {length}, expected at most {len(self)}, the length of the text")
        del self._tokens[length:]
        self._ahead = None
        if self._length >= length:
            self._length, self._state = self.store.longest(self._tokens[:-1])

    def fork(self) -> Self:
        """Return another session with the same text, which goes on by itself. They share the store."""
        forked = type(self)(self.model, store=self.store, every=self.every)
        forked._tokens = self._tokens[:]
        forked._state, forked._length = self._state, self._length
        return forked

    def keep(self) -> None:
        """Put the present state into the store. `generate` does so before it adds a prompt."""
        if self._length:
            self.store.put(self._tokens[: self._length], self._state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the text and its state to a safetensors file, whole or not at all, with a digest.

        Raises CheckpointError when it cannot be written.
        """
        write_text(Path(path), ReadText(self._tokens, self._length, self._state), self.store.digest)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: Decodable,
        *,
        store: StateStore | None = None,
        every: int = 256,
    ) -> Self:
        """Read a session that `save` wrote. model, store, every: as for a new one.

        Raises CheckpointError when the file is damaged, or of another model or other weights.
        """
        session = cls(model, store=store, every=every)
        text = read_text(Path(path), model, session.store.digest, "session")
        if text.length and text.length == len(text.tokens):
            raise CheckpointError(
                f"session: {path} has length {text.length}, expected less than its {text.length} tokens"
            )
        session._tokens, session._length, session._state = text
        return session

    def commit(self, state: State, length: int) -> None:
        passed = length // self.every > self._length // self.every
        super().commit(state, length)
        if passed:
            self.keep()

    def _read_pieces(self) -> None:
        self._read_until((len(self) - 1) // self.every * self.every)

    def _read_until(self, end: int) -> None:
        while self._length < end:
            stop = min(end, (self._length // self.every + 1) * self.every)
            tokens = self._row(self._tokens[self._length : stop])
            _, state = self.model.next_logits(tokens, self._state)
            self.commit(state, stop)


def store_of(who: str, model: Decodable, store: StateStore | None) -> StateStore:
    """Return the store, or a new one. Raises ConfigError for the store of another model."""
    if store is not None and store.model is not model:
        raise ConfigError(f"{who}: store is of another model, expected StateStore(model) of this one")
    return StateStore(model) if store is None else store
