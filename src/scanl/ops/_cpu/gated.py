"""A gate times numbers, a σ(k(a)) b with k(a) = a (p + q a²): one pass over memory forwards, one backwards."""

import numpy as np
import torch

from scanl.ops._cpu._flat import array
from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._math import exp
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._slots import part, units

_HEAD = "count a b polynomial"

SIZE = 1 << 14  # numbers of a unit

_UNIT_OPTIONS = {"forceinline": True, "error_model": "numpy"}


@helper(**_UNIT_OPTIONS)
def _apply(y, a, b, p, q):
    one = a.dtype.type(1)
    for i in range(y.size):
        k = a[i] * p if q == 0 else a[i] * (p + q * a[i] * a[i])  # 0 times infinity is no number
        small = exp(-abs(k))
        y[i] = a[i] * (one if k >= 0 else small) / (one + small) * b[i]


@helper(**_UNIT_OPTIONS)
def _differentiate(da, db, a, b, dy, p, q):
    one, three = a.dtype.type(1), a.dtype.type(3)
    for i in range(da.size):
        square = q if q == 0 else q * a[i] * a[i]
        k = a[i] * (p + square)
        small = exp(-abs(k))
        high = one / (one + small)
        low = small * high  # 1 - high, without cancellation
        gate, other = (high, low) if k >= 0 else (low, high)
        db[i] = dy[i] * a[i] * gate
        da[i] = dy[i] * b[i] * gate * (one + a[i] * (p + three * square) * other)


@kernel(_HEAD + " y")
def _forward(slots):
    dtype = slots.dtype
    polynomial = array(slots.polynomial, 2, dtype)
    p, q = polynomial[0], polynomial[1]
    for unit in units(slots):
        first, size = unit * SIZE, min(SIZE, slots.count - unit * SIZE)
        a, b = part(slots.a, first, size, dtype), part(slots.b, first, size, dtype)
        _apply(part(slots.y, first, size, dtype), a, b, p, q)


@kernel(_HEAD + " dy da db")
def _backward(slots):
    dtype = slots.dtype
    polynomial = array(slots.polynomial, 2, dtype)
    p, q = polynomial[0], polynomial[1]
    for unit in units(slots):
        first, size = unit * SIZE, min(SIZE, slots.count - unit * SIZE)
        a, b = part(slots.a, first, size, dtype), part(slots.b, first, size, dtype)
        da, db = part(slots.da, first, size, dtype), part(slots.db, first, size, dtype)
        _differentiate(da, db, a, b, part(slots.dy, first, size, dtype), p, q)


def _head(a: torch.Tensor, b: torch.Tensor, polynomial: tuple[float, float]) -> dict[str, object]:
    pair = np.array(polynomial, a.new_empty(0).numpy().dtype)
    return {"count": a.numel(), "a": a, "b": b, "polynomial": pair}


def forward(a: torch.Tensor, b: torch.Tensor, polynomial: tuple[float, float]) -> torch.Tensor:
    """Return a σ(a (p + q a²)) b for contiguous a and b of one shape; (p, q) is `polynomial`."""
    y = empty(a.shape, a.dtype)
    _forward.run(a.dtype, _forward.pack(**_head(a, b, polynomial), y=y), -(-a.numel() // SIZE), 4 * a.numel())
    return y


def backward(
    dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, polynomial: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients by a and by b; dy is contiguous."""
    da, db = empty(a.shape, a.dtype), empty(a.shape, a.dtype)
    packed = _backward.pack(**_head(a, b, polynomial), dy=dy, da=da, db=db)
    _backward.run(a.dtype, packed, -(-a.numel() // SIZE), 8 * a.numel())
    return da, db
