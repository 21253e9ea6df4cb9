"""Named arguments of a kernel.

A kernel gets one int64 array. `Slots` declares the order of the numbers in it. Python packs the array by name and the
kernel reads it by name, so the two always agree.

    FORWARD = Slots("sequences width last", rows="x y")
    slots = view(pointer, FORWARD)                                    # in the kernel
    width, xs = slots.width, channels(slots.x, b, t, channel, part, dtype)
    FORWARD.pack(sequences=8, width=64, last=last, x=x, y=y)          # in Python, for `Kernel.run`

Declare slots in the same file as the kernel: numba's cache on disk notices changes of that file only.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import from_dtype, types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic, overload, typeof_impl

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._team import array

_FILLED = ("counter", "units")  # the first two slots, which `Kernel.run` fills


class Slots:
    """The numbers that a kernel gets, in order, after `counter` and `units`.

    numbers: names of addresses, sizes and flags, with one slot each.
    rows: names of operands (B, T, E) whose last axis is contiguous. Each has three slots: the address `.at`, and the
        strides `.batch` and `.time` of the first two axes, in elements.
    """

    def __init__(self, numbers: str, *, rows: str = ""):
        self.numbers, self.rows = numbers.split(), rows.split()
        operand = np.dtype([(name, np.int64) for name in Operand._fields])
        fields = [(name, np.int64) for name in (*_FILLED, *self.numbers)] + [(name, operand) for name in self.rows]
        self.record = from_dtype(np.dtype(fields, align=True))  # raises for a duplicate name
        self.pack = _packer(self.numbers, self.rows)


def _packer(numbers: list[str], rows: list[str]) -> Callable[..., "Packed"]:
    """Generate `pack(name=value, ...)`, which returns the numbers in the order of the slots.

    A tensor or array becomes its address; None becomes 0. The function is generated as source code for these names,
    because it runs for every token. It raises TypeError unless exactly the declared slots are given.
    """
    one = "{0} if type({0}) is int else {0}.data_ptr() if type({0}) is Tensor else number({0})"
    three = "*((0, 0, 0) if {0} is None else ({0}.data_ptr(), *{0}.stride()[:2]))"
    found = ", ".join([*(one.format(name) for name in numbers), *(three.format(name) for name in rows)])
    names = ", ".join([*numbers, *rows])
    source = f"def pack(*, {names}):\n packed = Packed(({found},))\n packed.values = ({names},)\n return packed"
    scope: dict[str, Any] = {"Packed": Packed, "Tensor": torch.Tensor, "number": _number}
    exec(source, scope)
    return scope["pack"]


class Packed(list[int]):
    """Packed numbers, with the tensors whose addresses they hold: an address alone does not keep memory alive."""

    values: tuple[Any, ...]


class Operand(NamedTuple):
    """Address and strides of an operand (B, T, E). `channels` accepts this or a slot."""

    at: int
    batch: int
    time: int


def _number(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    return 0 if value is None else int(value)


@typeof_impl.register(Slots)
def _typeof(slots, context):
    return types.DType(slots.record)


def _view(typingctx, pointer, slots):
    def codegen(context, builder, signature, arguments):
        # numba passes a record by its address: nothing is copied; a slot is read where the kernel uses its name
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return slots.dtype(pointer, slots), codegen


view: Any = intrinsic(_view)  # view(pointer, SLOTS) returns the arguments of a kernel; its attributes are the slots


@helper(forceinline=True)
def loaded(slot):
    """Return an operand's address and strides, read once: after a store, a loop would read the slots again."""
    return Operand(slot.at, slot.batch, slot.time)


def itemsize(dtype):  # pyright: ignore[reportRedeclaration]
    """Return the bytes of an element, inside a kernel, where a dtype has no `itemsize`."""
    raise NotImplementedError


@overload(itemsize, inline="always")
def _itemsize(dtype):
    size = dtype.dtype.bitwidth // 8
    return lambda dtype: size


@helper(forceinline=True)
def channels(operand, batch, t, first, size, dtype):
    """Return `size` channels, from `first` on, of row (batch, t) of an operand."""
    place = batch * operand.batch + t * operand.time + first
    return array(operand.at + itemsize(dtype) * place, size, dtype)
