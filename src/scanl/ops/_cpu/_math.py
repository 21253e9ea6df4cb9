"""Elementary functions that vectorise. The library's functions do not: they are called for each element.

`exp` depends on the type: a polynomial for float32, the library's function for float64 and complex numbers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, int32, types  # pyright: ignore[reportPrivateImportUsage]
from numba.core.typing.templates import signature

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._pointers import intrinsic

# ln 2 in two parts. The first has few digits, so its product with an exponent is exact.
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
LOG2E = np.float32(1.44269504088896341)
ROUND = np.float32(3 << 22)  # x + ROUND holds x, rounded to an integer, in its lowest bits
LOWEST_EXPONENT, HIGHEST_EXPONENT = np.float32(-87.5), np.float32(89)
POLYNOMIAL = tuple(np.float32(c) for c in (0.00138145405, 0.00836874545, 0.0416683890, 0.166665211, 0.49999994))


@intrinsic
def float_of_bits(typingctx, bits):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def bits_of_float(typingctx, number):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@helper(forceinline=True, fastmath={"contract", "nsz"})
def _exp32(x):
    """Return e^x to 1.02 units in the last place; 0 below e^-86.99, inf above the largest float32, NaN for NaN.

    e^x = 2^n e^r with |r| <= ln(2)/2. e^r is a minimax polynomial (relative error 3e-9). 2^(n-1) is built from exponent
    bits: it is 0 at n = -126 and the largest power at n = 128. So clamped x give 0 and inf without a special case.
    """
    x = LOWEST_EXPONENT if x < LOWEST_EXPONENT else x
    x = HIGHEST_EXPONENT if x > HIGHEST_EXPONENT else x
    rounded = x * LOG2E + ROUND
    n = rounded - ROUND
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = POLYNOMIAL[0]
    p = p * r + POLYNOMIAL[1]
    p = p * r + POLYNOMIAL[2]
    p = p * r + POLYNOMIAL[3]
    p = p * r + POLYNOMIAL[4]
    y = (p * r) * r + r + float32(1)
    power = (bits_of_float(rounded) + int32(126)) << int32(23)  # pyright: ignore[reportCallIssue]
    return (y + y) * float_of_bits(power)  # pyright: ignore[reportCallIssue]


def by_dtype(single: Callable, double: Callable) -> Any:
    """Return a function for kernels: `single`, which is its attribute, for float32, and `double` for other types."""

    @intrinsic
    def function(typingctx, x):
        called = typingctx.resolve_value_type(single if x == types.float32 else double)
        found = typingctx.resolve_function_type(called, (x,), {})
        made = signature(found.return_type, *found.args)

        def codegen(context, builder, signature, args):
            return context.get_function(called, made)(builder, args)

        return made, codegen

    function.single = single
    return function


exp = by_dtype(_exp32, np.exp)
# e^x of float32 without freedom to contract: the same bits on every machine, where what calls it has none either
fixed_exp = helper(forceinline=True)(_exp32.py_func)
