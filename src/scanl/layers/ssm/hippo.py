"""HiPPO: the past of each channel as the coefficients of its best approximation by polynomials or waves."""

import math
from typing import Annotated, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import Layer, as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.packing import each_alone
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.polynomial_memory import (
    MEASURES,
    SOURCE,
    discretize_dense,
    legs_held,
    legs_steps,
    memory_cell,
    transition,
)
from scanl.layers.parts.timespans import check_timespans, durations
from scanl.ops import linear_scan
from scanl.ops._frame.nonfinite import faulty, replaced, since, suspected
from scanl.ops.cell import cell
from scanl.options import above, one_of

BLOCK = 16  # steps


class ElapsedTime(NamedTuple):
    """The time since the start, in units of the usual step: whole units, and a fraction below 1.

    Of steps of one unit each it is the number of inputs, which an integer counts exactly.
    """

    steps: Annotated[Tensor, StateAxes("", "whole units of time since the start", dtype=torch.int64)]
    rest: Annotated[Tensor, StateAxes("", "the fraction of a unit beside them")]


class HiPPOState(NamedTuple):
    c: Annotated[Tensor, StateAxes("dim, state_dim", "the memory of each channel")]
    elapsed: Annotated[ElapsedTime, ElapsedTime]


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


cases(
    varying_memory_cell,
    "C=2 N=3",
    "b has shape (2, 5, 2), expected (B, T, N)",
    "state has shape (2, 3), expected (B, C, N)",
    a=lambda a: a / 2,
)


def time_before(elapsed: ElapsedTime, spans: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, ElapsedTime]:
    """Return the time before each step, (B, T) in float64, and that after all of them.

    elapsed: before the first step, one number for each sequence.   spans: (B, T, 1), how long each step lasts.
    """
    dtype, spans = spans.dtype, spans.double()
    one = torch.ones((), dtype=spans.dtype, device=spans.device)
    start = (elapsed.steps + elapsed.rest.double())[:, None]
    after, last = linear_scan(spans, one, start, cu_seqlens=cu_seqlens)
    steps = last[:, 0].detach().floor()
    return (after - spans)[..., 0], ElapsedTime(steps.long(), (last[:, 0] - steps).to(dtype))


@registry.register("hippo")
class HiPPO(Layer):
    """HiPPO: N numbers for each channel, from which its past can be reconstructed, and a linear map of these numbers.

    `memory` returns the numbers of every step, and `scanl.layers.parts.polynomial_memory.reconstruct` returns the past
    that they represent. "legs" remembers all of the past in equal measure, at any scale of time. "legt" remembers the
    last θ steps by polynomials, and "fourier" remembers them by waves. "lagt" remembers by Laguerre functions that
    decay over θ steps. With "zoh" the memory of "legs" is the exact projection of the input, held over each step.

    `forward` computes "legs" with "zoh" in blocks of 16 steps, by products of matrices: T D N (N + 16) multiplications
    for all rows that share their times, and T D N numbers in memory. Otherwise it takes one step after the other,
    T D N² multiplications for each row. For "legs", and wherever steps differ in duration, the matrices of all these
    steps are in memory, B T N² numbers. Pass a long sequence in pieces.

    `forward` and `memory` also take `timespans` (B, T), the duration of each step in units of the usual one. The past
    of "legs" is then all time since the start, and θ is in the same units. A step of no duration, the first one too,
    leaves the memory as it is.

    Parameters: C (D, N). The matrices are fixed. Except for "legs" their discrete forms are the buffers A (N, N) and
    B (N).
    Initialisation: C N(0, 1/N).
    """

    id = "S-hippo"
    aliases = ("HiPPO-LegS",)
    equation = "c_t = A_t c_{t-1} + B_t x_t,  y_t = sum_n C_n c_{t,n},  A_t fixed by a measure of the past"
    source = SOURCE + ", theorems 1 and 2, sec. 2.4"
    op = "varying_memory_cell"
    carried_by = "turns"
    excused: ClassVar = {"bits_are_the_same_in_any_company": "the steps of a block are summed at once"}
    state: ClassVar = HiPPOState
    sample: ClassVar = {"state_dim": 4}

    A: Tensor
    B: Tensor

    def __init__(
        self,
        dim: options.Dim,
        state_dim: Annotated[options.StateDim, 'N, numbers of each channel; even for "fourier"'] = 64,
        measure: Annotated[str, one_of(MEASURES), '"legs", "legt", "lagt" or "fourier"'] = "legs",
        theta: Annotated[float, above(0), 'θ, length of the window in steps; "legs" has none'] = 1000.0,
        discretization: Annotated[Literal["zoh", "bilinear"], "how the system is discretized"] = "zoh",
    ) -> None:
        super().__init__()
        if measure == "fourier" and state_dim % 2:
            self._refuse("state_dim", state_dim, "an even number because measure is 'fourier'")
        self.dim, self.state_dim, self.measure, self.theta = dim, state_dim, measure, theta
        self.discretization = discretization
        system = transition(measure, state_dim)
        if measure != "legs":
            A, B = discretize_dense(*system, 1 / theta, discretization)
            self.register_buffer("A", A.to(torch.get_default_dtype()))
            self.register_buffer("B", B.to(torch.get_default_dtype()))
        self.C = nn.Parameter(torch.randn(dim, state_dim) / math.sqrt(state_dim))

    def memory(
        self,
        x: Tensor,
        state: HiPPOState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, HiPPOState]:
        """Return c of every step, (B, T, D, N), in float32 or wider, and the state after the last one."""
        self._check(x, state, cu_seqlens)
        check_timespans(self._who(), timespans, x)
        return self._memory(x, self._begin(x, state, cu_seqlens), cu_seqlens, timespans)

    def _memory(
        self, x: Tensor, state: HiPPOState, cu_seqlens: Tensor | None, timespans: Tensor | None
    ) -> tuple[Tensor, HiPPOState]:
        spans = durations(timespans, x)
        time, elapsed = time_before(state.elapsed, spans, cu_seqlens)
        u = widen(x)
        with as_widened(x):
            if self.measure == "legs":
                after = time + spans[..., 0]
                share = spans[..., 0] / torch.where(after > 0, after, 1)  # steps before any time are no share of it
                varying = legs_steps(share, self.state_dim, self.discretization)
            elif timespans is not None:
                A, B = (tensor.to(u.device) for tensor in transition(self.measure, self.state_dim))
                varying = discretize_dense(A, B, spans[..., 0].double() / self.theta, self.discretization)
            else:
                varying = None
            if varying is not None:
                a, b = (tensor.to(u.dtype) for tensor in varying)
                c, last = varying_memory_cell(u, a, b, state.c, cu_seqlens=cu_seqlens)
            else:
                c, last = memory_cell(u, widen(self.A), widen(self.B), state.c, cu_seqlens=cu_seqlens)
        return c, HiPPOState(last, elapsed)

    def run(
        self, x: Tensor, state: HiPPOState | None, cu_seqlens: Tensor | None, timespans: Tensor | None = None
    ) -> tuple[Tensor, HiPPOState]:
        first = self._begin(x, state, cu_seqlens)
        closed = self.measure == "legs" and self.discretization == "zoh" and not torch.compiler.is_compiling()
        if not closed or x.shape[1] < BLOCK or (cu_seqlens is not None and timespans is not None):
            return self._stepwise(x, first, cu_seqlens, timespans)
        if cu_seqlens is not None:
            y, last = each_alone(lambda x, row: self.run(x, row, None), x, state, cu_seqlens)
            return y, cast(HiPPOState, last)
        steps = x.shape[1] // BLOCK * BLOCK
        spans = durations(timespans, x)
        start, elapsed = time_before(first.elapsed, spans[:, :steps], None)
        if suspected(start, spans):  # times that are not finite would reach earlier steps
            return self._stepwise(x, first, cu_seqlens, timespans)
        with as_widened(x):
            y, c = self._in_blocks(widen(x[:, :steps]), start, spans[:, :steps, 0].double(), first.c)
        y, last = y.to(x.dtype), HiPPOState(c, elapsed)
        if steps == x.shape[1]:
            return y, last
        later_spans = None if timespans is None else timespans[:, steps:]
        more, last = self._stepwise(x[:, steps:], last, None, later_spans)
        return torch.cat([y, more], 1), last

    def _stepwise(
        self, x: Tensor, state: HiPPOState, cu_seqlens: Tensor | None, timespans: Tensor | None
    ) -> tuple[Tensor, HiPPOState]:
        c, last = self._memory(x, state, cu_seqlens, timespans)
        return (c * widen(self.C)).sum(-1).to(x.dtype), last

    def _in_blocks(self, u: Tensor, start: Tensor, spans: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return the readout of LegS, (B, T, D), and the last c, by matrix products over blocks of steps.

        The memory is the exact projection of the held input, so it needs no steps: with t_0 the time before a block,
        c_j = A(t_0/t_j) c_0 + sum_{i<=j} u_i (h(t_i/t_j) - h(t_{i-1}/t_j)), where A is that of `legs_steps` and h is
        `legs_held`. Of a block only the last c is made; C A and C h are the same for all rows that share their times.

        start, spans: the time before each step and its duration, (B, T), finite, in float64.
        """
        spoil = None
        if suspected(u):  # a masked product multiplies later inputs by zero
            spoil, u = since(faulty(u), 1).to(u.dtype), replaced(u)
        shared = not (start.requires_grad or spans.requires_grad)
        if shared and bool((start == start[:1]).all()) and bool((spans == spans[:1]).all()):
            start, spans = start[:1], spans[:1]
        dtype, C = u.dtype, widen(self.C).to(u.dtype)
        start, spans = (tensor.unflatten(1, (-1, BLOCK)) for tensor in (start, spans))  # (S, blocks, steps)
        times = torch.cat([start[..., :1], start + spans], -1)
        after = times[..., 1:, None]
        # No time has passed where the first steps have no duration.
        fractions = torch.where(after > 0, (times[..., None, :] / torch.where(after > 0, after, 1)).clamp(max=1), 1)
        held = legs_held(fractions, self.state_dim)  # (S, blocks, j, i, N)
        written = held.diff(dim=3).to(dtype)
        transitions, _ = legs_steps(1 - fractions[..., 0], self.state_dim)
        transitions = transitions.to(dtype)  # (S, blocks, j, N, N)
        x = u.unflatten(1, (-1, BLOCK)).permute(0, 1, 3, 2)  # (B, blocks, D, i)
        ends, last = x @ written[:, :, -1], [c.to(dtype)]
        for carried, end in zip(transitions[:, :, -1].mT.unbind(1), ends.unbind(1), strict=True):
            last.append(last[-1] @ carried + end)
        entering = torch.stack(last[:-1], 1)  # (B, blocks, D, N)
        mask = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=u.device).tril()
        written = torch.where(mask[..., None], written, 0)
        C = C.expand(*written.shape[:2], -1, -1)  # one product for each block: of a plain C torch transposes the result
        by_input = (C @ written.permute(0, 1, 4, 2, 3).flatten(3)).unflatten(3, (BLOCK, BLOCK))
        by_state = (C @ transitions.permute(0, 1, 3, 2, 4).flatten(3)).unflatten(3, (BLOCK, self.state_dim))
        y = self._applied(by_input, x) + self._applied(by_state, entering)
        y, c = y.permute(0, 1, 3, 2).flatten(1, 2), last[-1]
        return (y, c) if spoil is None else (y * spoil, c * spoil[:, -1, :, None])

    @staticmethod
    def _applied(maps: Tensor, x: Tensor) -> Tensor:
        """Return each map of (S, blocks, D, steps, N) at the rows of x (B, blocks, D, N): (B, blocks, D, steps)."""
        if len(maps) == len(x):
            return (maps @ x[..., None])[..., 0]
        y = torch.einsum("pdtn,bpdn->bpdt", maps.squeeze(0), x)
        return y * 1.0  # so its gradient is dense: one that is expanded, as in a sum, torch copies matrix by matrix
