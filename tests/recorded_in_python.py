"""Kernels of recorded functions that Python runs: numba takes seconds to compile one."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from scanl.ops._compiler import loops, recorded


class Pointer:
    """A pointer to numbers, as kernels have it."""

    def __init__(self, numbers: np.ndarray, first: int = 0) -> None:
        self.numbers, self.first = numbers, first

    def __getitem__(self, at: int) -> Any:
        return self.numbers[self.first + at]

    def __setitem__(self, at: int, value: Any) -> None:
        self.numbers[self.first + at] = value


def pointer(address: int, dtype: type) -> Pointer:
    if address == 0:  # of scratch memory of no numbers
        return Pointer(np.empty(0, dtype))
    numbers = ctypes.POINTER(np.ctypeslib.as_ctypes_type(dtype))
    return Pointer(np.ctypeslib.as_array(ctypes.cast(address, numbers), (1 << 24,)))


def times(
    team: Pointer, out: Pointer, out_row: int, x: Pointer, x_row: int, w: Pointer, w_row: int, *sizes: int
) -> None:
    rows, columns, terms = sizes
    for row in range(rows):
        left = x.numbers[x.first + row * x_row :][:terms]
        for column in range(columns):
            out[row * out_row + column] = left @ w.numbers[w.first + column * w_row :][:terms]


def times_quantized(
    team: Pointer, y: Pointer, y_row: int, x: Pointer, x_row: int, w: Pointer, scale: Pointer, *sizes: int
) -> None:
    groups, bias, rows, columns, terms = sizes
    assert not groups
    assert not bias
    wide = Pointer(w.numbers[w.first :][: columns * terms].astype(np.float32))
    times(team, y, y_row, x, x_row, wide, terms, rows, columns, terms)
    for row in range(rows):
        for column in range(columns):
            y[row * y_row + column] *= scale[column]


class Kernel:
    def __init__(self, function: Any, names: str) -> None:
        self.function, self.names = function, names.split()

    def run(self, dtype: torch.dtype, packed: list[int], units: int, work: int) -> None:
        with np.errstate(all="ignore"):
            self.function(SimpleNamespace(units=units, **dict(zip(self.names, packed, strict=True))))


def as_python(name: str, text: str) -> SimpleNamespace:
    """Return the kernel of a source without numba."""
    scope: dict[str, Any] = {
        "np": np, "pointer": pointer, "times": times, "times_quantized": times_quantized, "separate": lambda: None,
        "at": lambda first, count: Pointer(first.numbers, first.first + count),
        "units": lambda slots: range(slots.units), "helper": lambda **flags: lambda function: function,
        "kernel": lambda names: lambda function: Kernel(function, names),
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "log_sigmoid": lambda x: -np.logaddexp(0, -x),
        "exp": np.exp, "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "tanh": np.tanh, "sqrt": np.sqrt,
        "cos": np.cos, "sin": np.sin, "atan2": np.arctan2, "inf": np.inf, "nan": np.nan,
    }  # fmt: skip
    exec(text.removeprefix(loops.HEADER), scope)
    return SimpleNamespace(run=scope["run"])


def use(patch: pytest.MonkeyPatch) -> None:
    """Let Python run the kernels of recorded functions."""
    patch.setattr(recorded, "load", as_python)
    patch.setattr(recorded.Recorded, "team", lambda kernel, units: 0)
    memory = recorded.Recorded.memory
    patch.setattr(recorded.Recorded, "memory", lambda *args: [tensor.fill_(np.nan) for tensor in memory(*args)])
    patch.setattr(recorded, "empty", lambda shape, dtype: torch.full(shape, np.nan, dtype=dtype))
