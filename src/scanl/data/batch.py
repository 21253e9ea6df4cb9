"""A batch of examples, whose parts keep their names from the file to the model."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scanl.series_columns import SeriesColumns

Array = NDArray[Any] | Tensor


class Outcomes(NamedTuple):
    """The numbers that a forecast of H steps is compared with. numbers: (N, H, C).   units: (N, C), of the errors."""

    numbers: Any
    units: Any


class Batch(NamedTuple):
    """N examples of at most T steps, as arrays of numpy or as tensors.

    inputs: tokens (N, T), features (N, T, C) or `SeriesColumns`.   targets: as the question says.   mask: (N, T)
    bool, True at the steps of a row, which may end early; None: rows have T steps.   timespans: (N, T) durations of
    the steps; None: there are none, or `SeriesColumns` has them.   starts: (N, T) bool, True where another sequence of
    a row begins, at which the state is reset; None: a row is one sequence.   weights: (N,), by which the loss of a
    row's answer counts, where a row has one answer: 0 if it has none in these steps; None: all count once.

    Features and numbers are float32 if the source has standardised them, and float64 if the model does that.
    """

    inputs: Any
    targets: Any
    mask: Any = None
    timespans: Any = None
    starts: Any = None
    weights: Any = None

    @property
    def length(self) -> int:
        """T."""
        return self._read.shape[1]

    @property
    def size(self) -> int:
        """N."""
        return self._read.shape[0]

    @property
    def answered_each_step(self) -> bool:
        """Whether the targets have an axis of steps; else a row has one answer."""
        return not isinstance(self.targets, tuple) and self.targets.shape[:2] == (self.size, self.length)

    @property
    def _read(self) -> Array:
        return self.inputs.target if isinstance(self.inputs, SeriesColumns) else self.inputs

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
        """Return the steps from `begin` to before `end`.

        targets: whether the targets have an axis of steps, which is cut too.
        """

        def cut(array: Array | None) -> Array | None:
            return None if array is None else array[:, begin:end]

        inputs = self.inputs.steps(begin, end) if isinstance(self.inputs, SeriesColumns) else cut(self.inputs)
        others = map(cut, (self.mask, self.timespans, self.starts))
        return Batch(inputs, cut(self.targets) if targets else self.targets, *others, weights=self.weights)

    def parts(self, size: int, *, gradual: bool = False) -> Iterator["Batch"]:
        """Yield the steps in parts of `size`, the last of which may be shorter; of tensors.

        The answer of a whole row is in the part that has its last step, so `weights` is 0 in the others. gradual: it is
        in every part, and its weight is the share of the row's steps that are read by the end of the part.
        """
        for begin in range(0, max(self.length, 1), size):
            yield self.part(begin, size, gradual=gradual)

    def part(self, begin: int, size: int, *, gradual: bool = False) -> "Batch":
        """Return the part of `parts` that begins with a step."""
        end = min(begin + size, self.length)
        part = self.steps(begin, end, targets=self.answered_each_step)
        return part if self.answered_each_step else part._replace(weights=self._weights(begin, end, gradual))

    def _weights(self, begin: int, end: int, gradual: bool) -> Tensor:
        """Return the weights (N,) of the answers in the steps from `begin` to before `end`."""
        counts = (begin, end, self.length)
        if self.mask is None:
            before, after, whole = torch.tensor(counts, device=self._read.device)[:, None].expand(3, self.size)
        else:
            before, after, whole = (self.mask[:, :count].sum(1) for count in counts)
        share = torch.where(whole > 0, after / whole.clamp(min=1), 1)  # a row without steps is read at the beginning
        share = torch.where((after > before) | (begin == 0) & (whole == 0), share, 0)
        weights = share if gradual else (share == 1).to(share)
        return weights if self.weights is None else weights * self.weights


def _mapped(f: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to each array, and keep the names."""
    if value is None:
        return None
    return type(value)(*(_mapped(f, element) for element in value)) if isinstance(value, tuple) else f(value)
