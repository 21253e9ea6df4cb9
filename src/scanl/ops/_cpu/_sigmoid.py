"""Sigmoid, its logarithm and tanh, which vectorise: in float32 by polynomials and the `exp` of _math.py.

Division follows IEEE here: Python's check for zero would add a branch per element.
"""

import math

import numpy as np
from numba import float32, int32  # pyright: ignore[reportPrivateImportUsage]

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._math import LN2_HIGH, LN2_LOW, LOG2E, by_dtype, exp, float_of_bits

_FLAGS = {"forceinline": True, "error_model": "numpy", "fastmath": {"contract", "nsz"}}
_LARGE_INPUT = np.float32(20)  # for 2 |x| above this, |tanh x| is 1 in float32


@helper(**_FLAGS)
def _sigmoid32(x):
    return float32(1) / (float32(1) + exp(-x))


@helper(**_FLAGS)
def _sigmoid64(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


sigmoid = by_dtype(_sigmoid32, _sigmoid64)


@helper(**_FLAGS)
def _tanh32(x):
    """Return u / (u + 2), u = e^2|x| - 1 = 2^n (e^r - 1) + (2^n - 1), |r| <= ln(2)/2, signed: exact for small x too."""
    inside = min(abs(x + x), _LARGE_INPUT)
    n = np.floor(inside * LOG2E + float32(0.5))
    r = (inside - n * LN2_HIGH) - n * LN2_LOW
    p = float32(1 / 5040)
    p = p * r + float32(1 / 720)
    p = p * r + float32(1 / 120)
    p = p * r + float32(1 / 24)
    p = p * r + float32(1 / 6)
    p = p * r + float32(0.5)
    power = float_of_bits((int32(n) + int32(127)) << int32(23))  # pyright: ignore[reportCallIssue]
    u = power * ((p * r) * r + r) + (power - float32(1))
    y = u / (u + float32(2))
    y = -y if x < float32(0) else y
    return x if x != x else y  # NaN


tanh = by_dtype(_tanh32, math.tanh)


@helper(**_FLAGS)
def _log_sigmoid32(x):
    """Return min(x, 0) - log(1 + u), u = e^-|x|. log(1 + u) = 2 artanh s, s = u/(2 + u) <= 1/3, is a series to s^17."""
    u = exp(-abs(x))
    s = u / (float32(2) + u)
    square = s * s
    p = float32(1 / 17)
    p = p * square + float32(1 / 15)
    p = p * square + float32(1 / 13)
    p = p * square + float32(1 / 11)
    p = p * square + float32(1 / 9)
    p = p * square + float32(1 / 7)
    p = p * square + float32(1 / 5)
    p = p * square + float32(1 / 3)
    return min(x, float32(0)) - float32(2) * (s + s * square * p)


@helper(**_FLAGS)
def _log_sigmoid64(x):
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))


log_sigmoid = by_dtype(_log_sigmoid32, _log_sigmoid64)
