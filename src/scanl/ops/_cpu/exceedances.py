"""Counts of the outputs of linear recurrences above thresholds, in one pass.

A unit of work is one sequence. The loops go along the filters, whose state is in the result, and whose outputs of one
step are in scratch.
"""

import numpy as np
import torch

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._rows import fill
from scanl.ops._cpu._slots import part, units
from scanl.ops._cpu._team import array, scratch


@helper(forceinline=True)
def _mix(x, weights, y):
    """Set y to x times the weights, of shape (x.size, y.size)."""
    width = y.size
    fill(y, 0, width, 0)
    for i in range(x.size):
        for k in range(width):
            y[k] += x[i] * weights[i * width + k]


@helper(forceinline=True)
def _advance(drive, a, b, state, cr, ci, y):
    """Move the states of one pole of each filter by a step, and add their outputs to y."""
    width = y.size
    p, q, r, s = state
    for k in range(width):
        real = a[k] * p[k] - b[k] * q[k] + drive[k]
        imag = a[k] * q[k] + b[k] * p[k]
        p[k], q[k] = real, imag
        above = a[k] * r[k] - b[k] * s[k] + real
        below = a[k] * s[k] + b[k] * r[k] + imag
        r[k], s[k] = above, below
        y[k] += cr[k] * above + ci[k] * below


@helper(forceinline=True)
def _count(y, thresholds, counts):
    for k in range(y.size):
        if y[k] > thresholds[k]:
            counts[k] += 1


@kernel("channels poles filters levels x decay w c e thresholds state counts bounds")
def _forward(slots):
    width, poles, levels, channels, dtype = slots.filters, slots.poles, slots.levels, slots.channels, slots.dtype
    y, drive = scratch(width, dtype), scratch(width, dtype)
    size = poles * width
    bounds = array(slots.bounds, slots.units + 1, np.int64)
    e = array(slots.e, channels * width, dtype)
    for n in units(slots):
        for t in range(bounds[n], bounds[n + 1]):
            x = part(slots.x, t * channels, channels, dtype)
            _mix(x, e, y)
            for f in range(poles):
                first = f * width
                fill(drive, 0, width, 0)
                for i in range(channels):
                    weights = part(slots.w, i * size + first, width, dtype)
                    for k in range(width):
                        drive[k] += x[i] * weights[k]
                at = n * 4 * size + first
                state = (
                    part(slots.state, at, width, dtype), part(slots.state, at + size, width, dtype),
                    part(slots.state, at + 2 * size, width, dtype), part(slots.state, at + 3 * size, width, dtype),
                )  # fmt: skip
                a, b = part(slots.decay, first, width, dtype), part(slots.decay, size + first, width, dtype)
                cr, ci = part(slots.c, first, width, dtype), part(slots.c, size + first, width, dtype)
                _advance(drive, a, b, state, cr, ci, y)
            for q in range(levels):
                counts = part(slots.counts, (n * levels + q) * width, width, dtype)
                _count(y, part(slots.thresholds, q * width, width, dtype), counts)


def forward(
    x: torch.Tensor,
    poles: torch.Tensor,
    w: torch.Tensor,
    c: torch.Tensor,
    e: torch.Tensor,
    thresholds: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the counts and the last state, of contiguous operands, as `scanl.ops.fused.exceedances` says."""
    (levels, width), state = thresholds.shape, state.clone(memory_format=torch.contiguous_format)
    counts = x.new_zeros(len(state), levels, width)
    slots = _forward.pack(
        channels=x.shape[1], poles=poles.shape[1], filters=width, levels=levels, x=x, decay=poles, w=w, c=c, e=e,
        thresholds=thresholds, state=state, counts=counts, bounds=cu_seqlens.to(torch.int64).contiguous(),
    )  # fmt: skip
    _forward.run(x.dtype, slots, len(state), x.shape[0] * width * (poles.shape[1] + levels))
    return counts, state
