"""Flat arrays in kernels: an address and a size.

numba's own arrays have seven fields and count their references, and an index from their end is found in each access. A
loop over three of them becomes four hundred lines for LLVM, over flat arrays eighty. An index is from 0 to the size,
and a part of a flat array keeps no memory: an array that numba allocates lives as long as the kernel names it.
"""

# pyright: reportOptionalCall=false
# numba gives its decorator of a class no type.

import operator
from typing import Any

from llvmlite import ir
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.core.imputils import lower_builtin, lower_cast
from numba.core.typeconv.castgraph import Conversion
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_getattr, infer_global, signature
from numba.extending import lower_getattr, models, register_model

from scanl.ops._cpu._pointers import intrinsic

_DATA, _SIZE = 0, 1


class FlatType(types.Type):
    """numba's type of flat arrays of a type of numbers."""

    def __init__(self, dtype: types.Type) -> None:
        self.dtype = dtype
        super().__init__(f"flat({dtype})")

    def can_convert_from(self, typingctx: Any, other: Any) -> Any:
        return Conversion.safe if flattened(other) == self else None


def flattened(kind: types.Type) -> types.Type:
    """Return the type of flat arrays for numba's type of adjacent numbers; other types are themselves."""
    return FlatType(kind.dtype) if isinstance(kind, types.Array) and (kind.ndim, kind.layout) == (1, "C") else kind


@register_model(FlatType)
class _Model(models.StructModel):
    def __init__(self, manager: Any, kind: FlatType) -> None:
        super().__init__(manager, kind, [("data", types.CPointer(kind.dtype)), ("size", types.int64)])


@intrinsic
def array(typingctx, address, size, dtype):
    """Return the flat array of `size` elements at an address."""
    kind = FlatType(dtype.dtype)

    def codegen(context, builder, signature, args):
        data = builder.inttoptr(args[0], context.get_value_type(types.CPointer(kind.dtype)))
        return _made(context, builder, kind, data, args[1])

    return kind(types.int64, types.int64, dtype), codegen


@intrinsic
def from_pointer(typingctx, pointer, size):
    """Return the flat array of `size` elements from a pointer on."""
    kind = FlatType(pointer.dtype)

    def codegen(context, builder, signature, args):
        return _made(context, builder, kind, *args)

    return kind(pointer, types.int64), codegen


def _made(context: Any, builder: Any, kind: FlatType, data: Any, size: Any) -> Any:
    empty = ir.Constant(context.get_value_type(kind), ir.Undefined)
    return builder.insert_value(builder.insert_value(empty, data, _DATA), size, _SIZE)


@lower_cast(types.Array, FlatType)
def _cast(context, builder, fromty, toty, value):
    whole = context.make_array(fromty)(context, builder, value)
    return _made(context, builder, toty, whole.data, whole.nitems)


@infer_getattr
class _Attributes(AttributeTemplate):
    key = FlatType

    def resolve_size(self, flat: FlatType) -> types.Type:
        return types.int64

    def resolve_address(self, flat: FlatType) -> types.Type:
        return types.int64

    def resolve_itemsize(self, flat: FlatType) -> types.Type:
        return types.int64

    def resolve_dtype(self, flat: FlatType) -> types.Type:
        return types.DType(flat.dtype)


@lower_getattr(FlatType, "size")
def _size(context, builder, kind, value):
    return builder.extract_value(value, _SIZE)


@lower_getattr(FlatType, "address")
def _address(context, builder, kind, value):
    return builder.ptrtoint(builder.extract_value(value, _DATA), ir.IntType(64))


@lower_getattr(FlatType, "itemsize")
def _itemsize(context, builder, kind, value):
    return ir.IntType(64)(context.get_abi_sizeof(context.get_data_type(kind.dtype)))


@lower_getattr(FlatType, "dtype")
def _dtype(context, builder, kind, value):
    return context.get_dummy_value()


@infer_global(operator.getitem)
class _GetItem(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        flat, index = args
        if isinstance(flat, FlatType) and isinstance(index, types.Integer):
            return signature(flat.dtype, flat, types.int64)
        if isinstance(flat, FlatType) and isinstance(index, types.SliceType) and not index.has_step:
            return signature(flat, flat, index)
        return None


@infer_global(operator.setitem)
class _SetItem(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        flat, index, _ = args
        if isinstance(flat, FlatType) and isinstance(index, types.Integer):
            return signature(types.none, flat, types.int64, flat.dtype)
        return None


@lower_builtin(operator.getitem, FlatType, types.Integer)
def _get(context, builder, signature, args):
    place = builder.gep(builder.extract_value(args[0], _DATA), [args[1]])
    return context.unpack_value(builder, signature.args[0].dtype, place)


@lower_builtin(operator.setitem, FlatType, types.Integer, types.Any)
def _set(context, builder, signature, args):
    place = builder.gep(builder.extract_value(args[0], _DATA), [args[1]])
    context.pack_value(builder, signature.args[0].dtype, args[2], place)
    return context.get_dummy_value()


@lower_builtin(operator.getitem, FlatType, types.SliceType)
def _part(context, builder, signature, args):
    kind, sliced = signature.args
    bounds = context.make_helper(builder, sliced, args[1])
    data, size = (builder.extract_value(args[0], field) for field in (_DATA, _SIZE))
    stop = builder.select(builder.icmp_signed("<", bounds.stop, size), bounds.stop, size)
    return _made(context, builder, kind, builder.gep(data, [bounds.start]), builder.sub(stop, bounds.start))
