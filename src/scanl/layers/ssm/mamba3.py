"""Mamba-3: a state space model with a trapezoidal rule and rotated keys and queries."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scanl.layers import options, registry
from scanl.layers.base import UNDECAYED_HINT, Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.layers.parts.rotary import turn_pairs
from scanl.layers.parts.short_convolution import token_shift
from scanl.layers.parts.time_step import time_step_bias
from scanl.ops import linear_attention, linear_scan
from scanl.ops._frame.dispatch import transforming
from scanl.ops.fused.gated import gated
from scanl.ops.products.functions import large_products
from scanl.options import Range, at_least

PIECE = 64  # steps that a layer with several inputs takes at a time, so that its keys stay in the caches


class Mamba3State(NamedTuple):
    ssm: Annotated[Tensor, StateAxes("num_heads, state_dim, head_dim", "S")]
    angle: Annotated[Tensor, StateAxes("num_heads, pairs", "Θ in [0, 2π)")]
    key: Annotated[Tensor, StateAxes("1, num_heads * rank * state_dim", "the last rotated key")]
    value: Annotated[Tensor, StateAxes("1, num_heads * head_dim", "the last x")]


@registry.register("mamba3")
class Mamba3(Layer):
    """Mamba-3: Mamba-2 without its convolution, with a rule of second order and with complex eigenvalues.

    The key and the value of a step are written twice: at the step, and once more at the next step, when their second
    weight is known. So one pass of `linear_attention` over the keys and values of the step before evaluates the rule,
    and the newest write is added separately. `mamba3_mimo` has R inputs and R outputs a head. It has R
    times as many keys and queries, so it takes some steps at a time, whose keys the backward pass makes again.

    Parameters as in mamba_ssm: in_proj (2 E + 2 G R N + 3 H + A, D) for z, x, B, C, Δ, the decay rate, λ and θ;
    dt_bias, D (H), without weight decay; B_bias, C_bias (H, R, N); B_norm.weight, C_norm.weight (N); mimo_x, mimo_z,
    mimo_o (H, R, P) if R > 1; norm.weight (E) for the norm; out_proj (D, E).
    The decay rate is softplus, as in mamba_ssm 2.3; a later version has another function with slower tails.
    With R = 1, pairs are neighbours; with R > 1, they are N/2 apart, as in mamba_ssm.
    Initialisation: dt_bias = softplus⁻¹(Δ); B_bias, C_bias, D and the norms 1; mimo_x, mimo_o 1/R, mimo_z 1; the rest
    as in PyTorch.
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
    carried_by = "turns"
    excused: ClassVar = {"bits_are_the_same_in_any_company": "a state holds its angles within one turn"}
    state: ClassVar = Mamba3State
    sample: ClassVar = {"state_dim": 8, "head_dim": 4, "num_groups": 2, "expand": 2}
    residual_out = "out_proj"
    hints: ClassVar = dict.fromkeys(("dt_bias", "D"), UNDECAYED_HINT)

    def __init__(
        self,
        dim: options.Dim,
        state_dim: Annotated[options.EvenStateDim, "N, rows of the state, even"] = 128,
        expand: Annotated[int, at_least(1), "E = expand * dim channels, in H = E / P heads"] = 2,
        head_dim: options.ExpandedHeadDim = 64,
        num_groups: options.ExpandedGroups = 1,
        rope_fraction: Annotated[
            float,
            Range("0.5 or 1", lambda value, _: value in (0.5, 1)),
            "share of the N rows that is rotated, 0.5 or 1; in A pairs",
        ] = 0.5,
        dt_min: options.StepMin = 0.001,
        dt_max: options.StepMax = 0.1,
        dt_init_floor: options.StepFloor = 1e-4,
        A_floor: Annotated[float, at_least(0), "least decay rate per unit of Δ"] = 1e-4,
        rank: Annotated[options.Rank, "R; 1 is the layer with one input"] = 1,
        output_norm: Annotated[options.OutputNorm, "RMSNorm of each head before the gate"] = False,
        norm_eps: options.NormEps = 1e-5,
    ) -> None:
        super().__init__()
        width = expand * dim
        heads = width // head_dim
        if state_dim * rope_fraction < 2:
            self._refuse("state_dim", state_dim, f"at least 2 / rope_fraction={2 / rope_fraction:g}")
        self.dim, self.state_dim = dim, state_dim
        self.num_heads, self.head_dim, self.num_groups = heads, head_dim, num_groups
        self.rank, self.A_floor, self.pairs = rank, A_floor, int(state_dim * rope_fraction) // 2
        written = rank * num_groups * state_dim
        self.widths = [width, width, written, written, heads, heads, heads, self.pairs]
        self.in_proj = nn.Linear(dim, sum(self.widths), bias=False)
        self.dt_bias = nn.Parameter(time_step_bias(heads, dt_min, dt_max, dt_init_floor))
        self.B_bias, self.C_bias = (nn.Parameter(torch.ones(heads, rank, state_dim)) for _ in range(2))
        self.B_norm, self.C_norm = (GatedRMSNorm(state_dim, norm_eps) for _ in range(2))
        if rank > 1:
            self.mimo_x, self.mimo_o = (nn.Parameter(torch.full((heads, rank, head_dim), 1 / rank)) for _ in range(2))
            self.mimo_z = nn.Parameter(torch.ones(heads, rank, head_dim))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = GatedRMSNorm(width, norm_eps, groups=heads) if output_norm else None
        self.out_proj = nn.Linear(width, dim, bias=False)

    def run(self, x: Tensor, state: Mamba3State | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Mamba3State]:
        start = self._begin(x, state, cu_seqlens)
        parts = self.in_proj(x).split(self.widths, -1)
        at_once = cu_seqlens is not None or torch.compiler.is_compiling() or transforming()
        if self.rank == 1 or at_once or x.shape[1] <= PIECE:
            mixed, after = self._mix(parts, start, cu_seqlens)
            return self.out_proj(mixed), after

        def mix(piece: Sequence[Tensor], state: Mamba3State) -> tuple[Tensor, Mamba3State]:
            with large_products(x.shape[0] * x.shape[1]):  # which are no longer so when the piece is computed again
                return self._mix(piece, state, None)

        pieces, after = [], start
        for piece in zip(*(tensor.split(PIECE, 1) for tensor in parts), strict=True):
            mixed, after = cast(
                tuple[Tensor, Mamba3State],
                checkpoint(mix, piece, after, use_reentrant=False, preserve_rng_state=False),
            )
            pieces.append(mixed)
        return self.out_proj(torch.cat(pieces, 1)), after

    def _mix(
        self, parts: Sequence[Tensor], state: Mamba3State, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Mamba3State]:
        """Return the input of the output map, (B, T, E), and the state after these steps."""
        z, u, B, C, dt, a, trapezoid, turn = parts
        dtype = u.dtype
        dt = F.softplus(widen(dt) + widen(self.dt_bias))
        g = dt * (-F.softplus(widen(a))).clamp(max=-self.A_floor)
        now = widen(trapezoid).sigmoid()
        # In float64, because in float32 the sum of many angles loses what one step adds.
        steps = (math.pi * widen(turn).tanh()[:, :, None] * dt[..., None]).double()
        angles, last = linear_scan(steps, steps.new_ones(()), state.angle.double(), cu_seqlens=cu_seqlens)
        cos, sin = (tensor.to(g.dtype).unsqueeze(3) for tensor in (angles.cos(), angles.sin()))
        k, q = self._turned(self.B_norm, B, self.B_bias, cos, sin), self._turned(self.C_norm, C, self.C_bias, cos, sin)
        # What the step before was written with. At the start of a segment the state holds that write already.
        weight = now * dt
        before_k, key = token_shift(k.flatten(2), state.key, cu_seqlens=cu_seqlens)
        shifted = torch.cat([widen(u), weight], -1)
        start = torch.cat([state.value, state.value.new_zeros(state.value.shape[0], 1, self.num_heads)], -1)
        sizes = [state.value.shape[-1], self.num_heads]
        shifted, final = token_shift(shifted, start, cu_seqlens=cu_seqlens)
        before_u, earlier = shifted.split(sizes, -1)
        value, final = final.split(sizes, -1)
        write = ((earlier + (1 - now) * dt) * g.exp())[..., None] * before_u.unflatten(-1, (self.num_heads, -1))
        o, S = self._remember(q, before_k.view_as(k), write, g, state.ssm, cu_seqlens)
        inputs = self._inputs(widen(u).unflatten(-1, (self.num_heads, -1)))
        if self.rank == 1:
            present = weight * (q * k).sum((-2, -1))
            o = torch.addcmul(o, (present + widen(self.D))[..., None, None], inputs)
        else:
            present = weight[..., None, None] * (q @ k.mT)
            skip = widen(self.D)[:, None, None] * torch.eye(self.rank, device=present.device, dtype=present.dtype)
            o = o + (present + skip) @ inputs
        newest = final[:, 0, :, None, None] * self._inputs(value[:, 0].unflatten(-1, (self.num_heads, -1)))
        S = S + key.view(-1, *k.shape[2:]).mT @ newest
        angle = torch.remainder(last, 2 * math.pi).to(S.dtype)
        # The backward pass needs key and value, and a caller may change what is returned in place.
        state = Mamba3State(S, angle, key.clone(), value.clone())
        return self._gated(o, z).to(dtype), state

    def _turned(self, norm: GatedRMSNorm, x: Tensor, bias: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Norm x (B, T, R G N), add a bias for each head, rotate by angles (B, T, H, 1, A): return (B, T, H, R, N)."""
        x = norm(widen(x).unflatten(-1, (self.rank, self.num_groups, self.state_dim)), None).transpose(2, 3)
        x = (x.unsqueeze(3) + widen(bias).unflatten(0, (self.num_groups, -1))).flatten(2, 3)
        if self.rank == 1:
            return turn_pairs(x, cos, sin)
        still = self.state_dim // 2 - self.pairs  # pairs are a half apart
        first, middle, second, last = x.split([self.pairs, still, self.pairs, still], -1)
        return torch.cat([first * cos - second * sin, middle, first * sin + second * cos, last], -1)

    def _inputs(self, u: Tensor) -> Tensor:
        """Return the R inputs of each head: (..., H, P) to (..., H, R, P)."""
        u = u.unsqueeze(-2)
        return u if self.rank == 1 else u * widen(self.mimo_x)

    def _remember(
        self, q: Tensor, k: Tensor, write: Tensor, g: Tensor, state: Tensor, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Decay, write R times, then read R times.

        q, k: (B, T, H, R, N).   write: (B, T, H, P).   Returns o (B, T, H, R, P) and the last memory.
        """
        R = self.rank
        if R == 1:
            q, k = q.squeeze(3), k.squeeze(3)
            o, last = linear_attention(q, k, write, g, state=state, scale=1.0, cu_seqlens=cu_seqlens)
            return o.unsqueeze(3), last
        # R steps for each step, the first of which decays. What the later ones wrote the earlier reads have not seen.
        v = self._inputs(write)
        later = (q @ k.mT).triu(1) @ v
        q, k, v = (tensor.transpose(2, 3).flatten(1, 2) for tensor in (q, k, v))
        g = F.pad(g.unsqueeze(2), (0, 0, 0, R - 1)).flatten(1, 2)
        cu_seqlens = None if cu_seqlens is None else cu_seqlens * R
        o, last = linear_attention(q, k, v, g, state=state, scale=1.0, cu_seqlens=cu_seqlens)
        return o.unflatten(1, (-1, R)).transpose(2, 3) + later, last

    def _gated(self, o: Tensor, z: Tensor) -> Tensor:
        """Norm, gate and sum the R outputs: o (B, T, H, R, P), z (B, T, E) to (B, T, E)."""
        z = widen(z).unflatten(-1, (self.num_heads, 1, -1))
        z = z if self.rank == 1 else z * widen(self.mimo_z)
        if self.norm is None:
            o = gated(z, o)
        else:
            o, z = (tensor.transpose(2, 3).flatten(-2) for tensor in (o, z))
            o = self.norm(o, z).unflatten(-1, (self.num_heads, -1)).transpose(2, 3)
        o = o if self.rank == 1 else o * widen(self.mimo_o)
        return o.sum(-2).flatten(-2)


@registry.preset("mamba3_mimo", rank=4)
class Mamba3MIMO(Mamba3):
    """Mamba-3 with several inputs and outputs a head: rank-R writes and reads of the same state."""

    id = "S-mamba3"
    equation = (
        "S_t = a_t S_{t-1} + sum_r ((1 - l_t) dt_t a_t k^r_{t-1} x^r_{t-1}^T + l_t dt_t k^r_t x^r_t^T),  "
        "x^r = x * m_x^r,  o^r_t = S_t^T q^r_t + D x^r_t;  out = W_out sum_r m_o^r * o^r * SiLU(z * m_z^r)"
    )
    source = Mamba3.source
    sample: ClassVar = {"state_dim": 8, "head_dim": 6, "expand": 2, "rank": 2}
