"""Division of rows by their root mean square: one pass over memory forwards, one backwards.

With r = 1 / rms(x) and g the gradient by y = r x w,

    dx = r g w - x r³ Σ(g w x) / D,  dw = Σ_rows r g x

A unit of work is a few rows. Each unit writes its own sum for dw.
"""

import numpy as np
import torch

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._rows import fill
from scanl.ops._cpu._slots import Slots, view
from scanl.ops._cpu._team import Kernel, array, take

_HEAD = "rows width x weight r"
FORWARD = Slots(_HEAD + " eps y")
BACKWARD = Slots(_HEAD + " dy dx dw")

ROWS = 128  # of a unit

_SUM = {"forceinline": True, "fastmath": {"contract", "nsz", "reassoc"}}
_EACH = {"forceinline": True, "error_model": "numpy"}


@helper(**_SUM)
def _squares(x):
    total = x.dtype.type(0)
    for i in range(x.size):
        total += x[i] * x[i]
    return total


@helper(**_SUM)
def _along(x, weight, dy):
    total = x.dtype.type(0)
    for i in range(x.size):
        total += dy[i] * weight[i] * x[i]
    return total


@helper(**_EACH)
def _scale(y, x, weight, r):
    for i in range(y.size):
        y[i] = x[i] * r * weight[i]


@helper(**_EACH)
def _differentiate(dx, dw, x, weight, dy, r, along):
    for i in range(dx.size):
        g = r * dy[i]
        dx[i] = g * weight[i] - along * x[i]
        dw[i] += g * x[i]


def _build_forward(dtype):
    item = dtype.itemsize

    def forward(pointer):
        slots = view(pointer, FORWARD)
        counter, units, rows, width = slots.counter, slots.units, slots.rows, slots.width
        x, y, kind = slots.x, slots.y, dtype.type
        weight, eps = array(slots.weight, width, dtype), array(slots.eps, 1, np.float64)[0]
        scales = array(slots.r, rows, dtype)
        while True:
            unit = take(counter)
            if unit >= units:
                return
            for n in range(unit * ROWS, min(rows, (unit + 1) * ROWS)):
                source = array(x + item * n * width, width, dtype)
                r = kind(1) / np.sqrt(_squares(source) / kind(width) + kind(eps))
                scales[n] = r
                _scale(array(y + item * n * width, width, dtype), source, weight, r)

    return forward


def _build_backward(dtype):
    item = dtype.itemsize

    def backward(pointer):
        slots = view(pointer, BACKWARD)
        counter, units, rows, width = slots.counter, slots.units, slots.rows, slots.width
        xs, dys, dxs, kind = slots.x, slots.dy, slots.dx, dtype.type
        weight, scales = array(slots.weight, width, dtype), array(slots.r, rows, dtype)
        while True:
            unit = take(counter)
            if unit >= units:
                return
            dw = array(slots.dw + item * unit * width, width, dtype)
            fill(dw, 0, width, 0)
            for n in range(unit * ROWS, min(rows, (unit + 1) * ROWS)):
                place, r = item * n * width, scales[n]
                x, dy = array(xs + place, width, dtype), array(dys + place, width, dtype)
                along = r * r * r * _along(x, weight, dy) / kind(width)
                _differentiate(array(dxs + place, width, dtype), dw, x, weight, dy, r, along)

    return backward


_forward, _backward = Kernel(_build_forward), Kernel(_build_backward)


def _units(rows: int) -> int:
    return -(-rows // ROWS)


def forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y = x / rms(x) * weight for contiguous x (rows, width), and 1 / rms(x), (rows,)."""
    rows, width = x.shape
    y, r = empty(x.shape, x.dtype), x.new_empty(rows)
    packed = FORWARD.pack(rows=rows, width=width, x=x, weight=weight, r=r, eps=np.array([eps]), y=y)
    _forward.run(x.dtype, packed, _units(rows), x.numel())
    return y, r


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients by x and by weight; dy (rows, width) is contiguous."""
    rows, width = x.shape
    dx, dw = empty(x.shape, x.dtype), x.new_empty(_units(rows), width)
    packed = BACKWARD.pack(rows=rows, width=width, x=x, weight=weight, r=r, dy=dy, dx=dx, dw=dw)
    _backward.run(x.dtype, packed, _units(rows), 2 * x.numel())
    return dx, dw.sum(0)
