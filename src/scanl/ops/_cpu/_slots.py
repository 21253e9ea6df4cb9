"""Named arguments of a kernel.

A kernel gets one int64 array. `Slots` declares the order of the numbers in it. Python packs the array by name and the
kernel reads it by name, so the two always agree. `slots.dtype` is the type of the elements, and `slots.sum_dtype`
that of sums of them: float32 for half precision, else the same.
"""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import lower_getattr_generic, models, register_model
from numba.np.numpy_support import as_dtype

from scanl.ops._cpu._flat import array
from scanl.ops._cpu._half import HalfType
from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._pointers import intrinsic
from scanl.ops._cpu._team import take

_DTYPES = ("dtype", "sum_dtype")  # what a kernel reads like a slot, but is a type
_FILLED_FIELDS = ("counter", "units")  # the first two slots, which `Kernel.run` fills


class OperandSlots(NamedTuple):
    """Address and strides of an operand (B, T, E). `channels` accepts this or a slot."""

    at: int
    batch: int
    time: int


class Slots:
    """The numbers that a kernel gets, in order, after `counter` and `units`.

    numbers: names of addresses, sizes and flags, with one slot each.
    rows: names of operands (B, T, E) whose last axis is contiguous. Each has three slots: the address `.at`, and the
        strides `.batch` and `.time` of the first two axes, in elements.
    """

    def __init__(self, numbers: str, *, rows: str = ""):
        self.numbers, self.rows = numbers.split(), rows.split()
        names = [*_FILLED_FIELDS, *self.numbers]
        self.places: dict[str, int | OperandSlots] = {name: place for place, name in enumerate(names)}
        for number, name in enumerate(self.rows):
            self.places[name] = OperandSlots(*(len(names) + 3 * number + n for n in range(3)))
        for name in (*names, *self.rows):
            if [*names, *self.rows].count(name) > 1 or name in _DTYPES:
                raise ValueError(f"Slots: {name!r} stands twice")
        self.pack = _packer(self.numbers, self.rows)


def _packer(numbers: list[str], rows: list[str]) -> Callable[..., "PackedSlots"]:
    """Generate `pack(name=value, ...)`, which returns the numbers in the order of the slots.

    A tensor or array becomes its address; None becomes 0. The function is generated as source code for these names,
    because it runs for every token. It raises TypeError unless exactly the declared slots are given.
    """
    one = "{0} if type({0}) is int else {0}.data_ptr() if type({0}) is Tensor else number({0})"
    three = "*((0, 0, 0) if {0} is None else ({0}.data_ptr(), *{0}.stride()[:2]))"
    items = ", ".join([*(one.format(name) for name in numbers), *(three.format(name) for name in rows)])
    names = ", ".join([*numbers, *rows])
    source = f"def pack(*, {names}):\n packed = PackedSlots(({items},))\n packed.values = ({names},)\n return packed"
    scope: dict[str, Any] = {"PackedSlots": PackedSlots, "Tensor": torch.Tensor, "number": _number}
    exec(source, scope)
    return scope["pack"]


class PackedSlots(list[int]):
    """Packed numbers, with the tensors whose addresses they hold: an address alone does not keep memory alive."""

    values: tuple[Any, ...]


def _number(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    return 0 if value is None else int(value)


def packer(slots: Slots) -> Any:
    """Return `pack(units=..., name=value, ...)`, which returns the slots of a kernel to a kernel that calls it.

    One more number is the counter of units.
    """
    names = [*_FILLED_FIELDS, *slots.numbers]
    lines = [f"def pack({', '.join(names[1:])}):", f" packed = empty({len(names) + 1}, int64)"]
    lines += [f" packed[{place}] = {name}" for place, name in enumerate(names) if place]
    lines += [f" packed[0], packed[{len(names)}] = packed.ctypes.data + {8 * len(names)}, 0", " return packed"]
    scope: dict[str, Any] = {"empty": np.empty, "int64": np.int64}
    exec("\n".join(lines), scope)
    return helper()(scope["pack"])


class SlotsType(types.Type):
    """numba's type of the slots of a kernel for one element type."""

    def __init__(self, slots: Slots, element: types.Type):
        self.places = slots.places
        self.element = element
        self.sum = types.float32 if isinstance(element, HalfType) else element
        digest = hashlib.sha256(repr(self.places).encode()).hexdigest()[:16]
        super().__init__(f"slots_{digest}({self.element})")


@register_model(SlotsType)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, slots):
        super().__init__(manager, slots, ir.IntType(64).as_pointer())


@infer_getattr
class _Attributes(AttributeTemplate):
    key = SlotsType

    def generic_resolve(self, slots, name):
        if name in _DTYPES:
            return types.DType(slots.element if name == "dtype" else slots.sum)
        place = slots.places.get(name)
        if isinstance(place, tuple):
            return types.NamedUniTuple(types.int64, len(place), OperandSlots)
        return None if place is None else types.int64


@lower_getattr_generic(SlotsType)
def _read(context, builder, slots, pointer, name):
    """Load a slot where the kernel uses its name. Nothing changes it, so a loop need not load it again."""
    if name in _DTYPES:
        return context.get_dummy_value()

    def load(place):
        number = builder.load(builder.gep(pointer, [ir.IntType(32)(place)]))
        number.set_metadata("invariant.load", builder.module.add_metadata([]))
        return number

    place = slots.places[name]
    if isinstance(place, tuple):
        kind = types.NamedUniTuple(types.int64, len(place), OperandSlots)
        return context.make_tuple(builder, kind, [load(number) for number in place])
    return load(place)


@helper()
def units(slots):
    """Yield the numbers of units of work until none is left: from a counter that all threads have in common."""
    while True:
        unit = take(slots.counter)
        if unit >= slots.units:
            return
        yield unit


def constant_of(compute: Callable[[np.dtype], Any]) -> Any:
    """Return a function for kernels: of a dtype, whose result is a constant there."""

    @intrinsic
    def function(typingctx, dtype):
        bits = np.dtype(np.uint16) if isinstance(dtype.dtype, HalfType) else as_dtype(dtype.dtype)
        constant = compute(bits)
        kind = types.unliteral(typingctx.resolve_value_type(constant))
        return kind(dtype), lambda context, builder, *_: context.get_constant_generic(builder, kind, constant)

    return function


itemsize = constant_of(lambda dtype: dtype.itemsize)  # the bytes of an element; in kernels a dtype has no `itemsize`


@helper(forceinline=True)
def part(address, first, size, dtype):
    """Return `size` elements, from the `first` on, of a contiguous operand at an address."""
    return array(address + itemsize(dtype) * first, size, dtype)


@helper(forceinline=True)
def channels(operand, batch, t, first, size, dtype):
    """Return `size` channels, from `first` on, of row (batch, t) of an operand."""
    return part(operand.at, batch * operand.batch + t * operand.time + first, size, dtype)
