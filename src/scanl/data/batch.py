"""A batch of examples, whose parts keep their names from the file to the model."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any] | Tensor


class Columns(NamedTuple):
    """The inputs of a forecast of the H steps after each of T steps. NaN is a missing number.

    target: (N, T, C), what is forecast.   past: (N, T, P), covariates that are known up to the present.   static: (N,
    S), covariates that are constant over a series.   future: (N, T + H, F), covariates that are known ahead, at the T
    steps and at the H steps after them.
    """

    target: Any
    past: Any
    static: Any
    future: Any


class Outcomes(NamedTuple):
    """The numbers that a forecast of H steps is compared with. numbers: (N, H, C).   units: (N, C), of the errors."""

    numbers: Any
    units: Any


class Batch(NamedTuple):
    """N examples of at most T steps, as arrays of numpy or as tensors.

    inputs: tokens (N, T), features (N, T, C) or `Columns`.   targets: as the question says.   mask: (N, T) bool, True
    at the steps of a row, which may end early; None: rows have T steps.   timespans: (N, T) durations of the steps, and
    for a forecast (N, T + H), with the durations of the steps ahead; None: steps have no durations.   starts: (N, T)
    bool, True where another sequence of a row begins, at which the state is reset; None: a row is one sequence.

    Features and numbers are float32 if the source has standardised them, and float64 if the model does that.
    """

    inputs: Any
    targets: Any
    mask: Any = None
    timespans: Any = None
    starts: Any = None

    @property
    def length(self) -> int:
        """T."""
        return self._read.shape[1]

    @property
    def size(self) -> int:
        """N."""
        return self._read.shape[0]

    @property
    def _read(self) -> Array:
        return self.inputs.target if isinstance(self.inputs, Columns) else self.inputs

    def tensors(self, device: torch.device | str | None = None) -> "Batch":
        """Return the batch as tensors on a device; integers become int64, because they may be stored in a narrower
        type."""

        def tensor(array: Array) -> Tensor:
            values = torch.as_tensor(array, device=device)
            return values if values.is_floating_point() or values.dtype == torch.bool else values.long()

        return _mapped(tensor, self)

    def rows(self, rows: slice | NDArray[np.int64]) -> "Batch":
        """Return some of the examples."""
        return _mapped(lambda array: array[rows], self)

    def steps(self, begin: int, end: int, *, targets: bool) -> "Batch":
        """Return the steps from `begin` to before `end`; for future covariates, also the H steps after them.

        targets: whether the targets have an axis of steps, which is cut too.
        """
        length = self.length
        end = min(end, length)

        def cut(array: Array) -> Array:
            return array[:, begin : end + array.shape[1] - length]

        inputs = self.inputs
        if isinstance(inputs, Columns):
            inputs = Columns(cut(inputs.target), cut(inputs.past), inputs.static, cut(inputs.future))
        else:
            inputs = cut(inputs)
        others = (None if array is None else cut(array) for array in (self.mask, self.timespans, self.starts))
        return Batch(inputs, cut(self.targets) if targets else self.targets, *others)


def _mapped(f: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to each array, and keep the names."""
    if value is None:
        return None
    return type(value)(*(_mapped(f, element) for element in value)) if isinstance(value, tuple) else f(value)
