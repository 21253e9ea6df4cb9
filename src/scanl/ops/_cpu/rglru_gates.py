"""The gates of RG-LRU: one pass over memory forwards, one backwards.

With r = σ(z_r), i = σ(z_i), l = L r, a = e^l, s = √(1 - a²) and m = max(s, least),

    u = x i m,  dx = du i m,  dz_i = du x m i (1 - i),
    dl = a da - 2 a² ds / max(2 s, 1e-3),  ds = du x i where s >= least, else 0,
    dz_r = dl L r (1 - r),  dL = Σ_rows dl r

1 - a² = -2 tanh(l) / (1 - tanh(l)), without cancellation. A unit of work is a few rows. Each writes its own sum for dL.
"""

import numpy as np
import torch

from scanl.ops._cpu._flat import array
from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._math import exp
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._rows import fill
from scanl.ops._cpu._sigmoid import sigmoid, tanh
from scanl.ops._cpu._slots import part, units

_HEAD = "rows width x i_gate r_gate log_decay least"

ROWS = 128  # of a unit

_UNIT_OPTIONS = {"forceinline": True, "error_model": "numpy"}


@helper(**_UNIT_OPTIONS)
def _apply(u, a, x, i_gate, r_gate, log_decay, least):
    one, two = x.dtype.type(1), x.dtype.type(2)
    for n in range(u.size):
        log = log_decay[n] * sigmoid(r_gate[n])
        half = tanh(log)
        root = np.sqrt(-two * half / (one - half))
        a[n] = exp(log)
        u[n] = x[n] * sigmoid(i_gate[n]) * (least if root < least else root)


@helper(**_UNIT_OPTIONS)
def _differentiate(dx, di, dr, dlog, x, i_gate, r_gate, log_decay, least, du, da):
    zero, one, two, small = x.dtype.type(0), x.dtype.type(1), x.dtype.type(2), x.dtype.type(1e-3)
    for n in range(dx.size):
        i, r = sigmoid(i_gate[n]), sigmoid(r_gate[n])
        log = log_decay[n] * r
        half = tanh(log)
        root = np.sqrt(-two * half / (one - half))
        a, scale = exp(log), least if root < least else root
        slope = two * root
        slope = small if slope < small else slope
        by_root = zero if root < least else du[n] * x[n] * i
        by_log = a * (da[n] - two * a * by_root / slope)
        dx[n] = du[n] * i * scale
        di[n] = du[n] * x[n] * scale * i * (one - i)
        dr[n] = by_log * log * (one - r)
        dlog[n] += by_log * r


@kernel(_HEAD + " u a")
def _forward(slots):
    rows, width, dtype = slots.rows, slots.width, slots.dtype
    log_decay, least = array(slots.log_decay, width, dtype), array(slots.least, rows, dtype)
    for unit in units(slots):
        for n in range(unit * ROWS, min(rows, (unit + 1) * ROWS)):
            first = n * width
            u, a = part(slots.u, first, width, dtype), part(slots.a, first, width, dtype)
            i, r = part(slots.i_gate, first, width, dtype), part(slots.r_gate, first, width, dtype)
            _apply(u, a, part(slots.x, first, width, dtype), i, r, log_decay, least[n])


@kernel(_HEAD + " du da dx di dr dlog")
def _backward(slots):
    rows, width, dtype = slots.rows, slots.width, slots.dtype
    log_decay, least = array(slots.log_decay, width, dtype), array(slots.least, rows, dtype)
    for unit in units(slots):
        dlog = part(slots.dlog, unit * width, width, dtype)
        fill(dlog, 0, width, 0)
        for n in range(unit * ROWS, min(rows, (unit + 1) * ROWS)):
            first = n * width
            dx, di = part(slots.dx, first, width, dtype), part(slots.di, first, width, dtype)
            i, r = part(slots.i_gate, first, width, dtype), part(slots.r_gate, first, width, dtype)
            du, da = part(slots.du, first, width, dtype), part(slots.da, first, width, dtype)
            x, dr = part(slots.x, first, width, dtype), part(slots.dr, first, width, dtype)
            _differentiate(dx, di, dr, dlog, x, i, r, log_decay, least[n], du, da)


def _units(rows: int) -> int:
    return -(-rows // ROWS)


def forward(
    x: torch.Tensor, i_gate: torch.Tensor, r_gate: torch.Tensor, log_decay: torch.Tensor, least: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return u and a, (rows, width). All operands are contiguous: log_decay (width,), least (rows,)."""
    rows, width = x.shape
    u, a = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
    packed = _forward.pack(
        rows=rows, width=width, x=x, i_gate=i_gate, r_gate=r_gate, log_decay=log_decay, least=least, u=u, a=a
    )
    _forward.run(x.dtype, packed, _units(rows), 8 * x.numel())
    return u, a


def backward(
    du: torch.Tensor,
    da: torch.Tensor,
    x: torch.Tensor,
    i_gate: torch.Tensor,
    r_gate: torch.Tensor,
    log_decay: torch.Tensor,
    least: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients by x, i_gate, r_gate and log_decay."""
    rows, width = x.shape
    dx, di, dr = (empty(x.shape, x.dtype) for _ in range(3))
    dlog = x.new_empty(_units(rows), width)
    packed = _backward.pack(
        rows=rows, width=width, x=x, i_gate=i_gate, r_gate=r_gate, log_decay=log_decay, least=least, du=du, da=da,
        dx=dx, di=di, dr=dr, dlog=dlog,
    )  # fmt: skip
    _backward.run(x.dtype, packed, _units(rows), 16 * x.numel())
    return dx, di, dr, dlog.sum(0)
