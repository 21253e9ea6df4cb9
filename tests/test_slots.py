"""The arguments of CPU kernels by name: what Python packs is what the kernel reads, and nothing else is taken."""

import importlib
import inspect
import pkgutil
import re

import numpy as np
import pytest
import torch
from numba import cfunc, types

from scanl.ops import _cpu
from scanl.ops._cpu._slots import Slots, channels, loaded, view
from scanl.ops._cpu._team import Kernel, array

SUMS = Slots("weight out last", rows="x y")
KERNELS = [name for _, name, _ in pkgutil.iter_modules(_cpu.__path__, "scanl.ops._cpu.")]


def _build(dtype):
    def sums(pointer):
        """A weight times each row of x; of y the first row, through the slot itself."""
        slots = view(pointer, SUMS)
        x, weight, out = loaded(slots.x), slots.weight, array(slots.out, 6, dtype)
        for b in range(2):
            for t in range(3):
                out[b * 3 + t] = weight * channels(x, b, t, 1, 1, dtype)[0]
        array(slots.last, 1, dtype)[0] = channels(slots.y, 0, 0, 0, 1, dtype)[0]

    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_a_kernel_reads_what_was_packed(dtype):
    x = torch.arange(2 * 3 * 4).view(2, 3, 4).to(dtype).flip(0)[:, :, :2]  # strides of its own
    out, last = torch.empty(2, 3, dtype=dtype), np.zeros(1, x.numpy().dtype)
    y = torch.full((1, 1, 1), 7, dtype=dtype)
    slots = SUMS.pack(y=y, last=last, out=out, x=x, weight=3)
    Kernel(_build).run(dtype, slots, 1, 1)
    torch.testing.assert_close(out, 3 * x[:, :, 1], rtol=0, atol=0)
    assert last[0] == 7


def test_packs_in_the_order_of_the_declaration():
    x, last = torch.zeros(2, 3, 4), np.zeros(1)
    expected = [1, 0, last.ctypes.data, x.data_ptr(), 12, 4, 0, 0, 0]
    assert SUMS.pack(x=x, y=None, last=last, out=None, weight=True) == expected


def test_refuses_what_has_no_slot_and_what_is_missing():
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        SUMS.pack(weight=1, last=0, x=None, y=None, out=None, z=1)
    with pytest.raises(TypeError, match="missing 2 required keyword-only arguments: 'out' and 'y'"):
        SUMS.pack(weight=1, last=0, x=None)
    with pytest.raises(ValueError, match="'a'"):
        Slots("a b a")


def test_a_name_that_was_not_declared_does_not_compile():
    def misspelt(pointer):
        array(view(pointer, SUMS).last, 1, np.int64)[0] = view(pointer, SUMS).wieght

    with pytest.raises(KeyError, match="wieght"):
        cfunc(types.void(types.CPointer(types.int64)))(misspelt)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_read_by_name_all_that_they_declare(name):
    module = importlib.import_module(name)
    source = inspect.getsource(module)
    assert not re.search(r"\bpointer\[", source)
    if hasattr(module, "unit_of"):  # reads slots for the kernels of matrix memories
        source += inspect.getsource(module.unit_of.py_func)
    read = set(re.findall(r"\bslots\.(\w+)", source))
    for declared in vars(module).values():
        if isinstance(declared, Slots):
            assert {*declared.numbers, *declared.rows} <= read
