"""A model that runs a sequence piece by piece, so that an algorithm has the state between the pieces."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scanl.errors import ConfigError
from scanl.layers.state import State
from scanl.learning.questions import Model
from scanl.models import Features, Tokens

Run = Callable[..., tuple[Tensor, State]]  # (x, state, **others) -> outputs and state


class InPieces:
    """A model whose forward pass calls `run` for one piece of the sequence after another.

    It stands where a question reads the model: the question sees the outputs of all steps at once, so the loss has the
    scale of the undivided sequence. All other attributes are the model's.

    size: steps of a piece; the last piece may be shorter.   run: gets the inputs of a piece, the state before it, and
    the mask and durations of its steps by name. It returns the outputs (B, steps, ...) and the state after the piece.
    """

    def __init__(self, who: str, model: Model, size: int, run: Run) -> None:
        self._who, self._model, self._size, self._run = who, model, size, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, x: Tensor, state: State = None, **others: Tensor | None) -> tuple[Tensor, State]:
        outputs: list[Tensor] = []
        for start in range(0, x.shape[1], self._size):
            steps = slice(start, start + self._size)
            piece = x[:, steps]
            named = {name: value[:, steps] for name, value in others.items() if value is not None}
            y, state = self._run(piece, state, **named)
            if not isinstance(y, Tensor) or y.shape[:2] != piece.shape[:2]:
                raise ConfigError(
                    f"{self._who}: the model is a {type(self._model).__name__}, expected one that answers at every "
                    "step, as for next_token, label, numbers or flags; bptt learns from one answer a sequence"
                )
            outputs.append(y)
        return torch.cat(outputs, 1), state

    def logits_at(self, x: Tensor, chosen: Tensor, state: State = None) -> tuple[Tensor, State]:
        """Return the logits at some steps, as `LanguageModel.logits_at` does."""
        logits, state = self(x, state)
        return logits[chosen], state


def reads(who: str, model: Model) -> Tokens | Features:
    """Return the form of the model's inputs; raises ConfigError unless they are tokens or features."""
    inputs = getattr(model, "inputs", None)
    if isinstance(inputs, Tokens | Features):
        return inputs
    raise ConfigError(f"{who}: the model is a {type(model).__name__}, expected one that reads tokens or features")
