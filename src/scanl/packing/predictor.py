"""Logits of bytes that have the same bits where they are packed and where they are unpacked."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from scanl.digests import digest_of
from scanl.errors import BackendError, ConfigError
from scanl.layers.parts.quantized import quantized_paths
from scanl.layers.state import State
from scanl.models import LanguageModel, quantize
from scanl.models.saving import recorded
from scanl.ops import exact
from scanl.packing.archive import ARITHMETICS

SYMBOLS = 256
EXACT, PORTABLE = ARITHMETICS


class Predictor:
    """A language model of bytes as what packs and unpacks: a copy whose weights are whole numbers of 8 bits.

    arithmetic: "portable" if a kernel runs the step with the bits of every machine, else "exact": those of one machine
    and one version of torch.   precision: "int8", or "float32" of a model without a weight that can be quantized.
    digest: of the weights and the configuration.

    Raises ConfigError for a model of other symbols than bytes.
    """

    def __init__(self, model: LanguageModel) -> None:
        if not isinstance(model, LanguageModel):
            raise ConfigError(f"packing: model is a {type(model).__name__}, expected a LanguageModel of bytes")
        if model.vocab_size != SYMBOLS:
            raise ConfigError(f"packing: model has vocab_size={model.vocab_size}, expected {SYMBOLS}: a model of bytes")
        self.model = copy.deepcopy(model).cpu().eval()
        if not quantized_paths(self.model):
            self.model.float()
            with suppress(ConfigError):  # no weight is large enough: it stays as it is
                quantize(self.model)
        self.precision = "int8" if quantized_paths(self.model) else "float32"
        self.arithmetic = self._arithmetic()
        self.digest = digest_of(self.model.state_dict(), recorded(self.model))[:32]

    def _arithmetic(self) -> str:
        try:
            with torch.inference_mode(), exact(portable=True):
                self.model.compile_step(1)
        except BackendError:
            return EXACT
        return PORTABLE

    @contextmanager
    def opened(self, rows: int) -> Iterator["StreamPrediction"]:
        """Yield a reading of so many streams from their start."""
        with torch.inference_mode(), exact(portable=self.arithmetic == PORTABLE):
            yield StreamPrediction(self, rows)


class StreamPrediction:
    """What a model has read of several streams."""

    def __init__(self, predictor: Predictor, rows: int) -> None:
        self._model, self._portable = predictor.model, predictor.arithmetic == PORTABLE
        self._state: State = self._model.init_state(rows)
        self._step = self._model.compile_step(rows) if self._portable else self._model.step

    def step(self, symbols: Tensor) -> Tensor:
        """Read a symbol (N,) of each stream. Return the logits (N, V) of the next ones."""
        logits, self._state = self._step(symbols, self._state)
        return logits

    def steps(self, symbols: Tensor) -> Iterator[Tensor]:
        """Read symbols (T, N), and yield the logits (N, V) behind each step: the bits are those of `step`."""
        if self._portable:  # a kernel that steps is faster than reading at once
            yield from map(self.step, symbols)
        else:
            logits, self._state = self._model(symbols.T, self._state)
            yield from logits.unbind(1)
