"""CPU kernel of Newton's method: the dense recurrence d_t = b_t + J_t d_{t-1}, or d_t = b_t + J_{t+1}ᵀ d_{t+1}."""

import torch

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._slots import Slots, view
from scanl.ops._cpu._team import Kernel, array, take

AFFINE = Slots("steps width jacobians offsets out")  # for both kernels


@helper(forceinline=True, fastmath={"contract", "nsz", "reassoc"})
def _inner(a, b):
    total = a.dtype.type(0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total


def _build_forward(dtype):
    item = dtype.itemsize

    def forward(pointer):
        slots = view(pointer, AFFINE)
        counter, units, steps, width = slots.counter, slots.units, slots.steps, slots.width
        jacobians, offsets, out = slots.jacobians, slots.offsets, slots.out
        while True:
            unit = take(counter)
            if unit >= units:
                return
            for t in range(steps):
                row = item * (unit * steps + t) * width
                b, d = array(offsets + row, width, dtype), array(out + row, width, dtype)
                for i in range(width):
                    d[i] = b[i]
                if t > 0:
                    before = array(out + row - item * width, width, dtype)
                    matrix = array(jacobians + row * width, width * width, dtype)
                    for i in range(width):
                        d[i] += _inner(matrix[i * width : (i + 1) * width], before)

    return forward


def _build_adjoint(dtype):
    item = dtype.itemsize

    def adjoint(pointer):
        slots = view(pointer, AFFINE)
        counter, units, steps, width = slots.counter, slots.units, slots.steps, slots.width
        jacobians, offsets, out = slots.jacobians, slots.offsets, slots.out
        while True:
            unit = take(counter)
            if unit >= units:
                return
            for t in range(steps - 1, -1, -1):
                row = item * (unit * steps + t) * width
                b, d = array(offsets + row, width, dtype), array(out + row, width, dtype)
                for i in range(width):
                    d[i] = b[i]
                if t < steps - 1:
                    after = array(out + row + item * width, width, dtype)
                    matrix = array(jacobians + (row + item * width) * width, width * width, dtype)
                    for j in range(width):
                        factor, line = after[j], matrix[j * width : (j + 1) * width]
                        for i in range(width):
                            d[i] += factor * line[i]

    return adjoint


_kernels = {False: Kernel(_build_forward), True: Kernel(_build_adjoint)}


def affine(jacobians: torch.Tensor, offsets: torch.Tensor, *, adjoint: bool) -> torch.Tensor:
    """Return d of every step from J (B, T, E, E) and b (B, T, E), contiguous float32 or float64."""
    batch, steps, width = offsets.shape
    out = empty(offsets.shape, offsets.dtype)
    slots = AFFINE.pack(steps=steps, width=width, jacobians=jacobians, offsets=offsets, out=out)
    _kernels[adjoint].run(offsets.dtype, slots, batch, jacobians.numel())
    return out
