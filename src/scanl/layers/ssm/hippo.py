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
from scanl.layers.parts.cell_layer import positive, samples
from scanl.layers.parts.polynomial_memory import (
    MEASURES,
    SOURCE,
    discretize_dense,
    legs_steps,
    memory_cell,
    transition,
)
from scanl.layers.parts.timespans import durations
from scanl.layers.state import Device, DType
from scanl.ops import linear_scan
from scanl.ops.cell import cell
from scanl.ops.registry import Sample

METHODS = ("zoh", "bilinear")


class Elapsed(NamedTuple):
    """The time since the start, in units of the usual step: whole units, and a fraction below 1.

    Of steps of one unit each it is the number of inputs, which an integer counts exactly.
    """

    steps: Tensor  # (B,) int64
    rest: Tensor  # (B,), float32 or wider


class HiPPOState(NamedTuple):
    """The memory of each channel, and the time that it has seen."""

    c: Tensor  # (B, D, N)
    elapsed: Elapsed


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


def no_time(like: Tensor) -> Elapsed:
    """Return that no time has elapsed, one number for each row of `like`, in its dtype."""
    rows = like.shape[0]
    return Elapsed(torch.zeros(rows, dtype=torch.int64, device=like.device), like.new_zeros(rows))


def time_before(elapsed: Elapsed, spans: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Elapsed]:
    """Return the time before each step, (B, T) in float64, and that after all of them.

    elapsed: before the first step, one number for each sequence.   spans: (B, T, 1), how long each step lasts.
    """
    dtype, spans = spans.dtype, spans.double()
    one = torch.ones((), dtype=spans.dtype, device=spans.device)
    start = (elapsed.steps + elapsed.rest.double())[:, None]
    after, last = linear_scan(spans, one, start, cu_seqlens=cu_seqlens)
    whole = last[:, 0].detach().floor()
    return (after - spans)[..., 0], Elapsed(whole.long(), (last[:, 0] - whole).to(dtype))


@register("hippo")
class HiPPO(Layer):
    """HiPPO: N numbers for each channel, from which its past can be reconstructed, and a linear map of these numbers.

    `memory` returns the numbers of every step, and `scanl.layers.parts.polynomial_memory.reconstruct` returns the past
    that they represent. "legs" remembers all of the past in equal measure, at any scale of time. "legt" remembers the
    last θ steps by polynomials, and "fourier" remembers them by waves. "lagt" remembers by Laguerre functions that
    decay over θ steps. With "zoh" the memory of "legs" is the exact projection of the input, held over each step.

    For "legs", and wherever steps differ in duration, the matrices of all steps are in memory, B T N² numbers. Pass a
    long sequence in pieces.

    `forward` and `memory` also take `timespans` (B, T), the duration of each step in units of the usual one. The past
    of "legs" is then all time since the start, and θ is in the same units. A step of no duration, the first one too,
    leaves the memory as it is.

    Args:
        dim: D, channels.
        size: N, numbers of each channel; even for "fourier".
        measure: "legs", "legt", "lagt" or "fourier".
        theta: θ, length of the window in steps; "legs" has none.
        discretization: "zoh" or "bilinear".

    Parameters: C (D, N). The matrices are fixed. They are the buffers A (N, N) and B (N), which are discrete except for
        "legs".
    Initialisation: C N(0, 1/N).
    State: HiPPOState.
    """

    id = "S-hippo"
    aliases = ("HiPPO-LegS",)
    equation = "c_t = A_t c_{t-1} + B_t x_t,  y_t = sum_n C_n c_{t,n},  A_t fixed by a measure of the past"
    source = SOURCE + ", theorems 1 and 2, sec. 2.4"
    op = "varying_memory_cell"
    takes: ClassVar = frozenset({"timespans"})
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
        return HiPPOState(c, no_time(c))

    def memory(
        self,
        x: Tensor,
        state: HiPPOState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, HiPPOState]:
        """Return c of every step, (B, T, D, N), in float32 or wider, and the state after the last one."""
        state = self._begin(x, state, cu_seqlens)
        spans = durations("hippo", timespans, x)
        before, elapsed = time_before(state.elapsed, spans, cu_seqlens)
        u = widen(x)
        with as_widened(x):
            if self.measure == "legs":
                after = before + spans[..., 0]
                share = spans[..., 0] / torch.where(after > 0, after, 1)  # steps before any time are no share of it
                varying = legs_steps(share, self.size, self.discretization)
            elif timespans is not None:
                A, B = (each.to(u.device) for each in transition(self.measure, self.size))
                varying = discretize_dense(A, B, spans[..., 0].double() / self.theta, self.discretization)
            else:
                varying = None
            if varying is not None:
                a, b = (each.to(u.dtype) for each in varying)
                c, last = varying_memory_cell(u, a, b, state.c, cu_seqlens=cu_seqlens)
            else:
                c, last = memory_cell(u, widen(self.A), widen(self.B), state.c, cu_seqlens=cu_seqlens)
        return c, HiPPOState(last, elapsed)

    def forward(
        self,
        x: Tensor,
        state: HiPPOState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, HiPPOState]:
        c, last = self.memory(x, state, cu_seqlens=cu_seqlens, timespans=timespans)
        return (c * widen(self.C)).sum(-1).to(x.dtype), last
