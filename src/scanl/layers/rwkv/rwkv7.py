"""Time mix of RWKV-7 "Goose"."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.parts.depth import channel_ramp, channel_shares, relative_depth, remaining_depth
from scanl.layers.parts.norm import HeadGroupNorm
from scanl.layers.parts.short_convolution import token_shift
from scanl.layers.rwkv.rwkv_time_mix import MatrixTimeMix, RWKVState
from scanl.ops import dplr_scan
from scanl.options import divides

BY_DEFAULT = "by default {} sqrt(dim), to a multiple of 32, at least 32"
SHIFTS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}  # exponents of the initial token shifts


@registry.register("rwkv7")
class RWKV7(MatrixTimeMix):
    """Time mix of RWKV-7: a matrix memory that erases and writes at different keys, with a learning rate per channel.

    In a stack, every RWKV-7 layer except the lowest mixes its values with v_first, the values of the lowest:
    v + (v_first - v) ⊙ σ(v0 + x_v v1 v2). The lowest layer writes v_first into the dict `memo`; the others read it in
    the same pass. The lowest layer has no v0, v1 and v2; `enter_stack` makes them in the others.

    With x_□ = x_t + (x_{t-1} - x_t) ⊙ the parameter x_□: w = exp(-e^(-1/2) σ(w0 + tanh(x_w w1) w2)),
    a = σ(a0 + x_a a1 a2), g = σ(x_g g1) g2, κ̂ = k ⊙ k_k of unit length in each head,
    k ← k ⊙ (1 + (a - 1) ⊙ k_a), ρ = r_k.
    Parameters as in RWKV-LM's RWKV_Tmix_x070: x_r, x_w, x_k, x_v, x_a, x_g, w0, a0, v0, k_k, k_a (1, 1, D);
    w1, a1, v1, g1 (D, rank); w2, a2, v2, g2 (rank, D); r_k (H, N); receptance, key, value, output (D, D); ln_x, a
    GroupNorm of H groups.
    Initialisation as in that code, with j the channel, layer l of L, b = l/(L-1), c = 1 - l/L, lin = j/(D-1) - 1/2, z =
    ((j mod N) - (N-1)/2) / ((N-1)/2), zig = z|z|: x_□ = 1 - (j/D)^(sc) with s 0.2 for r, g, 0.9 for w, a, 0.7 for k, v;
    w0 = -6 + 6 (j/(D-1))^(1+b^0.3) + 0.5 + 2.5 zig; a0 = -0.19 + 0.3 zig + 0.4 lin; v0 = 0.73 - 0.4 lin; k_k = 0.71 -
    0.1 lin; k_a = 1.02; r_k = -0.04; first factors 0, second ones orthogonal times 0.1 (and sqrt(rank/D) where that
    exceeds 1); receptance, value U(±0.5/sqrt(D)), key U(±0.05/sqrt(D)), output 0; ln_x 1, its epsilon 64e-5. This is
    the initialisation in RWKV-LM's class; its trainer then initialises the four matrices and ln_x again.
    """

    id = "S-rwkv7"
    aliases = ("Goose",)
    equation = (
        "S_t = (Diag(w_t) - (kappa_t * a_t) kappa_t^T) S_{t-1} + k_t v_t^T,  o_t = S_t^T r_t,  "
        "y_t = W_o ((GroupNorm(o_t) + <r_t * r_k, k_t> v_t) * g_t)"
    )
    source = 'Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", arXiv:2503.14456, eq. (4) to (21)'
    op = "dplr_scan"
    sample: ClassVar = {"head_dim": 4, "decay_rank": 3, "a_rank": 3, "v_rank": 3, "gate_rank": 5}
    residual_out = "output"

    # Only in layers above the lowest.
    v0: nn.Parameter | None
    v1: nn.Parameter | None
    v2: nn.Parameter | None

    def __init__(
        self,
        dim: options.Dim,
        head_dim: Annotated[options.HeadDim, divides("dim"), "N, keys and values of a head; H = dim / N heads"] = 64,
        decay_rank: Annotated[options.Rank | None, "rank of the adapter of w; " + BY_DEFAULT.format(2.5)] = None,
        a_rank: Annotated[options.Rank | None, "rank of the adapter of a; " + BY_DEFAULT.format(2.5)] = None,
        v_rank: Annotated[options.Rank | None, "rank of the adapter of v; " + BY_DEFAULT.format(1.7)] = None,
        gate_rank: Annotated[options.Rank | None, "rank of the adapter of g; " + BY_DEFAULT.format(5)] = None,
    ) -> None:
        super().__init__()
        self.dim, self.head_dim = dim, head_dim
        self.v_rank = v_rank or _rank(1.7, dim)
        for name in ("v0", "v1", "v2"):
            self.register_parameter(name, None)
        linear, zigzag = channel_ramp(dim) - 0.5, self._zigzag()
        for name in SHIFTS:
            setattr(self, f"x_{name}", nn.Parameter(torch.empty(1, 1, dim)))
        self.w0 = nn.Parameter(torch.empty(1, 1, dim))
        self.w1, self.w2 = _factors(dim, decay_rank or _rank(2.5, dim))
        self.a0 = nn.Parameter((-0.19 + 0.3 * zigzag + 0.4 * linear).view(1, 1, dim))
        self.a1, self.a2 = _factors(dim, a_rank or _rank(2.5, dim))
        self.g1, self.g2 = _factors(dim, gate_rank or _rank(5, dim))
        self.k_k = nn.Parameter((0.71 - 0.1 * linear).view(1, 1, dim))
        self.k_a = nn.Parameter(torch.full((1, 1, dim), 1.02))
        self.r_k = nn.Parameter(torch.full((dim // head_dim, head_dim), -0.04))
        self.receptance, self.key, self.value, self.output = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        for projection, limit in ((self.receptance, 0.5), (self.key, 0.05), (self.value, 0.5), (self.output, 0.0)):
            nn.init.uniform_(projection.weight, -limit / math.sqrt(dim), limit / math.sqrt(dim))
        self.ln_x = HeadGroupNorm(dim // head_dim, dim, eps=64e-5)
        self.enter_stack(0, [self])

    def _zigzag(self) -> Tensor:
        half = max(self.head_dim - 1, 1) / 2
        z = (torch.arange(self.dim) % self.head_dim - (self.head_dim - 1) / 2) / half
        return z * z.abs()

    def enter_stack(self, index: int, layers: Sequence[Layer]) -> None:
        speed = 1 + relative_depth(index, len(layers)) ** 0.3
        with torch.no_grad():
            for name, exponent in SHIFTS.items():
                getattr(self, f"x_{name}").copy_(
                    1 - channel_shares(self.dim) ** (exponent * remaining_depth(index, len(layers)))
                )
            self.w0.copy_(-6 + 6 * channel_ramp(self.dim) ** speed + 0.5 + 2.5 * self._zigzag())
        if any(isinstance(lower, RWKV7) for lower in layers[:index]):
            self.v0 = nn.Parameter((0.73 - 0.4 * (channel_ramp(self.dim) - 0.5)).view(1, 1, self.dim))
            self.v1, self.v2 = _factors(self.dim, self.v_rank)

    def run(
        self, x: Tensor, state: RWKVState | None, cu_seqlens: Tensor | None, memo: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, RWKVState]:
        recurrent, shift = state or (None, None)
        previous, shift = token_shift(x, shift, cu_seqlens=cu_seqlens)
        change = previous - x
        r, w, k, v, a, g = (torch.addcmul(x, change, getattr(self, f"x_{name}")) for name in SHIFTS)
        decay = -math.exp(-0.5) * widen(self.w0 + torch.tanh(w @ self.w1) @ self.w2).sigmoid()
        rate = (self.a0 + a @ self.a1 @ self.a2).sigmoid()
        gate = (g @ self.g1).sigmoid() @ self.g2
        r, k, v = self.receptance(r), self.key(k), self._values(v, memo)
        erased = F.normalize((k * self.k_k).unflatten(-1, self.heads), dim=-1)
        k = k * torch.addcmul(1 - self.k_a, rate, self.k_a)
        r, k, v, rate, decay = (tensor.unflatten(-1, self.heads) for tensor in (r, k, v, rate, decay))
        o, recurrent = dplr_scan(r, k, v, erased * rate, -erased, decay, recurrent, scale=1.0, cu_seqlens=cu_seqlens)
        present = (r * k * self.r_k).sum(-1, keepdim=True) * v
        return self.output((self.normed(o) + present.flatten(-2)) * gate), RWKVState(recurrent, shift)

    def _values(self, x: Tensor, memo: dict[str, Tensor] | None) -> Tensor:
        v = self.value(x)
        if self.v0 is None or self.v1 is None or self.v2 is None:
            if memo is not None:
                memo["v_first"] = v
            return v
        if memo is None or "v_first" not in memo:
            raise ConfigError(
                f"{self._who()}: memo has no values of the lowest RWKV-7 layer, expected them because this layer is "
                "above it; run the layers in a Stack, or give all of them one dict as memo, from the lowest up"
            )
        return v + (memo["v_first"] - v) * (self.v0 + x @ self.v1 @ self.v2).sigmoid()


def _rank(factor: float, dim: int) -> int:
    return max(32, round(factor * math.sqrt(dim) / 32) * 32)


def _factors(dim: int, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Make the factors (D, rank) and (rank, D) of an adapter. Their product is initially 0."""
    second = nn.init.orthogonal_(torch.empty(rank, dim), gain=0.1 * max(1.0, rank / dim) ** 0.5)
    return nn.Parameter(torch.zeros(dim, rank)), nn.Parameter(second)
