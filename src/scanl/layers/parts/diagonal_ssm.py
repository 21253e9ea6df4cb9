r"""Run a diagonal state space model over a sequence, one model for each channel.

.. math:: s_t = \bar A s_{t-1} + \bar B x_t, \quad y_t = 2\,\mathrm{Re}\, C s_t \;\text{ or, if A is real, }\; C s_t

There are two forms. The recurrence stores the states of all steps, T D N numbers. It is used for a few steps, for steps
of different duration, and in a program that is exported for sequences of any length. Other sequences are convolved with
the system's kernel, T D numbers; the effect of the initial state and the last state are then sums of powers of Ā.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.layers.base import as_widened
from scanl.layers.packing import in_order, similar_sequences
from scanl.ops import discretize, linear_scan, long_convolution, ssm_kernel_diagonal
from scanl.ops.offsets import row_ends
from scanl.ops.ssm_kernels import powers

MAX_RECURRENT_STEPS = 16  # up to this many steps the recurrence is used


def diagonal_ssm(
    x: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dt: Tensor,
    state: Tensor | None,
    *,
    discretization: str = "zoh",
    cu_seqlens: Tensor | None = None,
    timespans: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, D) and the state after the last step.

    x: (B, T, D) real.   A, B, C: (D, N), real, or complex with one of each conjugate pair; for a sum of Re C s, without
    the 2, pass C/2.   dt: (D).   If all channels have one A, pass A (1, N), B (1, N) and dt (1): then its powers are
    computed once.
    state: (B, D, N) in A's dtype; None for zeros.   discretization: "zoh", "bilinear" or "dirac", as in `discretize`.
    timespans: (B, T), duration of each step; it multiplies dt.   All in float32 or wider.
    """
    state = None if state is None else state.to(A.dtype)
    traced = torch.compiler.is_exporting() or (cu_seqlens is not None and torch.compiler.is_compiling())
    if traced or x.shape[1] <= MAX_RECURRENT_STEPS or timespans is not None:
        return _recurrence(x, A, B, C, dt, state, discretization, cu_seqlens, timespans)
    with as_widened(x):
        if cu_seqlens is None:
            kernel = ssm_kernel_diagonal(A, B, C, dt, x.shape[1], discretization=discretization)
            return _convolution(x, kernel, A, B, C, dt, state, discretization)
        return _packed(x, A, B, C, dt, state, discretization, cu_seqlens)


def diagonal_ssms_at(
    x: Tensor,
    systems: Sequence[Sequence[Tensor]],
    states: Sequence[Tensor | None],
    places: range,
    *,
    discretization: str,
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return what `diagonal_ssm` gives for several systems (A, B, C, dt) over one x, but y (B, E, D) at `places` alone.

    places: at least one, the first below their step S. With blocks of S steps that end at places, a block gives S
    products to each later place, which one product of matrices sums: E² S of them for a channel, where a convolution
    computes T log T.
    """
    count, block, length, steps = len(places), places.step, places[-1] + 1, x.shape[1]
    with as_widened(x):
        kernels = [ssm_kernel_diagonal(A, B, C, dt, length, discretization=discretization) for A, B, C, dt in systems]
        taps = F.pad(torch.stack(kernels, 1), (0, count * block - length))  # (D, M, E S)
        rows = F.pad(x[:, :length].flip(1), (0, 0, 0, count * block - length)).permute(2, 0, 1)
        rows = rows.reshape(len(rows), -1, block)  # (D, B E, S), the newest step and the newest block first
        sums = rows @ taps.view(len(taps), -1, block).mT
        sums = sums.view(len(rows), len(x), count, len(systems), count).transpose(2, 3).flip(3)  # (D, B, M, E, E)
        # Row n has what block n gives to places n, n + 1, ...; moved to the right by n, columns are places.
        moved = F.pad(sums, (0, count)).flatten(3)[..., : count * (2 * count - 1)].unflatten(3, (count, -1))
        ys = list(moved.sum(3)[..., :count].permute(2, 1, 3, 0))
        lasts, exponents = [], torch.arange(places.start + 1, length + 1, block, device=x.device)
        for n, ((A, B, C, dt), state) in enumerate(zip(systems, states, strict=True)):
            a, b = discretize(A, B, dt, discretization)
            table = _Powers(a, steps)
            last = b * table.remembered(x)
            if state is not None:
                state = state.to(A.dtype)
                echo = torch.einsum("edn,bdn->bed", (C * table.of(exponents)).resolve_conj(), state)
                ys[n] = ys[n] + (2 * echo.real if A.is_complex() else echo)
                last = last + table.last * state
            lasts.append(last)
    return ys, lasts


def _packed(
    x: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dt: Tensor,
    state: Tensor | None,
    discretization: str,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """Convolve the sequences of a packed row, those of similar lengths at once."""
    groups, ends = list(similar_sequences(cu_seqlens, x.shape[1])), row_ends(cu_seqlens) if state is None else None
    longest = max((group.steps.shape[1] for group in groups), default=0)
    kernel = ssm_kernel_diagonal(A, B, C, dt, longest, discretization=discretization)
    last = A.new_zeros(len(cu_seqlens) - 1, *C.shape) if state is None else state
    ys, steps = [], []
    for group in groups:
        rows = None if state is None else state[group.numbers]
        # Without states to echo, the last states of pieces of rows are summed where somebody reads them.
        left = group if ends is None else group.some(torch.isin(group.numbers, ends.last))
        to_end = left.rows_to_end(x), left.lengths
        of_rows, end = _convolution(group.rows(x), kernel, A, B, C, dt, rows, discretization, *to_end)
        ys.append(of_rows.flatten(0, 1))
        steps.append(torch.where(group.valid, group.steps, x.shape[1]).flatten())
        last = last.index_copy(0, left.numbers, end)
    return (in_order(ys, steps, x.shape[1])[None] if ys else x), last


def discretized(
    A: Tensor, B: Tensor, dt: Tensor, discretization: str, timespans: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return Ā and B̄, (D, N), or (B, T, D, N) where the steps differ in duration. Arguments as in `diagonal_ssm`."""
    if timespans is None:
        return discretize(A, B, dt, discretization)
    steps, shape = timespans[..., None].to(dt.dtype) * dt, (*timespans.shape, *A.shape)
    A, B = (system.expand(shape).reshape(-1, A.shape[1]) for system in (A, B))
    a, b = discretize(A, B, steps.flatten(), discretization)
    return a.view(shape), b.view(shape)


def _recurrence(
    x: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dt: Tensor,
    state: Tensor | None,
    discretization: str,
    cu_seqlens: Tensor | None,
    timespans: Tensor | None,
) -> tuple[Tensor, Tensor]:
    a, b = discretized(A, B, dt, discretization, timespans)
    h, last = linear_scan(b * x[..., None], a, state, cu_seqlens=cu_seqlens)
    return read(h, C), last


def read(h: Tensor, C: Tensor) -> Tensor:
    """Return C h, or 2 Re C h if they are complex, (B, T, D). h: states of all steps, (B, T, D, N).   C: (D, N)."""
    if C.is_complex():
        h, C = torch.view_as_real(h).flatten(3), 2 * torch.stack([C.real, -C.imag], -1).flatten(1)
    return torch.einsum("btdn,dn->btd", h, C)


def _convolution(
    x: Tensor,
    kernel: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dt: Tensor,
    state: Tensor | None,
    discretization: str,
    x_to_end: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y and the last state. kernel: (D, L), L at least T.

    Rows may end early: with zeros on the right in x, and on the left in x_to_end; lengths: (B,), of the rows.
    """
    steps = x.shape[1]
    y, _ = long_convolution(x, kernel[:, :steps])
    a, b = discretize(A, B, dt, discretization)
    table = _Powers(a, steps)
    last = b * table.remembered(x if x_to_end is None else x_to_end)
    if state is not None:
        y = y + table.echo((2 if A.is_complex() else 1) * C * a * state)
        last = last + (table.last if lengths is None else table.of(lengths)) * state
    return y, last


class _Powers:
    """Powers of ā (D, N) over T steps: two tables of about √T columns, whose products are ā^0 to ā^{T-1}."""

    def __init__(self, a: Tensor, steps: int) -> None:
        self.first, self.steps = a, steps
        self.block = 1 << ((steps - 1).bit_length() + 1) // 2
        self.blocks = -(-steps // self.block)
        inner, jump = powers(a.to(torch.complex128 if a.is_complex() else torch.float64), self.block)
        outer = powers(jump, self.blocks)[0]
        remainder = steps - (self.blocks - 1) * self.block
        last = outer[..., -1] * (inner[..., remainder] if remainder < self.block else jump)
        self.inner, self.outer = inner.to(a.dtype), outer.to(a.dtype)  # (D, N, block), (D, N, blocks)
        self.last = last.to(a.dtype)  # ā^T, (D, N)

    def of(self, exponents: Tensor) -> Tensor:
        """Return ā^n (B, D, N) for each of the exponents n (B,), from 1 to T."""
        before = exponents - 1
        powers = self.inner[..., before % self.block] * self.outer[..., before // self.block]
        return (self.first[..., None] * powers).movedim(-1, 0)

    def remembered(self, x: Tensor) -> Tensor:
        """Return Σ_j ā^{T-1-j} x_j (B, D, N)."""
        if len(self.inner) == 1:  # one table of all powers serves every channel
            table = (self.outer[0, ..., None] * self.inner[0, :, None]).flatten(1)[:, : self.steps].flip(-1).mT
            rows = x.permute(0, 2, 1).flatten(0, 1)
            if not table.is_complex():
                return (rows @ table).unflatten(0, (len(x), x.shape[2]))
            parts = rows @ torch.cat([table.real, table.imag], -1)
            return torch.complex(*parts.chunk(2, -1)).unflatten(0, (len(x), x.shape[2]))
        table = self.inner.flip(-1).transpose(1, 2)  # (D, block, N)
        parts = F.pad(x, (0, 0, self.blocks * self.block - self.steps, 0)).permute(2, 0, 1)
        parts = parts.unflatten(2, (self.blocks, self.block)).flatten(1, 2)
        if table.is_complex():
            real = torch.view_as_real(table.resolve_conj()).flatten(2)
            sums = torch.view_as_complex((parts @ real).unflatten(-1, (-1, 2)))
        else:
            sums = parts @ table
        sums = sums.unflatten(1, (-1, self.blocks))  # (D, B, blocks, N)
        return (sums * self.outer.flip(-1).transpose(1, 2)[:, None]).sum(2).transpose(0, 1)

    def echo(self, weights: Tensor) -> Tensor:
        """Return Re Σ_n w_n ā_n^t for t < T: (B, T, D). weights: w, (B, D, N)."""
        outer = weights.transpose(0, 1)[:, :, None] * self.outer.transpose(1, 2)[:, None]  # (D, B, blocks, N)
        inner = self.inner  # (D, N, block)
        if outer.is_complex():  # Re(uv) = Re u Re v - Im u Im v
            outer = torch.view_as_real(outer.resolve_conj()).flatten(3)
            inner = torch.stack([inner.real, -inner.imag], 2).flatten(1, 2)
        product = outer.flatten(1, 2) @ (inner[0] if len(inner) == 1 else inner)
        return product.view(len(outer), len(weights), -1)[..., : self.steps].permute(1, 2, 0)
