"""Tokens by a compiled step in memory that is kept: to make tensors for a state takes as long as a small step."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from scanl.errors import ShapeError
from scanl.layers.state import State
from scanl.models.decoding.compiled_step import CompiledStep
from scanl.models.decoding.generation import Drawn
from scanl.models.decoding.race import Race
from scanl.models.decoding.sampling import Choice

if TYPE_CHECKING:
    from scanl.ops._compiler.recorded import RecordedFunction


class _Place(NamedTuple):
    """Memory for pending tokens (B, 1) and the state before them. operands: of the kernel, the tokens (B,) first."""

    pending: Tensor
    state: State
    operands: list[Tensor]


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


class CarriedStep:
    """A compiled step that reads tokens and a state in one of two places, and writes in the other.

    A state that it returns is overwritten by the second step after that. One thread at a time may use it.
    """

    def __init__(self, compiled: CompiledStep, kernel: "RecordedFunction", rows: int) -> None:
        self.kernel, self._compiled = kernel, compiled
        self._places, self._steps = list[_Place](), list[Callable[[], None]]()
        self._race: Race | None = None
        with torch.inference_mode(False), torch.no_grad():
            (results, (self._logits, state)), (others, (_, other)) = kernel.blank(rows), kernel.blank(rows)
            for after in (state, other):
                tokens = torch.zeros(rows, dtype=torch.int64, device="cpu")
                operands = compiled.tensors(tokens, after)
                # A layer may return a state of another form than the one it reads.
                if not kernel.binds or operands is None or list(map(_form, operands)) != kernel.inputs_of(rows):
                    return
                self._places.append(_Place(tokens[:, None], after, operands))
            written = [self._logits, *others[1:]], results
            self._steps = [
                kernel.bound(place.operands, made) for place, made in zip(self._places, written, strict=True)
            ]

    def __call__(self, pending: Tensor, state: State, choice: Choice) -> Drawn | None:
        """Read pending tokens (B, 1) and draw the next ones; None where the state has another form."""
        if not self._steps:
            return None
        at = next((at for at, one in enumerate(self._places) if pending is one.pending and state is one.state), -1)
        if at < 0 and not self._enter(pending, state):
            return None
        at = max(at, 0)
        target = self._places[1 - at]
        tokens = target.operands[0]
        try:
            self._steps[at]()
        except ShapeError:  # a sequence that is too long: the ordinary step has the error for it
            return None
        if Race.runs(choice, self._logits):
            if self._race is None:
                self._race = Race(self._logits, [place.operands[0] for place in self._places])
            self._race.draw(choice, 1 - at)
        else:
            tokens.copy_(choice(self._logits))
        return tokens.clone(), target.pending, target.state

    def _enter(self, pending: Tensor, state: State) -> bool:
        """Copy pending tokens and a state to the first place, and return whether the state has the form for that."""
        tokens, place = self._compiled.check(pending.squeeze(1)), self._places[0]
        before = self._compiled.model.init_state(len(tokens)) if state is None else state  # pyright: ignore[reportCallIssue]
        operands = self._compiled.tensors(tokens, before)
        if operands is None or list(map(_form, operands)) != list(map(_form, place.operands)):
            return False
        for target, source in zip(place.operands, operands, strict=True):
            target.copy_(source)
        return True


class TokenDraw:
    """The draw of a language model's next tokens for `Generation`, by the compiled step where that pays.

    read: the ordinary step; called as read(pending, state, mask=mask), returns logits and the state.
    """

    def __init__(self, compiled: CompiledStep, read: Callable[..., tuple[Tensor, State]], choice: Choice) -> None:
        self._compiled, self._read, self._choice = compiled, read, choice
        self._carried: CarriedStep | None = None

    def __copy__(self) -> "TokenDraw":
        return TokenDraw(self._compiled, self._read, self._choice)

    def __deepcopy__(self, memo: Any) -> "TokenDraw":
        return self.__copy__()

    def __call__(self, pending: Tensor, state: State, mask: Tensor | None, generator: torch.Generator | None) -> Drawn:
        rows, count = pending.shape
        by_kernel = mask is None and count == 1 and self._compiled.pays(rows)
        carried = self._carried_for(rows) if by_kernel else None
        drawn = None if carried is None else carried(pending, state, self._choice)
        if drawn is not None:
            return drawn
        with torch.inference_mode():
            if by_kernel:
                logits, state = self._compiled(pending.squeeze(1), state)
            else:
                logits, state = self._read(pending, state, mask=mask)
            token = self._choice(logits)
        return token.clone(), token.unsqueeze(1), state

    def _carried_for(self, rows: int) -> CarriedStep | None:
        kernel = self._compiled.kernel(rows)
        if kernel is None:
            return None
        if self._carried is None or self._carried.kernel is not kernel:
            self._carried = CarriedStep(self._compiled, kernel, rows)
        return self._carried
