"""Half precision in kernels: numbers of 16 bits in memory, float32 in arithmetic.

numba has neither type for processors. Their arrays can be read and written, and nothing else: `widened` and `put`
convert, in code that vectorises. For other types they do nothing more, so one kernel serves all types.
"""

import torch
from llvmlite import ir
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import models, overload, register_model

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
def _widen(typingctx, number):
    def codegen(context, builder, signature, args):
        if signature.args[0] is _FLOAT16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _SINGLE)
        return builder.bitcast(builder.shl(builder.zext(args[0], _WORD), _WORD(16)), _SINGLE)

    return types.float32(number), codegen


@intrinsic
def _narrow(typingctx, number, row):
    """Round to nearest, to even where two are as near."""

    def codegen(context, builder, signature, args):
        number = args[0]
        if signature.return_type is _FLOAT16:
            return builder.bitcast(builder.fptrunc(number, ir.HalfType()), _HALF)
        bits = builder.bitcast(number, _WORD)
        upper = builder.lshr(bits, _WORD(16))
        odd = builder.and_(upper, _WORD(1))
        rounded = builder.lshr(builder.add(builder.add(bits, _WORD(0x7FFF)), odd), _WORD(16))
        quiet = builder.or_(upper, _WORD(0x40))  # the carry of the rounding would turn a NaN into zero or infinity
        return builder.trunc(builder.select(builder.fcmp_unordered("uno", number, number), quiet, rounded), _HALF)

    return row.dtype(types.float32, row), codegen


def widened(number):
    """Return a number as one computes with it: float32 for half precision."""
    raise NotImplementedError


def put(row, i, number):
    """Set element i of a row to a number, rounded where the row has half precision."""
    raise NotImplementedError


def keep(wide, i, number, row):
    """Set element i of a wide row to a number that `put(row, i, number)` rounds; do nothing where it does not."""
    raise NotImplementedError


def unrounded(row, wide):
    """Return the row that has the numbers as computed: the row itself, or the wide one where the row rounds them."""
    raise NotImplementedError


@overload(widened, inline="always")
def _(number):
    if isinstance(number, HalfType):
        return lambda number: _widen(number)
    return lambda number: number


@overload(put, inline="always")
def _(row, i, number):
    def rounded(row, i, number):
        row[i] = _narrow(number, row)

    def whole(row, i, number):
        row[i] = number

    return rounded if isinstance(row.dtype, HalfType) else whole


@overload(keep, inline="always")
def _(wide, i, number, row):
    def written(wide, i, number, row):
        wide[i] = number

    def left(wide, i, number, row):
        pass

    return written if isinstance(row.dtype, HalfType) else left


@overload(unrounded, inline="always")
def _(row, wide):
    if isinstance(row.dtype, HalfType):
        return lambda row, wide: wide
    return lambda row, wide: row
