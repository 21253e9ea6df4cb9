"""Time mix of RWKV-5 "Eagle"."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.parts.short_convolution import token_shift
from scanl.layers.rwkv.rwkv4 import mix
from scanl.layers.rwkv.rwkv_time_mix import BonusTimeMix, RWKVState
from scanl.ops import linear_attention
from scanl.ops.fused.gated import gated
from scanl.options import divides


@registry.register("rwkv5")
class RWKV5(BonusTimeMix):
    """Time mix of RWKV-5: a matrix memory with a fixed decay for each key channel.

    The input of each projection is time_mix_□ ⊙ x_t + (1 - time_mix_□) ⊙ x_{t-1}. In the paper the parameter is the
    weight of x_{t-1}; here it is that of x_t, as in the released code.

    Parameters as in RWKV-LM's RWKV_Tmix_x052: time_mix_k, time_mix_v, time_mix_r, time_mix_g (1, 1, D); time_decay (H,
    N); time_faaaa (H, N), the bonus u; receptance, key, value, gate, output (D, D); ln_x, a GroupNorm of H groups.
    Initialisation as in that code, with j the channel, layer l of L, a = l/(L-1), c = 1 - l/L: time_mix_k = (j/D)^c,
    time_mix_v = (j/D)^c + 0.3a, time_mix_r, time_mix_g = (j/D)^(c/2); time_decay = -6 + 5 (j/(D-1))^(0.7+1.3a); u =
    a (1 - j/(D-1)) + 0.1 ((j+1) mod 3 - 1); receptance and value orthogonal, key and gate 0.1 of that, output 0;
    ln_x.weight ((l+1)/L)^0.7. The epsilon of ln_x is 64e-5: that code divides by 8 first, with epsilon 1e-5.
    """

    id = "S-rwkv5"
    aliases = ("Eagle",)
    equation = (
        "S_t = Diag(w) S_{t-1} + k_t v_t^T,  o_t = (S_{t-1} + Diag(u) k_t v_t^T)^T r_t,  "
        "y_t = W_o (GroupNorm(o_t) * SiLU(g_t)),  w = exp(-exp(time_decay)),  "
        "r, k, v, g = W (mu * x_t + (1 - mu) * x_{t-1})"
    )
    source = (
        'Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", arXiv:2404.05892, '
        "eq. (3) to (8)"
    )
    op = "linear_attention"
    sample: ClassVar = {"head_dim": 4}
    residual_out = "output"

    def __init__(
        self,
        dim: options.Dim,
        head_dim: Annotated[options.HeadDim, divides("dim"), "N, keys and values of a head; H = dim / N heads"] = 64,
    ) -> None:
        super().__init__()
        self.dim, self.head_dim = dim, head_dim
        for name in "kvrg":
            setattr(self, f"time_mix_{name}", nn.Parameter(torch.empty(1, 1, dim)))
        self.time_decay, self.time_faaaa = (nn.Parameter(torch.empty(dim // head_dim, head_dim)) for _ in range(2))
        self.add_maps()
        self.enter_stack(0, [self])

    def enter_stack(self, index: int, layers: Sequence[Layer]) -> None:
        for name, start in self.begin_at(index, layers).items():
            getattr(self, f"time_mix_{name}").data.copy_(start)

    def run(self, x: Tensor, state: RWKVState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, RWKVState]:
        recurrent, shift = state or (None, None)
        previous, shift = token_shift(x, shift, cu_seqlens=cu_seqlens)
        r, k, v, g = (
            project(mix(x, previous, getattr(self, f"time_mix_{name}")))
            for name, project in (("r", self.receptance), ("k", self.key), ("v", self.value), ("g", self.gate))
        )
        r, k, v = (operand.unflatten(-1, self.heads) for operand in (r, k, v))
        decay = -widen(self.time_decay).exp().expand_as(k)
        o, recurrent = linear_attention(
            r, k, v, decay, None, self.time_faaaa, recurrent, scale=1.0, cu_seqlens=cu_seqlens
        )
        return self.output(gated(g, self.normed(o))), RWKVState(recurrent, shift)
