"""Tallies of the outputs of linear recurrences above thresholds, in one pass.

A unit of work is one sequence. The loops go along the filters, whose state is in the result, and whose outputs of one
step are in scratch.
"""

import numpy as np
import torch

from scanl.ops._cpu._flat import array
from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._rows import fill
from scanl.ops._cpu._slots import part, units
from scanl.ops._cpu._team import scratch


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
def _change(y, delta, past, z):
    """Set z to y minus delta times the y of the step before, which y becomes."""
    for k in range(y.size):
        z[k] = y[k] - delta[k] * past[k]
        past[k] = y[k]


@helper(forceinline=True)
def _tally(z, thresholds, step, tallies):
    """Add a step to the number of steps above the thresholds, the sum of their numbers, and the stretches of them."""
    counts, sums, runs, longest = tallies
    zero, one = z.dtype.type(0), z.dtype.type(1)
    for k in range(z.size):
        above = one if z[k] > thresholds[k] else zero
        run = (runs[k] + one) * above
        counts[k] += above
        sums[k] += step * above
        runs[k] = run
        longest[k] = run if run > longest[k] else longest[k]


@kernel("channels poles filters levels x decay w c e delta thresholds filters_state past tallies steps bounds")
def _forward(slots):
    width, poles, levels, channels, dtype = slots.filters, slots.poles, slots.levels, slots.channels, slots.dtype
    y, drive, z = scratch(width, dtype), scratch(width, dtype), scratch(width, dtype)
    size = poles * width
    bounds = array(slots.bounds, slots.units + 1, np.int64)
    e, delta = array(slots.e, channels * width, dtype), array(slots.delta, width, dtype)
    steps = array(slots.steps, slots.units, np.int64)
    for n in units(slots):
        past = part(slots.past, n * width, width, dtype)
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
                    part(slots.filters_state, at, width, dtype), part(slots.filters_state, at + size, width, dtype),
                    part(slots.filters_state, at + 2 * size, width, dtype),
                    part(slots.filters_state, at + 3 * size, width, dtype),
                )  # fmt: skip
                a, b = part(slots.decay, first, width, dtype), part(slots.decay, size + first, width, dtype)
                cr, ci = part(slots.c, first, width, dtype), part(slots.c, size + first, width, dtype)
                _advance(drive, a, b, state, cr, ci, y)
            _change(y, delta, past, z)
            number = z.dtype.type(steps[n] + t - bounds[n] + 1)
            for q in range(levels):
                at, every = (n * 4 * levels + q) * width, levels * width
                tallies = (
                    part(slots.tallies, at, width, dtype), part(slots.tallies, at + every, width, dtype),
                    part(slots.tallies, at + 2 * every, width, dtype),
                    part(slots.tallies, at + 3 * every, width, dtype),
                )  # fmt: skip
                _tally(z, part(slots.thresholds, q * width, width, dtype), number, tallies)


def forward(
    x: torch.Tensor,
    poles: torch.Tensor,
    w: torch.Tensor,
    c: torch.Tensor,
    e: torch.Tensor,
    delta: torch.Tensor,
    thresholds: torch.Tensor,
    filters: torch.Tensor,
    past: torch.Tensor,
    tallies: torch.Tensor,
    steps: torch.Tensor,
    bounds: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the filters, the last outputs and the tallies, of contiguous operands, as `scanl.ops.fused.exceedances`.

    steps: (B,), read before.
    """
    levels, width = thresholds.shape
    filters, past, tallies = (part.clone(memory_format=torch.contiguous_format) for part in (filters, past, tallies))
    slots = _forward.pack(
        channels=x.shape[1], poles=poles.shape[1], filters=width, levels=levels, x=x, decay=poles, w=w, c=c, e=e,
        delta=delta, thresholds=thresholds, filters_state=filters, past=past, tallies=tallies,
        steps=steps.to(torch.int64).contiguous(), bounds=bounds.to(torch.int64).contiguous(),
    )  # fmt: skip
    _forward.run(x.dtype, slots, len(filters), x.shape[0] * width * (poles.shape[1] + 2 * levels))
    return filters, past, tallies
