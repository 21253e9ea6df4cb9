r"""Mamba-3: a state space model with a trapezoidal rule and rotated keys and queries.

.. math:: S_t = \alpha_t S_{t-1} + (1 - \lambda_t) \Delta_t \alpha_t k_{t-1} x_{t-1}^\top
          + \lambda_t \Delta_t k_t x_t^\top, \quad o_t = S_t^\top q_t + D x_t, \quad
          k_t = R(\Theta_t) (B_t + b_B), \; q_t = R(\Theta_t) (C_t + b_C), \;
          \Theta_t = \Theta_{t-1} + \pi \tanh(\theta_t) \Delta_t
"""

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scanl.errors import ConfigError
from scanl.layers.base import UNDECAYED, Layer, preset, register, widen
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.layers.parts.rotary import turn_pairs
from scanl.layers.parts.short_convolution import token_shift
from scanl.layers.parts.time_step import check_step_range, time_step_bias
from scanl.layers.state import Device, DType
from scanl.ops import linear_attention, linear_scan
from scanl.ops._frame.dispatch import transforming

PIECE = 64  # steps that a layer with several inputs handles at a time, so that its keys stay in the caches


class Mamba3State(NamedTuple):
    """State of `Mamba3`.

    ssm: S (B, H, N, P).   angle: Θ in [0, 2π), (B, H, A).   key: the last rotated key, (B, 1, H R N).
    value: the last x, (B, 1, H P).
    """

    ssm: Tensor
    angle: Tensor
    key: Tensor
    value: Tensor


@register("mamba3")
class Mamba3(Layer):
    """Mamba-3: Mamba-2 without its convolution, with a rule of second order and with complex eigenvalues.

    The key and the value of a step are written twice: at the step, and once more at the next step, when their second
    weight is known. So one pass of `linear_attention` over the keys and values of the step before evaluates the rule,
    and the newest write is added separately. `mamba3_mimo` has R inputs and R outputs a head. It has R
    times as many keys and queries, so it takes some steps at a time, whose keys the backward pass makes again.

    Args:
        dim: D, model width.
        d_state: N, rows of the state.
        expand: d_inner = expand * D channels, in H = d_inner / headdim heads.
        headdim: P, channels of a head.
        ngroups: G, groups of heads; the heads of a group use the same B and C.
        rope_fraction: share of the N rows that is rotated, 0.5 or 1; in A pairs.
        dt_min, dt_max, dt_init_floor: initial Δ, log-uniform in [dt_min, dt_max] and at least the floor.
        A_floor: least decay rate per unit of Δ.
        mimo_rank: R; 1 is the layer with one input.
        outproj_norm: RMSNorm of each head before the gate.
        norm_eps: ε of the norms.

    Parameters as in mamba_ssm: in_proj (2 d_inner + 2 G R N + 3 H + A, D) for z, x, B, C, Δ, the decay rate, λ and θ;
    dt_bias, D (H), without weight decay; B_bias, C_bias (H, R, N); B_norm.weight, C_norm.weight (N); mimo_x, mimo_z,
    mimo_o (H, R, P) if R > 1; norm.weight (d_inner) for the norm; out_proj (D, d_inner).
    The decay rate is softplus, as in mamba_ssm 2.3; a later version has another function with slower tails.
    With R = 1, pairs are neighbours; with R > 1, they are N/2 apart, as in mamba_ssm.
    Initialisation: dt_bias = softplus⁻¹(Δ); B_bias, C_bias, D and the norms 1; mimo_x, mimo_o 1/R, mimo_z 1; the rest
    as in PyTorch.
    State: S (B, H, N, P), the angles (B, H, A), the last rotated key (B, 1, H R N) and the last x (B, 1, H P), zeros.
    """

    id = "S-mamba3"
    equation = (
        "S_t = a_t S_{t-1} + (1 - l_t) dt_t a_t k_{t-1} x_{t-1}^T + l_t dt_t k_t x_t^T,  o_t = S_t^T q_t + D x_t,  "
        "a_t = exp(-dt_t softplus(A_t)),  k_t, q_t = R(sum_s pi tanh(theta_s) dt_s) (B_t + b_B, C_t + b_C);  "
        "out = W_out (o * SiLU(z))"
    )
    source = (
        'Lahoti, Li, Chen, Wang et al., "Mamba-3: Improved Sequence Modeling using State Space Principles", '
        "arXiv:2603.15569, as in the authors' mamba_ssm"
    )
    op = "linear_attention"
    sample: ClassVar = {"d_state": 8, "headdim": 4, "ngroups": 2, "expand": 2}
    residual_out = "out_proj"
    hints: ClassVar = dict.fromkeys(("dt_bias", "D"), UNDECAYED)

    def __init__(
        self,
        dim: int,
        d_state: int = 128,
        expand: int = 2,
        headdim: int = 64,
        ngroups: int = 1,
        rope_fraction: float = 0.5,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        A_floor: float = 1e-4,
        mimo_rank: int = 1,
        outproj_norm: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        inner = expand * dim
        if min(dim, expand, mimo_rank) < 1:
            found = f"dim is {dim}, expand is {expand} and mimo_rank is {mimo_rank}"
            raise ConfigError(f"{self._who()}: {found}, expected at least 1")
        if headdim < 1 or inner % headdim:
            raise ConfigError(f"{self._who()}: headdim is {headdim}, expected a divisor of expand * dim={inner}")
        heads = inner // headdim
        if ngroups < 1 or heads % ngroups:
            raise ConfigError(
                f"{self._who()}: ngroups is {ngroups}, expected a divisor of expand * dim / headdim={heads}"
            )
        if rope_fraction not in (0.5, 1.0) or d_state < 2 / rope_fraction or d_state % 2:
            found = f"rope_fraction is {rope_fraction} and d_state is {d_state}"
            raise ConfigError(
                f"{self._who()}: {found}, expected 0.5 or 1, and an even d_state of at least 2 / rope_fraction"
            )
        check_step_range(self._who(), dt_min, dt_max)
        self.dim, self.heads, self.headdim, self.ngroups, self.d_state = dim, heads, headdim, ngroups, d_state
        self.mimo_rank, self.A_floor, self.pairs = mimo_rank, A_floor, int(d_state * rope_fraction) // 2
        written = mimo_rank * ngroups * d_state
        self.widths = [inner, inner, written, written, heads, heads, heads, self.pairs]
        self.in_proj = nn.Linear(dim, sum(self.widths), bias=False)
        self.dt_bias = nn.Parameter(time_step_bias(heads, dt_min, dt_max, dt_init_floor))
        self.B_bias, self.C_bias = (nn.Parameter(torch.ones(heads, mimo_rank, d_state)) for _ in range(2))
        self.B_norm, self.C_norm = (GatedRMSNorm(d_state, norm_eps) for _ in range(2))
        if mimo_rank > 1:
            self.mimo_x, self.mimo_o = (
                nn.Parameter(torch.full((heads, mimo_rank, headdim), 1 / mimo_rank)) for _ in range(2)
            )
            self.mimo_z = nn.Parameter(torch.ones(heads, mimo_rank, headdim))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = GatedRMSNorm(inner, norm_eps, groups=heads) if outproj_norm else None
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Mamba3State:
        H, N, P = self.heads, self.d_state, self.headdim
        shapes = ((H, N, P), (H, self.pairs), (1, H * self.mimo_rank * N), (1, H * P))
        parts = (self._zeros(batch_size, *s, device=device, dtype=dtype, at_least=torch.float32) for s in shapes)
        return Mamba3State(*parts)

    def forward(
        self, x: Tensor, state: Mamba3State | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Mamba3State]:
        before = self._begin(x, state, cu_seqlens)
        parts = self.in_proj(x).split(self.widths, -1)
        at_once = cu_seqlens is not None or torch.compiler.is_compiling() or transforming()
        if self.mimo_rank == 1 or at_once or x.shape[1] <= PIECE:
            mixed, after = self._mix(parts, before, cu_seqlens)
            return self.out_proj(mixed), after
        pieces, after = [], before
        for piece in zip(*(part.split(PIECE, 1) for part in parts), strict=True):
            mixed, after = cast(
                tuple[Tensor, Mamba3State],
                checkpoint(self._mix, piece, after, None, use_reentrant=False, preserve_rng_state=False),
            )
            pieces.append(mixed)
        return self.out_proj(torch.cat(pieces, 1)), after

    def _mix(
        self, parts: Sequence[Tensor], state: Mamba3State, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Mamba3State]:
        """Return what the output map reads, (B, T, d_inner), and the state after these steps."""
        z, u, B, C, dt, a, trapezoid, turn = parts
        dtype = u.dtype
        dt = F.softplus(widen(dt) + widen(self.dt_bias))
        g = dt * (-F.softplus(widen(a))).clamp(max=-self.A_floor)
        now = widen(trapezoid).sigmoid()
        # In float64, because in float32 the sum of many angles loses what one step adds.
        steps = (math.pi * widen(turn).tanh()[:, :, None] * dt[..., None]).double()
        angles, last = linear_scan(steps, steps.new_ones(()), state.angle.double(), cu_seqlens=cu_seqlens)
        cos, sin = (each.to(g.dtype).unsqueeze(3) for each in (angles.cos(), angles.sin()))
        k, q = self._turned(self.B_norm, B, self.B_bias, cos, sin), self._turned(self.C_norm, C, self.C_bias, cos, sin)
        # What the step before was written with. At the start of a segment the state holds that write already.
        weight = now * dt
        before_k, key = token_shift(k.flatten(2), state.key, cu_seqlens=cu_seqlens)
        shifted = torch.cat([widen(u), weight], -1)
        start = torch.cat([state.value, state.value.new_zeros(state.value.shape[0], 1, self.heads)], -1)
        sizes = [state.value.shape[-1], self.heads]
        shifted, final = token_shift(shifted, start, cu_seqlens=cu_seqlens)
        before_u, before = shifted.split(sizes, -1)
        value, final = final.split(sizes, -1)
        write = ((before + (1 - now) * dt) * g.exp())[..., None] * before_u.unflatten(-1, (self.heads, -1))
        o, S = self._remember(q, before_k.view_as(k), write, g, state.ssm, cu_seqlens)
        own = weight[..., None, None] * (q @ k.mT)
        skip = widen(self.D)[:, None, None] * torch.eye(self.mimo_rank, device=own.device, dtype=own.dtype)
        o = o + (own + skip) @ self._inputs(widen(u).unflatten(-1, (self.heads, -1)))
        newest = final[:, 0, :, None, None] * self._inputs(value[:, 0].unflatten(-1, (self.heads, -1)))
        S = S + key.view(-1, *k.shape[2:]).mT @ newest
        angle = torch.remainder(last, 2 * math.pi).to(S.dtype)
        # The backward pass needs key and value, and a caller may change what is returned in place.
        state = Mamba3State(S, angle, key.clone(), value.clone())
        return self._gated(o, z).to(dtype), state

    def _turned(self, norm: GatedRMSNorm, x: Tensor, bias: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Norm x (B, T, R G N), add a bias for each head, rotate by angles (B, T, H, 1, A): return (B, T, H, R, N)."""
        x = norm(widen(x).unflatten(-1, (self.mimo_rank, self.ngroups, self.d_state)), None).transpose(2, 3)
        x = (x.unsqueeze(3) + widen(bias).unflatten(0, (self.ngroups, -1))).flatten(2, 3)
        if self.mimo_rank == 1:
            return turn_pairs(x, cos, sin)
        rest = self.d_state // 2 - self.pairs  # pairs are a half apart
        first, kept, second, last = x.split([self.pairs, rest, self.pairs, rest], -1)
        return torch.cat([first * cos - second * sin, kept, first * sin + second * cos, last], -1)

    def _inputs(self, u: Tensor) -> Tensor:
        """Return the R inputs of each head: (..., H, P) to (..., H, R, P)."""
        u = u.unsqueeze(-2)
        return u if self.mimo_rank == 1 else u * widen(self.mimo_x)

    def _remember(
        self, q: Tensor, k: Tensor, write: Tensor, g: Tensor, state: Tensor, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Decay, write R times, then read R times.

        q, k: (B, T, H, R, N).   write: (B, T, H, P).   Returns o (B, T, H, R, P) and the last memory.
        """
        R = self.mimo_rank
        if R == 1:
            q, k = q.squeeze(3), k.squeeze(3)
            o, last = linear_attention(q, k, write, g, state=state, scale=1.0, cu_seqlens=cu_seqlens)
            return o.unsqueeze(3), last
        # R steps for each step, the first of which decays. What the later ones wrote the earlier reads have not seen.
        v = self._inputs(write)
        later = (q @ k.mT).triu(1) @ v
        q, k, v = (part.transpose(2, 3).flatten(1, 2) for part in (q, k, v))
        g = F.pad(g.unsqueeze(2), (0, 0, 0, R - 1)).flatten(1, 2)
        cu_seqlens = None if cu_seqlens is None else cu_seqlens * R
        o, last = linear_attention(q, k, v, g, state=state, scale=1.0, cu_seqlens=cu_seqlens)
        return o.unflatten(1, (-1, R)).transpose(2, 3) + later, last

    def _gated(self, o: Tensor, z: Tensor) -> Tensor:
        """Norm, gate and sum the R outputs: o (B, T, H, R, P), z (B, T, d_inner) to (B, T, d_inner)."""
        z = widen(z).unflatten(-1, (self.heads, 1, -1))
        z = z if self.mimo_rank == 1 else z * widen(self.mimo_z)
        if self.norm is None:
            o = o * F.silu(z)
        else:
            o, z = (part.transpose(2, 3).flatten(-2) for part in (o, z))
            o = self.norm(o, z).unflatten(-1, (self.heads, -1)).transpose(2, 3)
        o = o if self.mimo_rank == 1 else o * widen(self.mimo_o)
        return o.sum(-2).flatten(-2)


@preset("mamba3_mimo", mimo_rank=4)
class Mamba3MIMO(Mamba3):
    """Mamba-3 with several inputs and outputs a head: rank-R writes and reads of the same state."""

    id = "S-mamba3"
    equation = (
        "S_t = a_t S_{t-1} + sum_r ((1 - l_t) dt_t a_t k^r_{t-1} x^r_{t-1}^T + l_t dt_t k^r_t x^r_t^T),  "
        "x^r = x * m_x^r,  o^r_t = S_t^T q^r_t + D x^r_t;  out = W_out sum_r m_o^r * o^r * SiLU(z * m_z^r)"
    )
    source = Mamba3.source
    sample: ClassVar = {"d_state": 8, "headdim": 6, "expand": 2, "mimo_rank": 2}
