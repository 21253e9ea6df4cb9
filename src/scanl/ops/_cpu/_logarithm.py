"""log, log(1 + x) and e^x - 1, which vectorise: in float32 by polynomials, without a call for each element."""

# pyright: reportCallIssue=false
# numba's conversions of a number have no types that pyright knows.

import math

import numpy as np
from numba import float32, int32  # pyright: ignore[reportPrivateImportUsage]

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._math import LN2_HIGH, LN2_LOW, LOG2E, bits_of_float, by_dtype, float_of_bits

_FLAGS = {"forceinline": True, "error_model": "numpy", "fastmath": {"contract", "nsz"}}
_SMALLEST_NORMAL = np.float32(1.1754944e-38)  # normal
_SCALE = np.float32(1 << 24)  # brings a subnormal number among the normal ones
_ROOT = int32(0x3F3504F3)  # the bits of 1/√2, the least mantissa
_LOWEST, _HIGHEST = np.float32(-25), np.float32(89)  # e^x - 1 is -1 below, inf above


@helper(**_FLAGS)
def _log32(x):
    """Return n ln 2 + log m, x = 2^n m, 1/√2 <= m < √2. log m = 2 artanh s, s = (m - 1)/(m + 1): a series to s^11."""
    small = x < _SMALLEST_NORMAL
    wide = x * _SCALE if small else x
    bits = bits_of_float(wide) - _ROOT
    n = float32(bits >> int32(23)) - (float32(24) if small else float32(0))
    f = float_of_bits((bits & int32(0x007FFFFF)) + _ROOT) - float32(1)
    s = f / (float32(2) + f)
    square = s * s
    p = float32(2 / 11)
    p = p * square + float32(2 / 9)
    p = p * square + float32(2 / 7)
    p = p * square + float32(2 / 5)
    p = p * square + float32(2 / 3)
    half = float32(0.5) * f * f
    y = n * LN2_HIGH + (f - (half - (s * (half + square * p) + n * LN2_LOW)))
    y = float32(-np.inf) if x == float32(0) else y
    y = float32(np.nan) if x < float32(0) else y
    return x if (x != x) | (x == float32(np.inf)) else y


@helper(**_FLAGS)
def _log1p32(x):
    """Return log u + (x - (u - 1)) / u, u = 1 + x: the second term is what rounding took from u."""
    u = float32(1) + x
    y = _log32(u) + (x - (u - float32(1))) / u
    plain = (u == float32(0)) | (u == float32(np.inf))
    y = _log32(u) if plain else y
    return x if x == float32(0) else y


@helper(**_FLAGS)
def _expm132(x):
    """Return 2^n (e^r - 1) + (2^n - 1), |r| <= ln(2)/2, n an integer: exact for small x too."""
    inside = max(min(x, _HIGHEST), _LOWEST)
    n = np.floor(inside * LOG2E + float32(0.5))
    r = (inside - n * LN2_HIGH) - n * LN2_LOW
    p = float32(1 / 5040)
    p = p * r + float32(1 / 720)
    p = p * r + float32(1 / 120)
    p = p * r + float32(1 / 24)
    p = p * r + float32(1 / 6)
    p = p * r + float32(0.5)
    half = float_of_bits((int32(n) + int32(126)) << int32(23))  # 2^128 is no float32, 2^127 is
    u = float32(2) * (half * ((p * r) * r + r) + (half - float32(0.5)))
    return x if x != x else u


log = by_dtype(_log32, math.log)
log1p = by_dtype(_log1p32, math.log1p)
expm1 = by_dtype(_expm132, math.expm1)
