r"""Liquid-S4: a diagonal state space model whose transition depends on the input, and its expansion in products.

.. math:: s_t = (\bar A + \bar B x_t) s_{t-1} + \bar B x_t, \quad y_t = 2\,\mathrm{Re}\, C s_t + D x_t
"""

from itertools import pairwise
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.packing import each_alone
from scanl.layers.parts.diagonal_ssm import discretized, read
from scanl.layers.parts.short_convolution import token_shift
from scanl.layers.ssm.s4d import GatedDiagonalLayer
from scanl.ops import linear_scan
from scanl.ops._frame.nonfinite import faulty, replaced, since, suspected
from scanl.ops.ssm_kernels import powers
from scanl.options import at_least

EQUATION = "s^p_t = A s^p_{t-1} + B x_t s^{p-1}_{t-1},  s^0 = 1,  y_t = 2 Re sum_p C s^p_t"
BLOCK = 64  # steps
SOURCE = 'Hasani et al., "Liquid Structural State-Space Models", arXiv:2209.12951, '


@registry.register("liquid_s4")
class LiquidS4(GatedDiagonalLayer):
    """Liquid-S4: S4D whose transition also depends on the input, so its output has products of inputs.

    With degree P the expansion ends at products of P inputs, and s^p holds the products of p inputs. The coefficient of
    x_{i_1} ... x_{i_p}, i_1 < ... < i_p, is C A^{t - i_1 - (p-1)} B^p: it depends only on the step of the earliest
    input. Degree 1 is `s4d`. Without a degree the layer is the recurrence itself, which contains all products. It grows
    where |A + B x| > 1.

    Differs: the paper sums only over products of neighbouring inputs. The released code sums over inputs at the end of
    the sequence, which is not causal. Here the sum is over all earlier inputs, as in the recurrence. The systems are
    diagonal; in the paper they are S4's.

    Up to degree 2, sequences are computed in blocks of 32 steps, by products of matrices. Forwards they take
    4 D (N + 24) multiplications for each step, at D = 256 fewer than the gated linear map. With other degrees and with
    `timespans`, the states of all steps are stored, P T D N numbers.

    Parameters and initialisation: as in `s4d`.
    """

    id = "S-liquids4"
    carried_by = "turns"
    equation = EQUATION + ",  out = GLU(W GELU(y + D * x))"
    source = SOURCE + "eq. (6) to (9)"

    excused: ClassVar = {"bits_are_the_same_in_any_company": "the steps of a block are summed at once"}
    state: ClassVar = StateAxes("degree or 1, dim, state_dim // 2", "s^1 to s^P", dtype=torch.complex64)

    def __init__(
        self,
        dim: options.Dim,
        state_dim: options.EvenStateDim = 64,
        degree: Annotated[
            int | None, at_least(1), "P, largest number of inputs in a product; None for the recurrence itself"
        ] = 2,
        init: options.DiagonalInit = "legs",
        *,
        discretization: options.Discretization = "bilinear",
        **system: Any,
    ) -> None:
        super().__init__(dim, state_dim, init, discretization=discretization, **system)
        self.degree = degree

    def run(
        self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, timespans: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        start: Tensor = self._begin(x, state, cu_seqlens)
        A, C, dt = self.kernel.system()
        a, b = discretized(A, torch.ones_like(A), dt, self.discretization, timespans)
        u, start = widen(x), start.to(a.dtype)
        stepwise = self.degree not in (1, 2) or timespans is not None or torch.compiler.is_exporting()
        packed = cu_seqlens is not None
        if stepwise or (packed and torch.compiler.is_compiling()) or x.shape[1] < BLOCK:
            y, last = self._recurrence(u, a, b, C, start, cu_seqlens)
        elif not packed:
            with as_widened(x):
                y, last = self._in_blocks(u, a, b, C, start)
        else:

            def run(u: Tensor, row: Tensor | None) -> tuple[Tensor, Tensor]:
                row = start.new_zeros(len(u), *start.shape[1:]) if row is None else row
                return (self._in_blocks if u.shape[1] >= BLOCK else self._recurrence)(u, a, b, C, row)

            with as_widened(x):
                y, last = each_alone(run, u, None if state is None else start, cu_seqlens, after_zeros=4)
        return self._read_out(y, u, x.dtype), last

    def _recurrence(
        self, u: Tensor, a: Tensor, b: Tensor, C: Tensor, state: Tensor, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the readout of all steps, computed one step after the other, and the last state."""
        written = b * u[..., None]  # (B, T, D, N/2)
        if self.degree is None:
            total, last = linear_scan(written, a + written, state[:, 0], cu_seqlens=cu_seqlens)
            lasts = [last]
        else:
            rows = state.unbind(1)
            s, last = linear_scan(written, a, rows[0], cu_seqlens=cu_seqlens)
            total, lasts = s, [last]
            for below, row in pairwise(rows):
                s, last = linear_scan(written * _before(s, below, cu_seqlens), a, row, cu_seqlens=cu_seqlens)
                total = total + s
                lasts.append(last)
        return read(total, C), torch.stack(lasts, 1)

    def _in_blocks(self, u: Tensor, a: Tensor, b: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same by matrix products over blocks of steps; what is left at the end takes single steps.

        With X_j the sum of the first j inputs of a block, and s^1, s^2 the states before it, its states are

            s^1_j = a^j s^1 + b sum_{i<=j} a^{j-i} x_i,
            s^2_j = a^j s^2 + b a^{j-1} X_j s^1 + b^2 sum_{i<j} a^{j-1-i} x_i (X_j - X_i).

        So the outputs of a block are two convolutions with C a^m b and with C a^m b^2, and what is read of two states.
        """
        steps = u.shape[1] // BLOCK * BLOCK
        head, tail, spoil = u[:, :steps], u[:, steps:], None
        if suspected(head):  # a masked product multiplies later inputs by zero
            spoil, head = since(faulty(head), 1).to(u.dtype), replaced(head)
        x = head.unflatten(1, (-1, BLOCK)).permute(3, 2, 0, 1)  # (D, block, B, blocks)
        shape = x.shape[2:]
        x = x.flatten(2).contiguous()
        # The inputs of a block are also read from its last one back: the powers of a then need not be turned.
        back = x.flip(1)
        table, jump = powers(a.to(torch.complex128), BLOCK)  # a^0, ..., a^{block-1}, (D, N/2, block), and a^block
        table, jump = table.to(a.dtype), jump.to(a.dtype)
        parts, of_block = torch.cat([table.real, table.imag], 1), table[..., -1:]  # (D, N, block)
        read_out, write = 2 * C[..., None], b[..., None]
        end = write * _complex(parts @ back)
        first = _columns(state[:, 0])
        entering, last = _entering(end, jump, first, shape)
        lasts, both = [last], entering
        one = _toeplitz(_read(parts, write * read_out)[..., 0])
        y = one @ back
        if self.degree == 2:
            sums, write_both = x.cumsum(1), write * write
            total = sums[:, -1:]
            within = write_both * _complex(parts[..., :-1] @ (back * (total - sums.flip(1)))[:, 1:])
            s, last = _entering(within + total * (write * of_block) * entering, jump, _columns(state[:, 1]), shape)
            both = entering + s
            lasts.append(last)
            two = _toeplitz(F.pad(_read(parts, write_both * read_out)[..., 0][:, :-1], (1, 0)))
            y = y + sums * (two @ back + _read(parts, write * read_out * entering)) - two @ (x * sums).flip(1)
        y = y + _read(parts, a[..., None] * read_out * both)
        y = y.reshape(-1).view(-1, BLOCK, *shape)  # by one axis, the gradient is turned once, not at each of its uses
        y, lasts = y.permute(2, 3, 1, 0).flatten(1, 2), torch.stack(lasts, 1)
        if spoil is not None:
            y, lasts = y * spoil, lasts * spoil[:, None, -1, :, None]
        if not tail.shape[1]:
            return y, lasts
        more, lasts = self._recurrence(tail, a, b, C, lasts)
        return torch.cat([y, more], 1), lasts


def _complex(rows: Tensor) -> Tensor:
    """Return real and then imaginary parts, (D, N, M), as complex numbers (D, N/2, M)."""
    return torch.complex(*rows.chunk(2, 1))


def _columns(s: Tensor) -> Tensor:
    """Return states (B, D, N/2) as columns (D, N/2, B)."""
    return s.permute(1, 2, 0)


def _entering(written: Tensor, jump: Tensor, first: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return the states that enter the blocks, as columns, and those after the last block, (B, D, N/2).

    written: what each block adds, (D, N/2, B blocks).   jump: their factor over a block, (D, N/2).   first: the states
    before all blocks, (D, N/2, B).
    """
    rows, start = written.unflatten(2, shape).permute(2, 3, 0, 1), first.permute(2, 0, 1)  # (B, blocks, D, N/2)
    s, last = linear_scan(rows, jump, start)
    return torch.cat([start[:, None], s[:, :-1]], 1).permute(2, 3, 0, 1).flatten(2), last


def _read(parts: Tensor, columns: Tensor) -> Tensor:
    """Return Re Σ_n t_nj s_nm, (D, block, M), for the parts (D, N, block) of t and columns s (D, N/2, M)."""
    return parts.mT @ torch.cat([columns.real, -columns.imag], 1)


def _toeplitz(kernel: Tensor) -> Tensor:
    """Return the matrices (D, L, L) that convolve L steps, given from the last one back, with a kernel (D, L)."""
    return F.pad(kernel, (kernel.shape[1] - 1, 0)).unfold(1, kernel.shape[1], 1)


def _before(s: Tensor, row: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the states one step earlier; before the first step of a sequence, its row."""
    flat, first = (torch.view_as_real(tensor).flatten(-3) for tensor in (s, row[:, None]))
    return torch.view_as_complex(token_shift(flat, first, cu_seqlens=cu_seqlens)[0].contiguous().view(*s.shape, 2))
