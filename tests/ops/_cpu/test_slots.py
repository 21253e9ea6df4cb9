"""The arguments of CPU kernels by name: what Python packs is what the kernel reads, and nothing else is taken."""

import importlib
import inspect
import pkgutil
import re

import numpy as np
import pytest
import torch
from numba import TypingError

from scanl.ops import _cpu, products
from scanl.ops._cpu._flat import array
from scanl.ops._cpu._kernel import Kernel, kernel
from scanl.ops._cpu._slots import Slots, channels, part, units

KERNELS = [
    name
    for package in (_cpu, products)
    for _, name, _ in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
]


@kernel("weight out last", rows="x y")
def sums(slots):
    """A weight times each row of x; of y the first row, through the slot itself."""
    x, dtype, out = slots.x, slots.dtype, array(slots.out, 6, slots.dtype)
    for b in range(2):
        for t in range(3):
            out[b * 3 + t] = slots.weight * channels(x, b, t, 1, 1, dtype)[0]
    array(slots.last, 1, dtype)[0] = channels(slots.y, 0, 0, 0, 1, dtype)[0]


@kernel("out taken")
def count(slots):
    """Write its number to each unit, and count the units."""
    for unit in units(slots):
        part(slots.out, unit, 1, slots.dtype)[0] = unit
        array(slots.taken, 1, np.int64)[0] += 1


@kernel("out last")
def misspelt(slots):
    array(slots.last, 1, np.int64)[0] = slots.wieght


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_a_kernel_reads_what_was_packed(dtype):
    x = torch.arange(2 * 3 * 4).view(2, 3, 4).to(dtype).flip(0)[:, :, :2]  # strides of its own
    out, last = torch.empty(2, 3, dtype=dtype), np.zeros(1, x.numpy().dtype)
    y = torch.full((1, 1, 1), 7, dtype=dtype)
    sums.run(dtype, sums.pack(y=y, last=last, out=out, x=x, weight=3), 1, 1)
    torch.testing.assert_close(out, 3 * x[:, :, 1], rtol=0, atol=0)
    assert last[0] == 7


def test_packs_in_the_order_of_the_declaration():
    x, last = torch.zeros(2, 3, 4), np.zeros(1)
    expected = [1, 0, last.ctypes.data, x.data_ptr(), 12, 4, 0, 0, 0]
    assert sums.pack(x=x, y=None, last=last, out=None, weight=True) == expected


def test_refuses_what_has_no_slot_and_what_is_missing():
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        sums.pack(weight=1, last=0, x=None, y=None, out=None, z=1)
    with pytest.raises(TypeError, match="missing 2 required keyword-only arguments: 'out' and 'y'"):
        sums.pack(weight=1, last=0, x=None)
    with pytest.raises(ValueError, match="'a'"):
        Slots("a b a")


@pytest.mark.parametrize("number", [0, 1, 7])
def test_a_kernel_takes_every_unit_once(number):
    out, taken = torch.full((number,), -1.0), np.zeros(1, np.int64)
    count.run(out.dtype, count.pack(out=out, taken=taken), number, 1)
    assert out.tolist() == list(range(number))
    assert taken[0] == number


def test_a_name_that_was_not_declared_does_not_compile():
    with pytest.raises(TypingError, match="wieght"):
        misspelt.run(torch.float32, misspelt.pack(out=0, last=0), 1, 1)


def test_a_kernel_has_no_free_variables():
    """The name of its machine code on disk does not depend on them."""
    number = 3

    def free(slots):
        array(slots.out, 1, np.int64)[0] = number

    with pytest.raises(AssertionError):
        kernel("out")(free)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_read_by_name_all_that_they_declare(name):
    module = importlib.import_module(name)
    source = inspect.getsource(module)
    if hasattr(module, "unit_of"):  # reads slots for the kernels of matrix memories
        source += inspect.getsource(module.unit_of.py_func)
    read = set(re.findall(r"\bslots\.(\w+)", source))
    for declared in vars(module).values():
        if isinstance(declared, Kernel) and declared.module == name:
            assert {*declared.slots.numbers, *declared.slots.rows} <= read
