"""A gate times numbers, a σ(k(a)) b with k(a) = a (p + q a²): one pass over memory forwards, one backwards."""

import numpy as np
import torch

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._math import exp
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._slots import Slots, view
from scanl.ops._cpu._team import Kernel, array, take

_HEAD = "count a b polynomial"
FORWARD = Slots(_HEAD + " y")
BACKWARD = Slots(_HEAD + " dy da db")

SIZE = 1 << 14  # numbers of a unit

_EACH = {"forceinline": True, "error_model": "numpy"}


@helper(**_EACH)
def _apply(y, a, b, p, q):
    one = a.dtype.type(1)
    for i in range(y.size):
        k = a[i] * p if q == 0 else a[i] * (p + q * a[i] * a[i])  # 0 times infinity is no number
        small = exp(-abs(k))
        y[i] = a[i] * (one if k >= 0 else small) / (one + small) * b[i]


@helper(**_EACH)
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


def _build_forward(dtype):
    item = dtype.itemsize

    def forward(pointer):
        slots = view(pointer, FORWARD)
        counter, units, count = slots.counter, slots.units, slots.count
        a, b, y, polynomial = slots.a, slots.b, slots.y, array(slots.polynomial, 2, dtype)
        p, q = polynomial[0], polynomial[1]
        while True:
            unit = take(counter)
            if unit >= units:
                return
            place, size = item * unit * SIZE, min(SIZE, count - unit * SIZE)
            _apply(array(y + place, size, dtype), array(a + place, size, dtype), array(b + place, size, dtype), p, q)

    return forward


def _build_backward(dtype):
    item = dtype.itemsize

    def backward(pointer):
        slots = view(pointer, BACKWARD)
        counter, units, count = slots.counter, slots.units, slots.count
        a, b, dy, da, db = slots.a, slots.b, slots.dy, slots.da, slots.db
        polynomial = array(slots.polynomial, 2, dtype)
        p, q = polynomial[0], polynomial[1]
        while True:
            unit = take(counter)
            if unit >= units:
                return
            place, size = item * unit * SIZE, min(SIZE, count - unit * SIZE)
            _differentiate(
                array(da + place, size, dtype), array(db + place, size, dtype), array(a + place, size, dtype),
                array(b + place, size, dtype), array(dy + place, size, dtype), p, q,
            )  # fmt: skip

    return backward


_forward, _backward = Kernel(_build_forward), Kernel(_build_backward)


def _head(a: torch.Tensor, b: torch.Tensor, polynomial: tuple[float, float]) -> dict[str, object]:
    pair = np.array(polynomial, a.new_empty(0).numpy().dtype)
    return {"count": a.numel(), "a": a, "b": b, "polynomial": pair}


def forward(a: torch.Tensor, b: torch.Tensor, polynomial: tuple[float, float]) -> torch.Tensor:
    """Return a σ(a (p + q a²)) b for contiguous a and b of one shape; (p, q) is `polynomial`."""
    y = empty(a.shape, a.dtype)
    _forward.run(a.dtype, FORWARD.pack(**_head(a, b, polynomial), y=y), -(-a.numel() // SIZE), 4 * a.numel())
    return y


def backward(
    dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, polynomial: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients by a and by b; dy is contiguous."""
    da, db = empty(a.shape, a.dtype), empty(a.shape, a.dtype)
    packed = BACKWARD.pack(**_head(a, b, polynomial), dy=dy, da=da, db=db)
    _backward.run(a.dtype, packed, -(-a.numel() // SIZE), 8 * a.numel())
    return da, db
