"""A predictor that learns from what was coded, alike where it is packed and where it is unpacked."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.layers.parts.quantized import QuantizedWeight
from scanl.layers.state import detach
from scanl.models import LanguageModel
from scanl.models.saving import recorded, restored
from scanl.ops.products.quantized_linear import unpacked
from scanl.packing.predictor import EXACT, FLOATS, Predictor, StreamPrediction

LEARNING_RATE = 1e-3
TURN = 16  # steps between two of Adam: fewer bits than by 32, 64 and 128 on prose, code and a log of 200 KB each
CLIP = 1.0  # of the norm of the gradient


class AdaptivePredictor:
    """A predictor's model with weights of float32, which takes a step of Adam after every turn.

    Nothing of it is stored: who unpacks repeats the steps. Their bits are those of one machine and one version of
    torch, on one thread.
    """

    arithmetic, precision, turn = EXACT, FLOATS, TURN

    def __init__(self, predictor: Predictor) -> None:
        self.digest, self.model = predictor.digest, as_float(predictor.model)
        self._optimizer = torch.optim.Adam(self.model.parameters(), LEARNING_RATE, fused=True)

    @contextmanager
    def opened(self, rows: int) -> Iterator["LearningPrediction"]:
        """Yield a reading of so many streams from their start."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.no_grad():
                yield LearningPrediction(self.model, rows, self._optimizer)
        finally:
            torch.set_num_threads(before)

    def saved(self) -> tuple[dict[str, Tensor], dict]:
        """Return a copy of what was learnt, for `restore`."""
        return copy.deepcopy((self.model.state_dict(), self._optimizer.state_dict()))

    def restore(self, saved: tuple[dict[str, Tensor], dict]) -> None:
        """Forget what was learnt since `saved`."""
        self.model.load_state_dict(saved[0])
        self._optimizer.load_state_dict(saved[1])


class LearningPrediction(StreamPrediction):
    """What a model has read of several streams, of which it learns."""

    def __init__(self, model: LanguageModel, rows: int, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, rows, model.compile_step(rows))
        self._optimizer, self._before = optimizer, self._state

    def learn(self, symbols: Tensor, following: Tensor) -> None:
        with torch.enable_grad():
            logits, _ = self._model(symbols.T, detach(self._before))
            loss = F.cross_entropy(logits.flatten(0, 1), following.T.flatten())
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
            self._optimizer.step()
        self._before = self._state


def as_float(model: LanguageModel) -> LanguageModel:
    """Return a model with weights of float32 in the place of whole numbers."""
    made = restored(recorded(model))
    assert isinstance(made, LanguageModel)
    weights = dict(made.named_parameters()) | dict(made.named_buffers())
    with torch.no_grad():
        for path, module in model.named_modules():
            own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
            if isinstance(module, QuantizedWeight):
                own = {name: value for name, value in own.items() if name == "bias"}
                own["weight"] = unpacked(module.packed, module.scale, module.groups)
            for name, value in own.items():
                weights[f"{path}.{name}" if path else name].copy_(value)
    return made.eval()
