"""Text generation as an iterator over tokens. Its memory does not grow with the number of tokens."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scanl.errors import ConfigError, ShapeError
from scanl.layers.state import State, map_leaves
from scanl.models.sampling import check_options, sample

if TYPE_CHECKING:
    from scanl.models.language_model import LanguageModel


class Generation(Iterator[Tensor]):
    """Iterator over generated tokens (B,) int64, one step at a time. `LanguageModel.generate` makes it.

    state: the model's state after everything except `pending`.
    pending: tokens that the model has not read yet: the prompt at first, then the last token (B, 1).
    generator: the random number generator; None for torch's default one.

    `model.generate(g.pending, state=g.state, seed=g.generator)` continues exactly from the current step of `g`.
    """

    def __init__(
        self,
        model: "LanguageModel",
        prompt: Tensor,
        state: State = None,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | torch.Generator | None = None,
        mask: Tensor | None = None,
        stop: Callable[[Tensor, int], bool] | None = None,
    ) -> None:
        check_options(temperature, top_k, top_p)
        if prompt.ndim != 2 or prompt.shape[1] == 0:
            raise ShapeError(f"generate: prompt has shape {tuple(prompt.shape)}, expected (B, T) with T at least 1")
        if mask is not None and not bool(mask.any(1).all()):
            raise ShapeError("generate: mask has a row without a token, expected at least one each")
        if model.stack.bidirectional:
            raise ConfigError("generate: the model has a bidirectional layer, expected causal ones only")
        self.pending = prompt
        self._state = state
        self.generator = seed if isinstance(seed, torch.Generator) else None
        if isinstance(seed, int):
            self.generator = torch.Generator(prompt.device).manual_seed(seed)
        self._model = model
        self._mask = mask
        self._left = max_new_tokens
        self._sampling = (temperature, top_k, top_p)
        self._stop = stop
        self._count = 0

    @property
    def state(self) -> State:
        """Return a copy of the state. It can take part in training, and later steps do not change it."""
        return map_leaves(Tensor.clone, self._state)

    def __next__(self) -> Tensor:
        if self._left == 0:
            raise StopIteration
        with torch.inference_mode():
            logits, self._state = self._model.next_logits(self.pending, self._state, mask=self._mask)
            token = sample(logits, *self._sampling, generator=self.generator)
        token = token.clone()  # autograd rejects a tensor made in inference mode
        self.pending, self._mask = token[:, None], None
        self._count += 1
        if self._left is not None:
            self._left -= 1
        if self._stop is not None and self._stop(token, self._count):
            self._left = 0
        return token
