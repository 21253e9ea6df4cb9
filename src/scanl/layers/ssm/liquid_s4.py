r"""Liquid-S4: a diagonal state space model whose transition depends on the input, and its expansion in products.

.. math:: s_t = (\bar A + \bar B x_t) s_{t-1} + \bar B x_t, \quad y_t = 2\,\mathrm{Re}\, C s_t + D x_t
"""

from itertools import pairwise

import torch
from torch import Tensor

from scanl.errors import ConfigError
from scanl.layers.base import register, widen
from scanl.layers.parts.diagonal_ssm import discretized, read
from scanl.layers.parts.short_convolution import token_shift
from scanl.layers.parts.timespans import check_timespans
from scanl.layers.ssm.s4d import GatedDiagonalLayer
from scanl.layers.state import Device, DType
from scanl.ops import linear_scan
from scanl.ops.offsets import sequences

EQUATION = "s^p_t = A s^p_{t-1} + B x_t s^{p-1}_{t-1},  s^0 = 1,  y_t = 2 Re sum_p C s^p_t"
SOURCE = 'Hasani et al., "Liquid Structural State-Space Models", arXiv:2209.12951, '


@register("liquid_s4")
class LiquidS4(GatedDiagonalLayer):
    """Liquid-S4: S4D whose transition also depends on the input, so its output has products of inputs.

    With degree P the expansion ends at products of P inputs, and s^p holds the products of p inputs. The coefficient of
    x_{i_1} ... x_{i_p}, i_1 < ... < i_p, is C A^{t - i_1 - (p-1)} B^p: it depends only on the step of the earliest
    input. Degree 1 is `s4d`. Without a degree the layer is the recurrence itself, which contains all products. It grows
    where |A + B x| > 1.

    Differs: the paper sums only over products of neighbouring inputs. The released code sums over inputs at the end of
    the sequence, which is not causal. Here the sum is over all earlier inputs, as in the recurrence. The systems are
    diagonal; in the paper they are those of S4.

    Args:
        dim: D, model width.
        d_state: N, real numbers of state per channel, even.
        degree: P, most inputs in a product; None for the recurrence itself.
        init: imaginary parts of A: "lin", "inv", "legs"; or "real", A = -1, -2, ...
        dt_min, dt_max: range of the initial step Δ, in units of A's time.
        disc: discretisation, "zoh", "bilinear" or "dirac".
        lr: learning rate of A and Δ; None for the optimiser's own.

    `forward` also takes `timespans` (B, T), the duration of each step in units of the usual one. It multiplies Δ.

    Parameters and initialisation: as those of `s4d`.
    State: s^1 to s^P (B, P, D, N/2) complex.
    """

    id = "S-liquids4"
    equation = EQUATION + ",  out = GLU(W GELU(y + D * x))"
    source = SOURCE + "eq. (6) to (9)"

    def __init__(
        self,
        dim: int,
        d_state: int = 64,
        degree: int | None = 2,
        init: str = "legs",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        disc: str = "bilinear",
        lr: float | None = 1e-3,
    ) -> None:
        super().__init__(dim, d_state, init, dt_min, dt_max, disc, lr)
        if degree is not None and degree < 1:
            raise ConfigError(f"liquid_s4: degree is {degree}, expected at least 1, or None")
        self.degree = degree

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        sizes = (batch_size, self.degree or 1, self.dim, self.d_state // 2)
        return self._zeros(*sizes, device=device, dtype=dtype, at_least=torch.complex64)

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        self._check(x, state, cu_seqlens)
        check_timespans("liquid_s4", timespans, x)
        if state is None:
            state = self.init_state(sequences(x, cu_seqlens))
        A, C, dt = self.kernel.system()
        a, b = discretized(A, torch.ones_like(A), dt, self.disc, timespans)
        u = widen(x)
        given, state = b * u[..., None], state.to(a.dtype)  # (B, T, D, N/2)
        if self.degree is None:
            total, last = linear_scan(given, a + given, state[:, 0], cu_seqlens=cu_seqlens)
            lasts = [last]
        else:
            rows = state.unbind(1)
            s, last = linear_scan(given, a, rows[0], cu_seqlens=cu_seqlens)
            total, lasts = s, [last]
            for below, row in pairwise(rows):
                s, last = linear_scan(given * _before(s, below, cu_seqlens), a, row, cu_seqlens=cu_seqlens)
                total = total + s
                lasts.append(last)
        return self._read_out(read(total, C), u, x.dtype), torch.stack(lasts, 1)


def _before(s: Tensor, row: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the states one step earlier; before the first step of a sequence, its row."""
    flat, first = (torch.view_as_real(each).flatten(-3) for each in (s, row[:, None]))
    return torch.view_as_complex(token_shift(flat, first, cu_seqlens=cu_seqlens)[0].contiguous().view(*s.shape, 2))
