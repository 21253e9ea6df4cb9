"""Time mix of RWKV-6 "Finch"."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.parts.short_convolution import token_shift
from scanl.layers.rwkv.rwkv_time_mix import BonusTimeMix, RWKVState
from scanl.ops import linear_attention
from scanl.ops.fused.gated import gated
from scanl.options import divides

MIXED_LETTERS = "wkvrg"  # inputs that the low-rank adapter mixes, in the order of its slices


@registry.register("rwkv6")
class RWKV6(BonusTimeMix):
    """Time mix of RWKV-6: a matrix memory whose decay and token shift depend on the input.

    The input of each projection is x_t + (x_{t-1} - x_t) ⊙ (time_maa_□ + tanh(x' time_maa_w1) time_maa_w2) with
    x' = x_t + (x_{t-1} - x_t) ⊙ time_maa_x; d = time_decay + tanh(x_w time_decay_w1) time_decay_w2.
    Parameters as in RWKV-LM's RWKV_Tmix_x060: time_maa_x, _w, _k, _v, _r, _g (1, 1, D); time_maa_w1 (D, 5 mix_rank);
    time_maa_w2 (5, mix_rank, D); time_decay (1, 1, D); time_decay_w1 (D, decay_rank); time_decay_w2 (decay_rank, D);
    time_faaaa (H, N), the bonus u; receptance, key, value, gate, output (D, D); ln_x, a GroupNorm of H groups.
    Initialisation as in that code, with j the channel, layer l of L, a = l/(L-1), c = 1 - l/L: time_maa_x, _w, _k = 1 -
    (j/D)^c, _v = 1 - (j/D)^c - 0.3a, _r, _g = 1 - (j/D)^(c/2); time_decay = -6 + 5 (j/(D-1))^(0.7+1.3a); u = a (1 -
    j/(D-1)) + 0.1 ((j+1) mod 3 - 1); time_maa_w1 and time_decay_w1 0, the second factors U(±0.01); receptance and value
    orthogonal, key and gate 0.1 of that, output 0; ln_x.weight ((l+1)/L)^0.7, its epsilon 64e-5.
    """

    id = "S-rwkv6"
    aliases = ("Finch",)
    equation = (
        "S_t = Diag(w_t) S_{t-1} + k_t v_t^T,  o_t = (S_{t-1} + Diag(u) k_t v_t^T)^T r_t,  "
        "y_t = W_o (GroupNorm(o_t) * SiLU(g_t)),  w_t = exp(-exp(d_t))"
    )
    source = (
        'Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", arXiv:2404.05892, '
        "eq. (14) to (20)"
    )
    op = "linear_attention"
    sample: ClassVar = {"head_dim": 4, "mix_rank": 3, "decay_rank": 5}
    residual_out = "output"

    time_maa_x: nn.Parameter

    def __init__(
        self,
        dim: options.Dim,
        head_dim: Annotated[options.HeadDim, divides("dim"), "N, keys and values of a head; H = dim / N heads"] = 64,
        mix_rank: Annotated[
            options.Rank | None, "rank of the adapter of each token shift; by default 32, and 64 at dim = 4096"
        ] = None,
        decay_rank: Annotated[
            options.Rank | None, "rank of the adapter of the decay; by default 64, and 128 at dim = 4096"
        ] = None,
    ) -> None:
        super().__init__()
        large = 2 if dim == 4096 else 1
        mix_rank, decay_rank = mix_rank or 32 * large, decay_rank or 64 * large
        self.dim, self.head_dim = dim, head_dim
        for name in "x" + MIXED_LETTERS:
            setattr(self, f"time_maa_{name}", nn.Parameter(torch.empty(1, 1, dim)))
        self.time_maa_w1 = nn.Parameter(torch.zeros(dim, len(MIXED_LETTERS) * mix_rank))
        self.time_maa_w2 = nn.Parameter(torch.empty(len(MIXED_LETTERS), mix_rank, dim).uniform_(-0.01, 0.01))
        self.time_decay = nn.Parameter(torch.empty(1, 1, dim))
        self.time_decay_w1 = nn.Parameter(torch.zeros(dim, decay_rank))
        self.time_decay_w2 = nn.Parameter(torch.empty(decay_rank, dim).uniform_(-0.01, 0.01))
        self.time_faaaa = nn.Parameter(torch.empty(dim // head_dim, head_dim))
        self.add_maps()
        self.enter_stack(0, [self])

    def enter_stack(self, index: int, layers: Sequence[Layer]) -> None:
        starts = self.begin_at(index, layers)
        for name, start in (starts | dict.fromkeys("xw", starts["k"])).items():
            getattr(self, f"time_maa_{name}").data.copy_(1 - start)

    def run(self, x: Tensor, state: RWKVState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, RWKVState]:
        recurrent, shift = state or (None, None)
        previous, shift = token_shift(x, shift, cu_seqlens=cu_seqlens)
        change = previous - x
        adapted = torch.tanh(torch.addcmul(x, change, self.time_maa_x) @ self.time_maa_w1).unflatten(
            -1, (len(MIXED_LETTERS), -1)
        )
        shifts = torch.einsum("btsr,srd->sbtd", adapted, self.time_maa_w2)
        w, k, v, r, g = (
            x + change * (getattr(self, f"time_maa_{name}") + shift)
            for name, shift in zip(MIXED_LETTERS, shifts, strict=True)
        )
        d = self.time_decay + torch.tanh(w @ self.time_decay_w1) @ self.time_decay_w2
        o, recurrent = linear_attention(
            self.receptance(r).unflatten(-1, self.heads),
            self.key(k).unflatten(-1, self.heads),
            self.value(v).unflatten(-1, self.heads),
            -widen(d).exp().unflatten(-1, self.heads),
            None,
            self.time_faaaa,
            recurrent,
            scale=1.0,
            cu_seqlens=cu_seqlens,
        )
        return self.output(gated(self.gate(g), self.normed(o))), RWKVState(recurrent, shift)
