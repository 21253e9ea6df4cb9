"""Generation as an iterator over tokens or numbers. Its memory does not grow with the number of steps."""

import copy
from collections.abc import Callable, Iterator
from typing import Self

import torch
from torch import Tensor

from scanl.layers.state import State, map_leaves
from scanl.models.decoding.sampling import as_generator

Drawn = tuple[Tensor, Tensor, State]
Draw = Callable[[Tensor, State, Tensor | None, torch.Generator | None], Drawn]


class Generation(Iterator[Tensor]):
    """Iterator over generated steps: tokens (B,) int64 from `LanguageModel.generate`, or numbers (B, C) from
    `Forecaster.generate`.

    draw: called as draw(pending, state, mask, generator); returns a new step, which can take part in training, the new
    pending steps, and the state. A copy of this iterator copies it too.
    state: the model's state after everything except `pending`.
    pending: steps that the model has not read yet: the prompt at first, then the last step (B, 1) or (B, 1, ·).
    generator: the random number generator; None for torch's default one.

    `model.generate(g.pending, state=g.state, seed=g.generator)` continues exactly from the current step of `g`.
    """

    def __init__(
        self,
        draw: Draw,
        prompt: Tensor,
        state: State = None,
        *,
        max_steps: int | None = None,
        seed: int | torch.Generator | None = None,
        mask: Tensor | None = None,
        stop: Callable[[Tensor, int], bool] | None = None,
    ) -> None:
        self._pending = prompt
        self._state = state
        self.generator = as_generator("generate", seed, prompt.device)
        self._draw = draw
        self._mask = mask
        self._left = max_steps
        self._stop = stop
        self._count = 0

    @property
    def pending(self) -> Tensor:
        """Return a copy of the steps that the model has not read yet."""
        return self._pending.clone()

    @property
    def state(self) -> State:
        """Return a copy of the state. It can take part in training, and later steps do not change it."""
        return map_leaves(Tensor.clone, self._state)

    def __next__(self) -> Tensor:
        if self._left == 0:
            raise StopIteration
        step, self._pending, self._state = self._draw(self._pending, self._state, self._mask, self.generator)
        self._mask = None
        self._count += 1
        if self._left is not None:
            self._left -= 1
        if self._stop is not None and self._stop(step, self._count):
            self._left = 0
        return step

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self), _pending=self.pending, _state=self.state, _draw=copy.copy(self._draw))
        return copied


def without_gradients(draw: Draw) -> Draw:
    """Return a draw that runs in inference mode. Autograd rejects a tensor made there, so the step is a copy."""

    def drawn(pending: Tensor, state: State, mask: Tensor | None, generator: torch.Generator | None) -> Drawn:
        with torch.inference_mode():
            step, pending, state = draw(pending, state, mask, generator)
        return step.clone(), pending, state

    return drawn
