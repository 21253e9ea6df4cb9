"""Logits of bytes that have the same bits where they are packed and where they are unpacked."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from scanl.digests import digest_of
from scanl.errors import BackendError, ConfigError
from scanl.layers.parts.quantized import quantized_paths
from scanl.layers.state import State
from scanl.models import LanguageModel, quantize
from scanl.models.saving import recorded
from scanl.ops import exact
from scanl.packing.archive import ARITHMETICS, PRECISIONS

SYMBOLS = 256
TURN = 128  # steps that are read at once, and between two looks at how long the code is
EXACT, PORTABLE = ARITHMETICS
FLOATS, WHOLE_NUMBERS, UNMODELLED = PRECISIONS


class Predictor:
    """A language model of bytes as what packs and unpacks: a copy whose weights are whole numbers of 8 bits.

    arithmetic: "portable" if a kernel runs the step with the bits of every machine, else "exact": those of one machine
    and one version of torch.   precision: "int8", or "float32" of a model without a weight that can be quantized.
    digest: of the weights and the configuration.

    Raises ConfigError for a model of other symbols than bytes.
    """

    turn = TURN

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
        self.precision = WHOLE_NUMBERS if quantized_paths(self.model) else FLOATS
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
            if self.arithmetic == PORTABLE:
                yield StreamPrediction(self.model, rows, self.model.compile_step(rows))
            else:
                yield ExactPrediction(self.model, rows, self.model.step)


class StreamPrediction:
    """What a model has read of several streams. one_step: reads a symbol of each."""

    def __init__(self, model: LanguageModel, rows: int, one_step: Callable[[Tensor, State], tuple[Any, State]]) -> None:
        self._model, self._one_step = model, one_step
        self._state: State = model.init_state(rows)

    def step(self, symbols: Tensor) -> Tensor:
        """Read a symbol (N,) of each stream. Return the logits (N, V) of the next ones."""
        logits, self._state = self._one_step(symbols, self._state)
        return logits

    def steps(self, symbols: Tensor) -> Iterator[Tensor]:
        """Read symbols (T, N), and yield the logits (N, V) behind each step: the bits are those of `step`."""
        return map(self.step, symbols)  # a kernel that steps is faster than reading at once

    def learn(self, symbols: Tensor, following: Tensor) -> None:
        """Learn from the symbols (T, N) since the last call, and those that followed them."""


class ExactPrediction(StreamPrediction):
    """The same by ordinary steps, where reading at once is faster."""

    def steps(self, symbols: Tensor) -> Iterator[Tensor]:
        logits, self._state = self._model(symbols.T, self._state)
        return iter(logits.unbind(1))


class ContextsAlone:
    """In the place of a model: bytes are expected by what stood behind the same bytes before, and no more.

    A tenth of the time, and more bits.
    """

    arithmetic, precision, digest, turn = PORTABLE, UNMODELLED, 32 * "0", TURN

    @contextmanager
    def opened(self, rows: int) -> Iterator["NoPrediction"]:
        """Yield what stands for a reading of so many streams."""
        yield NoPrediction(rows)


class NoPrediction:
    """Logits of no symbols."""

    def __init__(self, rows: int) -> None:
        self._logits = torch.empty(rows, 0)

    def step(self, symbols: Tensor) -> Tensor:
        return self._logits

    def steps(self, symbols: Tensor) -> Iterator[Tensor]:
        return map(self.step, symbols)

    def learn(self, symbols: Tensor, following: Tensor) -> None:
        """Learn nothing."""
