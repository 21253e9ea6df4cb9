"""Make a kernel of a Python function.

A kernel is a function of its slots, which `_slots.py` describes. Every thread runs it, and takes units of work until
none is left:

    @kernel("rows width x y")
    def double(slots):
        width, dtype = slots.width, slots.dtype
        for n in units(slots):  # a unit is a row
            x, y = (array(address + n * width * itemsize(dtype), width, dtype) for address in (slots.x, slots.y))
            ...

    double.run(x.dtype, double.pack(rows=rows, width=width, x=x, y=y), rows, x.numel())
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from numba import from_dtype, types  # pyright: ignore[reportPrivateImportUsage]
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target

from scanl.ops._cpu._cache import MachineCode, source_digest
from scanl.ops._cpu._half import HALF_TYPES
from scanl.ops._cpu._helper import compiling
from scanl.ops._cpu._pipeline import KernelCompiler
from scanl.ops._cpu._slots import Slots, SlotsType
from scanl.ops._cpu._team import PreparedCall, run

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _CompiledFunction(CFunc):
    def __init__(self, function: Callable, source: str, slots: SlotsType):
        stages: Any = KernelCompiler  # numba's declaration has its own class only
        flags = {"fastmath": {"contract", "nsz"}}
        super().__init__(function, ((slots,), types.void), {}, flags, pipeline_class=stages)
        self._cache: Any = MachineCode(function, source, slots.name)

    def compile(self) -> None:
        """Compile at LLVM's second level of optimization: a fifth faster than at numba's third, and kernels as fast."""
        assert cpu_target.target_context  # it reads the level once, for all that numba compiles
        with compiling() as settings:
            settings.OPT = min(settings.OPT, type(settings.OPT)(2))
            super().compile()


class Kernel:
    """A kernel for every element type, which is compiled when it first runs with that type."""

    def __init__(self, function: Callable[[Any], None], slots: Slots):
        assert function.__closure__ is None  # the name of the machine code has no digest of free variables
        self.slots = slots
        self.pack = slots.pack
        self.compiled: dict[torch.dtype, _CompiledFunction] = {}  # keeps the machine code alive
        self.module = function.__module__
        self._function = function
        self._source = source_digest(self.module)
        self._calls: dict[torch.dtype, tuple[Any, int]] = {}

    def _compile(self, dtype: torch.dtype) -> tuple[Any, int]:
        element = HALF_TYPES.get(dtype) or from_dtype(torch.empty(0, dtype=dtype).numpy().dtype)
        compiled = _CompiledFunction(self._function, self._source, SlotsType(self.slots, element))
        compiled.compile()
        address = compiled.address
        assert address is not None
        self.compiled[dtype] = compiled
        self._calls[dtype] = _FUNCTION(address), address
        return self._calls[dtype]

    def address(self, dtype: torch.dtype) -> int:
        """Return the address of the machine code for operands of the dtype, which other kernels may call."""
        return (self._calls.get(dtype) or self._compile(dtype))[1]

    def run(self, dtype: torch.dtype, packed: list[int], units: int, work: int) -> None:
        """Run the kernel for operands of the dtype. packed: from `pack`.   work: about how many numbers it touches."""
        call, address = self._calls.get(dtype) or self._compile(dtype)
        run(call, address, packed, units, work)

    def alone(self, dtype: torch.dtype, packed: list[int]) -> PreparedCall:
        """Return the kernel for one unit, which keeps its numbers. packed: as in `run`."""
        return PreparedCall(*(self._calls.get(dtype) or self._compile(dtype)), packed)


def kernel(numbers: str, *, rows: str = "") -> Callable[[Callable[[Any], None]], Kernel]:
    """Make the decorated function of `slots` a kernel. numbers, rows: its slots, as `Slots` takes them."""
    return lambda function: Kernel(function, Slots(numbers, rows=rows))
