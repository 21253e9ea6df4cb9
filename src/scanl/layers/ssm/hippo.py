r"""HiPPO: the past of each channel as the coefficients of its best approximation by polynomials or waves.

.. math:: c_t = \bar A_t c_{t-1} + \bar B_t x_t, \quad y_t = \sum_n C_n c_{t,n}
"""

import math
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, unknown
from scanl.layers.base import Layer, as_widened, register, widen
from scanl.layers.packing import sequence_index
from scanl.layers.parts.cell_layer import positive, samples
from scanl.layers.parts.polynomial_memory import (
    MEASURES,
    SOURCE,
    discretize_dense,
    legs_steps,
    memory_cell,
    transition,
)
from scanl.layers.state import Device, DType
from scanl.ops.cell import cell
from scanl.ops.registry import Sample

METHODS = ("zoh", "bilinear")


class HiPPOState(NamedTuple):
    """The memory of each channel, and how many inputs it has seen."""

    c: Tensor  # (B, D, N)
    steps: Tensor  # (B,) int64


@cell(
    "u: B T C, a: B T N N, b: B T N, state: B C N -> B T C N",
    equation="c_t = A_t c_{t-1} + b_t u_t",
    source=SOURCE + ", theorem 2",
)
def varying_memory_cell(u, a, b, state):
    """Step C memories with the matrix of the step.

    u: inputs, (B, T, C).   a: A_t, (B, T, N, N).   b: (B, T, N).   state: c, (B, C, N).
    """
    state = (a[:, None] * state[:, :, None]).sum(-1) + u[..., None] * b[:, None]
    return state, state


@varying_memory_cell.samples
def _samples() -> Iterator[Sample]:
    return samples(
        lambda draw, batch, steps, rows: {
            "u": draw(batch, steps, 2),
            "a": draw(batch, steps, 3, 3) / 2,
            "b": draw(batch, steps, 3),
            "state": draw(rows, 2, 3),
        }
    )


@varying_memory_cell.errors
def _errors() -> Iterator[tuple[Sample, str]]:
    u, a, b = torch.zeros(2, 5, 3), torch.zeros(2, 5, 4, 4), torch.zeros(2, 5, 4)
    yield Sample({"u": u, "a": a, "b": b[..., :2]}), "b has shape (2, 5, 2), expected (B, T, N)"
    yield Sample({"u": u, "a": a, "b": b, "state": u[:, 0]}), "state has shape (2, 3), expected (B, C, N)"


def inputs_before(steps: Tensor, length: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return how many inputs came before each step, (B, T), and how many there are after all of them.

    steps: (B,), inputs before the first step; of packed sequences one number each, and (1, T) is returned.
    """
    index = torch.arange(length, device=steps.device)
    if cu_seqlens is None:
        return steps[:, None] + index, steps + length
    owner = sequence_index(cu_seqlens, length)
    return (steps[owner] + index - cu_seqlens[owner])[None], steps + cu_seqlens.diff()


@register("hippo")
class HiPPO(Layer):
    """HiPPO: N numbers for each channel, from which its past can be reconstructed, and a linear map of them.

    `memory` returns the numbers of every step, and `scanl.layers.parts.polynomial_memory.reconstruct` the past that
    they stand for. "legs" remembers all of the past in equal measure, and the scale of time does not matter to it.
    "legt" remembers the last θ steps, "fourier" does so by waves, and "lagt" by Laguerre functions that decay over θ
    steps. With "zoh" the memory of "legs" is the exact projection of the input, held over each step.

    Of "legs" the matrices of all steps are in memory, B T N² numbers. For a long sequence, pass it in pieces.

    Args:
        dim: D, channels.
        size: N, numbers of each channel; even for "fourier".
        measure: "legs", "legt", "lagt" or "fourier".
        theta: θ, length of the window in steps; "legs" has none.
        discretization: "zoh" or "bilinear".

    Parameters: C (D, N). The matrices are fixed: buffers A (N, N) and B (N), discrete, except of "legs".
    Initialisation: C N(0, 1/N).
    State: c (B, D, N), and the number of inputs (B).
    """

    id = "S-hippo"
    equation = "c_t = A_t c_{t-1} + B_t x_t,  y_t = sum_n C_n c_{t,n},  A_t fixed by a measure of the past"
    source = SOURCE + ", theorems 1 and 2, sec. 2.4"
    op = "varying_memory_cell"
    sample: ClassVar = {"size": 4}

    A: Tensor
    B: Tensor

    def __init__(
        self, dim: int, size: int = 64, measure: str = "legs", theta: float = 1000.0, discretization: str = "zoh"
    ) -> None:
        super().__init__()
        if measure not in MEASURES:
            raise ConfigError(f"hippo: {unknown('measure', measure, MEASURES)}")
        if discretization not in METHODS:
            raise ConfigError(f"hippo: {unknown('discretization', discretization, METHODS)}")
        positive("hippo", theta=theta)
        self.dim, self.size, self.measure, self.theta = dim, size, measure, theta
        self.discretization = discretization
        system = transition(measure, size)
        if measure != "legs":
            A, B = discretize_dense(*system, 1 / theta, discretization)
            self.register_buffer("A", A.to(torch.get_default_dtype()))
            self.register_buffer("B", B.to(torch.get_default_dtype()))
        self.C = nn.Parameter(torch.randn(dim, size) / math.sqrt(size))

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> HiPPOState:
        c = self._zeros(batch_size, self.dim, self.size, device=device, dtype=dtype, at_least=torch.float32)
        return HiPPOState(c, torch.zeros(batch_size, dtype=torch.int64, device=c.device))

    def memory(
        self, x: Tensor, state: HiPPOState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, HiPPOState]:
        """Return c of every step, (B, T, D, N), in float32 or wider, and the state after the last one."""
        self._check(x, state, cu_seqlens)
        if state is None:
            state = self.init_state(x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)
        before, steps = inputs_before(state.steps, x.shape[1], cu_seqlens)
        u = widen(x)
        with as_widened(x):
            if self.measure == "legs":
                a, b = (each.to(u.dtype) for each in legs_steps(before, self.size, self.discretization))
                c, last = varying_memory_cell(u, a, b, state.c, cu_seqlens=cu_seqlens)
            else:
                c, last = memory_cell(u, widen(self.A), widen(self.B), state.c, cu_seqlens=cu_seqlens)
        return c, HiPPOState(last, steps)

    def forward(
        self, x: Tensor, state: HiPPOState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, HiPPOState]:
        c, last = self.memory(x, state, cu_seqlens=cu_seqlens)
        return (c * widen(self.C)).sum(-1).to(x.dtype), last
