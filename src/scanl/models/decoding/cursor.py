"""A text that a model reads and continues: its tokens, and the state before those that are pending."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scanl.errors import ShapeError
from scanl.layers.state import State, map_leaves
from scanl.models.decoding.decodable import Decodable
from scanl.models.decoding.drafts import ROWS, Draft, Drafting
from scanl.models.decoding.generation import Generation, without_gradients
from scanl.models.decoding.prefix_tree import Text
from scanl.models.decoding.sampling import Choice, check_largest


@dataclass
class DraftLogits:
    """Logits (1 + k, V) after the text and after each of k drafted tokens, and the state after the last of them.

    used: how many of the drafted tokens the text has taken.
    """

    logits: Tensor
    drafted: list[int]
    state: State
    used: int = 0


class Cursor:
    """A text of one row. The state is that after its first tokens; those that follow are pending, and at least one is
    while there are any tokens.

    A state is a value, so to take drafted tokens back is to keep the state before them. What was right of them becomes
    pending, and is read again together with the next draft: on a CPU few more tokens take little more time.
    """

    def __init__(self, model: Decodable, tokens: Text, state: State = None, length: int = 0) -> None:
        self.model = model
        self._tokens = tokens
        self._state, self._length = state, length  # number of tokens that it has read
        self._ahead: DraftLogits | None = None

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self._tokens)

    @property
    def tokens(self) -> Tensor:
        """The text, (n,) int64."""
        return torch.tensor(self._tokens, dtype=torch.int64)

    @property
    def pending(self) -> Tensor:
        """The tokens that the state has not read, (1, p) int64, on the model's device."""
        return self._row(self._tokens[self._length :])

    @property
    def state(self) -> State:
        """A copy of the state before the pending tokens."""
        return map_leaves(Tensor.clone, self._state)

    def last(self, count: int) -> list[int]:
        """Return the last `count` tokens, or all if there are fewer."""
        return self._tokens[max(0, len(self) - count) :].tolist()

    def append(self, tokens: Tensor | Sequence[int]) -> None:
        """Add tokens to the text. They are pending."""
        self._tokens.extend(as_text(self.model, "append", "tokens", tokens))
        self._ahead = None

    def take(self, token: int) -> None:
        """Add a token that was drawn elsewhere, from logits of this text."""
        self._tokens.append(token)
        self._ahead = None

    def draw(self, choice: Choice, drafting: Drafting | None = None) -> Tensor:
        """Return the next token (1,), which is then the last of the text.

        Raises DivergenceError, and leaves the text as it is, when its logits are not finite.
        """
        ahead = self._ahead or self._look_ahead(choice, drafting)
        logits = ahead.logits[ahead.used : ahead.used + 1]
        check_largest(float(logits.amax()))
        token = choice(logits)
        self._tokens.append(int(token))
        self._ahead = None
        if ahead.used == len(ahead.drafted):
            self.commit(ahead.state, len(self._tokens) - 1)
        elif int(token) == ahead.drafted[ahead.used]:
            ahead.used += 1
            self._ahead = ahead
            return token
        if drafting is not None and ahead.drafted:
            drafting.learn(len(ahead.drafted), ahead.used)
        return token

    def commit(self, state: State, length: int) -> None:
        """Go on to the state after the first `length` tokens."""
        self._state, self._length = state, length

    def _look_ahead(self, choice: Choice, drafting: Drafting | None) -> DraftLogits:
        self._read_pieces()
        pending, drafted = self._tokens[self._length :], list[int]()
        if drafting is not None:
            device = self.model.device
            drafted = drafting.propose(self._tokens, ROWS - len(pending), choice.ahead(device))
        tokens = self._row(pending + array("i", drafted))
        if not drafted:
            logits, state = self.model.decode_logits(tokens, self._state)
            return DraftLogits(logits, drafted, state)
        places = torch.zeros_like(tokens, dtype=torch.bool)
        places[:, len(pending) - 1 :] = True
        logits, state = self.model.logits_at(tokens, places, self._state)
        return DraftLogits(logits, drafted, state)

    def _read_pieces(self) -> None:
        """Read the pending tokens in pieces, all but the last piece."""

    def _row(self, tokens: Text) -> Tensor:
        return torch.tensor([tokens], dtype=torch.int64, device=self.model.device)


def continued(
    cursor: Cursor,
    choice: Choice,
    draft: Draft | None,
    max_steps: int | None,
    stop: Callable[[Tensor, int], bool] | None,
) -> Generation:
    """Return the generation that continues a text. The text grows by each token as it is drawn."""
    drafting = None if draft is None else Drafting(draft)

    @without_gradients
    def draw(pending: Tensor, state: Any, mask: Tensor | None, generator: torch.Generator | None) -> Any:
        token = cursor.draw(choice, drafting)
        return token, cursor.pending, cursor._state

    return Generation(draw, cursor.pending, cursor._state, max_steps=max_steps, seed=choice.generator, stop=stop)


def as_text(model: Decodable, who: str, name: str, tokens: Tensor | Sequence[int]) -> Text:
    """Return tokens as a text. Raises ShapeError unless they are one row of integers below the model's vocab_size."""
    values = torch.as_tensor(tokens)
    if values.ndim == 2 and values.shape[0] == 1:
        values = values[0]
    is_integer = values.numel() == 0 or not (
        values.is_floating_point() or values.is_complex() or values.dtype == torch.bool
    )
    if values.ndim != 1 or not is_integer:
        shape = tuple(values.shape)
        raise ShapeError(f"{who}: {name} is {values.dtype} {shape}, expected integers (T,) or (1, T), one text")
    odd = values[(values < 0) | (values >= model.vocab_size)]
    if odd.numel():
        raise ShapeError(
            f"{who}: {name} has token {int(odd[0])}, expected 0 to {model.vocab_size - 1} of {model.vocab_size}"
        )
    return array("i", values.tolist())
