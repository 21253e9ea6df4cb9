"""Elementary functions that vectorise: the library's own are calls, one element at a time.

`exp` picks by type: a polynomial for float32, the library for float64 and complex numbers.
"""

import math

import numpy as np
from llvmlite import ir
from numba import float32, int32, njit, types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic, overload

# ln 2 in two parts, the first with so few digits that its product with an exponent is exact
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOG2E = np.float32(1.44269504088896341)
_LEAST, _MOST = np.float32(-87.33), np.float32(88.72)


@intrinsic
def _float_of_bits(typingctx, bits):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@njit(forceinline=True)
def _exp32(x):
    """Within two units in the last place; 0 under e^-87.33, where float32 loses its digits.

    e^x = 2^n e^r with |r| <= ln(2)/2, e^r by its Taylor polynomial of degree 7, 2^n through the bits of the exponent.
    """
    inside = min(max(x, _LEAST), _MOST)
    n = np.floor(inside * _LOG2E + float32(0.5))
    r = (inside - n * _LN2_HIGH) - n * _LN2_LOW
    p = float32(1 / 5040)
    p = p * r + float32(1 / 720)
    p = p * r + float32(1 / 120)
    p = p * r + float32(1 / 24)
    p = p * r + float32(1 / 6)
    p = p * r + float32(0.5)
    y = (p * r) * r + (r + float32(1))
    half = int32(n) >> int32(1)  # in two steps: 2^128 has no bits of its own
    y = (
        y
        * _float_of_bits((half + int32(127)) << int32(23))
        * _float_of_bits((int32(n) - half + int32(127)) << int32(23))
    )
    y = float32(0) if x < _LEAST else y
    y = float32(math.inf) if x > _MOST else y
    return x if x != x else y  # NaN


def exp(x):  # pyright: ignore[reportRedeclaration]
    """e^x inside a kernel."""
    raise NotImplementedError


@overload(exp, inline="always")
def _exp(x):
    if x == types.float32:
        return lambda x: _exp32(x)
    return lambda x: np.exp(x)
