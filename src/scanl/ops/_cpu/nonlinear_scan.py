"""CPU kernel of Newton's method: the dense recurrence d_t = b_t + J_t d_{t-1}, or d_t = b_t + J_{t+1}ᵀ d_{t+1}."""

import torch

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._slots import part, units


@helper(forceinline=True, fastmath={"contract", "nsz", "reassoc"})
def _inner(a, b):
    total = a.dtype.type(0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@kernel("steps width jacobians offsets out")
def _forward(slots):
    width, dtype = slots.width, slots.dtype
    for unit in units(slots):
        for t in range(slots.steps):
            row = (unit * slots.steps + t) * width
            b, d = part(slots.offsets, row, width, dtype), part(slots.out, row, width, dtype)
            for i in range(width):
                d[i] = b[i]
            if t > 0:
                previous = part(slots.out, row - width, width, dtype)
                matrix = part(slots.jacobians, row * width, width * width, dtype)
                for i in range(width):
                    d[i] += _inner(matrix[i * width : (i + 1) * width], previous)


@kernel("steps width jacobians offsets out")
def _adjoint(slots):
    width, dtype = slots.width, slots.dtype
    for unit in units(slots):
        for t in range(slots.steps - 1, -1, -1):
            row = (unit * slots.steps + t) * width
            b, d = part(slots.offsets, row, width, dtype), part(slots.out, row, width, dtype)
            for i in range(width):
                d[i] = b[i]
            if t < slots.steps - 1:
                after = part(slots.out, row + width, width, dtype)
                matrix = part(slots.jacobians, (row + width) * width, width * width, dtype)
                for j in range(width):
                    factor, line = after[j], matrix[j * width : (j + 1) * width]
                    for i in range(width):
                        d[i] += factor * line[i]


def affine(jacobians: torch.Tensor, offsets: torch.Tensor, *, adjoint: bool) -> torch.Tensor:
    """Return d of every step from J (B, T, E, E) and b (B, T, E), contiguous float32 or float64."""
    batch, steps, width = offsets.shape
    out = empty(offsets.shape, offsets.dtype)
    chosen = _adjoint if adjoint else _forward
    slots = chosen.pack(steps=steps, width=width, jacobians=jacobians, offsets=offsets, out=out)
    chosen.run(offsets.dtype, slots, batch, jacobians.numel())
    return out
