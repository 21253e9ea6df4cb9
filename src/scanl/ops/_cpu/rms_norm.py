"""Division of rows by their root mean square: one pass over memory forwards, one backwards.

With r = 1 / rms(x) and g the gradient by y = r x w,

    dx = r g w - x r³ Σ(g w x) / D,  dw = Σ_rows r g x

A unit of work is a few rows. Each unit writes its own sum for dw.
"""

import numpy as np
import torch

from scanl.ops._cpu._flat import array
from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._rows import fill
from scanl.ops._cpu._slots import part, units

_HEAD = "rows width x weight r"

ROWS = 128  # of a unit

_SUM = {"forceinline": True, "fastmath": {"contract", "nsz", "reassoc"}}
_UNIT_OPTIONS = {"forceinline": True, "error_model": "numpy"}


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


@helper(**_UNIT_OPTIONS)
def _scale(y, x, weight, r):
    for i in range(y.size):
        y[i] = x[i] * r * weight[i]


@helper(**_UNIT_OPTIONS)
def _differentiate(dx, dw, x, weight, dy, r, along):
    for i in range(dx.size):
        g = r * dy[i]
        dx[i] = g * weight[i] - along * x[i]
        dw[i] += g * x[i]


@kernel(_HEAD + " eps y")
def _forward(slots):
    rows, width, dtype = slots.rows, slots.width, slots.dtype
    weight, eps = array(slots.weight, width, dtype), array(slots.eps, 1, np.float64)[0]
    scales = array(slots.r, rows, dtype)
    for unit in units(slots):
        for n in range(unit * ROWS, min(rows, (unit + 1) * ROWS)):
            x, y = part(slots.x, n * width, width, dtype), part(slots.y, n * width, width, dtype)
            r = dtype.type(1) / np.sqrt(_squares(x) / dtype.type(width) + dtype.type(eps))
            scales[n] = r
            _scale(y, x, weight, r)


@kernel(_HEAD + " dy dx dw")
def _backward(slots):
    rows, width, dtype = slots.rows, slots.width, slots.dtype
    weight, scales = array(slots.weight, width, dtype), array(slots.r, rows, dtype)
    for unit in units(slots):
        dw = part(slots.dw, unit * width, width, dtype)
        fill(dw, 0, width, 0)
        for n in range(unit * ROWS, min(rows, (unit + 1) * ROWS)):
            first, r = n * width, scales[n]
            x, dy = part(slots.x, first, width, dtype), part(slots.dy, first, width, dtype)
            along = r * r * r * _along(x, weight, dy) / dtype.type(width)
            _differentiate(part(slots.dx, first, width, dtype), dw, x, weight, dy, r, along)


def _units(rows: int) -> int:
    return -(-rows // ROWS)


def forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y = x / rms(x) * weight for contiguous x (rows, width), and 1 / rms(x), (rows,)."""
    rows, width = x.shape
    y, r = empty(x.shape, x.dtype), x.new_empty(rows)
    packed = _forward.pack(rows=rows, width=width, x=x, weight=weight, r=r, eps=np.array([eps]), y=y)
    _forward.run(x.dtype, packed, _units(rows), x.numel())
    return y, r


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients by x and by weight; dy (rows, width) is contiguous."""
    rows, width = x.shape
    dx, dw = empty(x.shape, x.dtype), x.new_empty(_units(rows), width)
    packed = _backward.pack(rows=rows, width=width, x=x, weight=weight, r=r, dy=dy, dx=dx, dw=dw)
    _backward.run(x.dtype, packed, _units(rows), 2 * x.numel())
    return dx, dw.sum(0)
