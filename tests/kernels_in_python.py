"""Generated kernels for a CPU, run by Python from the source that numba would compile: seconds of compilation less.

The helpers of kernels run as they are written, too. What they are made of has a stand-in here: pointers, products,
threads, and functions of one element, which are NumPy's.
"""

import ctypes
import math
import re
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scanl.ops._compiler.cells import compiled
from scanl.ops._cpu import _cells
from scanl.ops._cpu._slots import OperandSlots, Slots

HELPERS = (
    "add_up", "advance", "apart", "clear", "copy", "entering", "in_window", "lane_steps", "of_step", "rewind",
    "sequence_of",
)  # fmt: skip
OF_NUMPY = ("exp", "expm1", "log", "log1p", "cos", "sin", "sqrt", "tanh", "inf", "nan")


class Pointer:
    """An address of elements, which are read as scalars of NumPy: they divide by zero as the processor does."""

    def __init__(self, address: int, dtype: Any):
        self.address, self.dtype = int(address), np.dtype(dtype)
        self.elements = ctypes.cast(self.address, ctypes.POINTER(np.ctypeslib.as_ctypes_type(self.dtype)))

    def __getitem__(self, i: int) -> Any:
        return self.dtype.type(self.elements[i])

    def __setitem__(self, i: int, value: Any) -> None:
        self.elements[i] = value


class Kernel:
    def __init__(self, function: Callable[[Any], None], slots: Slots):
        self.function, self.slots, self.pack = function, slots, slots.pack

    def run(self, dtype: Any, packed: Any, count: int, work: int) -> None:
        with np.errstate(all="ignore"):
            self.function(view(packed, count, self.slots, np.dtype(str(dtype).removeprefix("torch."))))


def kernel(numbers: str, *, rows: str = "") -> Callable[[Callable[[Any], None]], Kernel]:
    return lambda function: Kernel(function, Slots(numbers, rows=rows))


def at(first: Pointer, count: int) -> Pointer:
    return Pointer(first.address + int(count) * first.dtype.itemsize, first.dtype)


def array(address: int, size: int, dtype: Any) -> np.ndarray:
    dtype = np.dtype(dtype)
    return np.frombuffer((ctypes.c_char * (int(size) * dtype.itemsize)).from_address(int(address)), dtype)


def view(packed: Any, count: int, slots: Slots, dtype: np.dtype) -> SimpleNamespace:
    numbers = dict(zip(slots.numbers, packed, strict=False))
    rows = packed[len(slots.numbers) :]
    operands = {name: OperandSlots(*rows[3 * i : 3 * i + 3]) for i, name in enumerate(slots.rows)}
    return SimpleNamespace(units=count, dtype=dtype, **numbers, **operands)


def units(slots: SimpleNamespace) -> range:
    return range(slots.units)


def multiply(
    out: Pointer, out_row: int, width: int, h: Pointer, h_row: int, n: int, w: Pointer, panels: int, count: int
) -> None:
    assert not panels, "matrices of short sequences are not in panels"
    matrix = array(w.address, n * width, w.dtype).reshape(n, width)
    for r in range(count):
        row = array(at(out, r * out_row).address, width, out.dtype)
        row += array(at(h, r * h_row).address, n, h.dtype) @ matrix


def load(name: str, text: str) -> types.ModuleType:
    """Return the module with this source of numba kernels."""
    module = types.ModuleType(name)
    scope = module.__dict__
    scope |= {
        "np": np, "kernel": kernel, "pointer": Pointer, "at": at, "array": array, "units": units,
        "multiply": multiply, "separate": lambda: None,
        "helper": lambda **_: lambda function: function, "scratch": np.zeros, "itemsize": lambda dtype: dtype.itemsize,
        "erf": lambda x: type(x)(math.erf(x)), "log_sigmoid": lambda x: -np.logaddexp(type(x)(0), -x),
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "atan2": np.arctan2,
    }  # fmt: skip
    scope |= {function: getattr(np, function) for function in OF_NUMPY}
    for helper in HELPERS:
        scope[helper] = types.FunctionType(getattr(_cells, helper).py_func.__code__, scope)
    body = re.split(r"^_FLAGS = ", text, maxsplit=1, flags=re.MULTILINE)[1]
    exec(compile(f"_FLAGS = {body}", name, "exec"), scope)
    return module


def use(patch: pytest.MonkeyPatch) -> None:
    """Let Python run the kernels of cells."""
    patch.setattr(compiled, "load", load)
