"""Generation as an iterator over tokens or numbers. Its memory does not grow with the number of steps."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from scanl.layers.state import State, map_leaves
from scanl.models.decoding.sampling import as_generator

Draw = Callable[[Tensor, State, Tensor | None, torch.Generator | None], tuple[Tensor, Tensor, State]]


class Generation(Iterator[Tensor]):
    """Iterator over generated steps: tokens (B,) int64 from `LanguageModel.generate`, or numbers (B, C) from
    `Forecaster.generate`.

    draw: called as draw(pending, state, mask, generator); returns a new step, the new pending steps, and the state.
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
        with torch.inference_mode():
            step, self._pending, self._state = self._draw(self._pending, self._state, self._mask, self.generator)
        step, self._mask = step.clone(), None  # autograd rejects a tensor made in inference mode
        self._count += 1
        if self._left is not None:
            self._left -= 1
        if self._stop is not None and self._stop(step, self._count):
            self._left = 0
        return step
