"""Half precision in kernels: numbers of 16 bits in memory, float32 in arithmetic.

numba has neither type for processors. Their arrays can be read and written, and nothing else: `widened` and `put`
convert, in code that vectorises. For other types they do nothing more, so one kernel serves all types.
"""

import operator
from typing import Any

import torch
from llvmlite import ir
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import models, register_model

from scanl.ops._cpu._pointers import intrinsic

_HALF, _WORD, _SINGLE = ir.IntType(16), ir.IntType(32), ir.FloatType()


class HalfType(types.Type):
    """numba's type of numbers of half precision in memory."""


@register_model(HalfType)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _HALF)


_BFLOAT16, _FLOAT16 = HalfType("bfloat16"), HalfType("float16")
HALF_TYPES = {torch.bfloat16: _BFLOAT16, torch.float16: _FLOAT16}


@intrinsic
def widened(typingctx, number):
    """Return a number as one computes with it: float32 for half precision."""
    number = types.unliteral(number)

    def codegen(context, builder, signature, args):
        if number is _FLOAT16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _SINGLE)
        if number is _BFLOAT16:
            return builder.bitcast(builder.shl(builder.zext(args[0], _WORD), _WORD(16)), _SINGLE)
        return args[0]

    return (types.float32 if isinstance(number, HalfType) else number)(number), codegen


@intrinsic
def put(typingctx, row, i, number):
    """Set element i of a row to a number, rounded where the row has half precision."""
    rounds = isinstance(row.dtype, HalfType)
    write = typingctx.resolve_setitem(row, i, row.dtype)

    def codegen(context, builder, signature, args):
        value = _narrowed(builder, row.dtype, args[2]) if rounds else args[2]
        return context.get_function(operator.setitem, write)(builder, (args[0], args[1], value))

    return types.void(row, write.args[1], types.float32 if rounds else row.dtype), codegen


@intrinsic
def keep(typingctx, wide, i, number, row):
    """Set element i of a wide row to a number that `put(row, i, number)` rounds; do nothing where it does not."""
    write = typingctx.resolve_setitem(wide, i, wide.dtype)

    def codegen(context, builder, signature, args):
        if isinstance(row.dtype, HalfType):
            return context.get_function(operator.setitem, write)(builder, args[:3])
        return context.get_dummy_value()

    return types.void(*write.args, row), codegen


@intrinsic
def unrounded(typingctx, row, wide):
    """Return the row that has the numbers as computed: the row itself, or the wide one where the row rounds them."""
    kind, at = (wide, 1) if isinstance(row.dtype, HalfType) else (row, 0)
    return kind(row, wide), lambda context, builder, signature, args: args[at]


def _narrowed(builder: Any, kind: HalfType, number: Any) -> Any:
    """Round to nearest, to even where two are as near."""
    if kind is _FLOAT16:
        return builder.bitcast(builder.fptrunc(number, ir.HalfType()), _HALF)
    bits = builder.bitcast(number, _WORD)
    upper = builder.lshr(bits, _WORD(16))
    odd = builder.and_(upper, _WORD(1))
    rounded = builder.lshr(builder.add(builder.add(bits, _WORD(0x7FFF)), odd), _WORD(16))
    quiet = builder.or_(upper, _WORD(0x40))  # the carry of the rounding would turn a NaN into zero or infinity
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", number, number), quiet, rounded), _HALF)
