r"""Comba: a matrix memory whose correction uses the value that it held before the decay.

.. math:: S_t = \alpha_t S_{t-1} + \beta_t k_t (v_t - S_{t-1}^\top p_t)^\top, \quad
          o_t = S_t^\top (q_t - d\, \sigma(c)\, k_t) / \sqrt{K}
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from scanl.layers.base import UNDECAYED, register, widen
from scanl.layers.memory.gated_deltanet import GatedDeltaNet
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.ops import dplr_scan
from scanl.ops.delta_rule import unit


@register("comba")
class Comba(GatedDeltaNet):
    """Comba: gated DeltaNet whose correction reads the memory before it decays, and whose queries are corrected too.

    As in the released code, the corrected queries, the keys and p_t = σ(c) k_t are scaled to unit length, so σ(c) acts
    through the queries alone.

    Args:
        dim: D, model width.
        expand_v: V = expand_v * head_dim channels of a value.
        head_dim: K, channels of a query and of a key; by default 3/4 D / num_heads, rounded.
        num_heads: heads of queries and keys.
        num_v_heads: H, heads of values, a multiple of num_heads; by default num_heads.
        use_gate: a sigmoid gate after the norm of the output.
        use_short_conv: convolutions over q, k and v.
        correction_factor: initial value of D; the authors suggest 0.02 for small models.
        conv_size, conv_bias: W, the window of the convolutions, and their bias.
        norm_eps: ε of the norm.

    Parameters as in flash-linear-attention: those of `gated_deltanet`; decay and D (num_heads), which are c and d of
    the equation. D has no weight decay.
    Initialisation: as of `gated_deltanet`; decay 1, D correction_factor.
    State: S (B, H, K, V), zeros, and the last inputs of the convolutions.
    """

    id = "S-comba"
    equation = (
        "S_t = alpha_t S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T,  p_t = k_t,  "
        "o_t = S_t^T unit(q_t - d sigmoid(c) k_t) / sqrt(K);  y = W_o (RMSNorm(o) * sigmoid(W_g x))"
    )
    source = 'Hu et al., "Comba: Improving Bilinear RNNs with Closed-loop Control", arXiv:2506.02475, sec. 3'
    op = "dplr_scan"
    hints: ClassVar = {"D": UNDECAYED}

    def __init__(
        self,
        dim: int,
        expand_v: float = 2.0,
        head_dim: int | None = None,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        use_gate: bool = True,
        use_short_conv: bool = True,
        correction_factor: float = 1.0,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(
            dim,
            expand_v,
            head_dim,
            num_heads,
            num_v_heads,
            use_gate=use_gate,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
        )
        self.decay = nn.Parameter(torch.ones(num_heads))
        self.D = nn.Parameter(torch.full((num_heads,), float(correction_factor)))
        self.o_norm = GatedRMSNorm(self.head_v_dim, norm_eps, activation=torch.sigmoid)

    def _remember(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor | None,
        state: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        q, k = widen(q), widen(k)
        p = widen(self.decay).sigmoid()[:, None] * k
        q, k, p = (unit(each, 1e-6) for each in (q - widen(self.D)[:, None] * p, k, p))
        erased, read = (each.repeat_interleave(self.num_v_heads // self.num_heads, 2) for each in (k, p))
        strength = beta.unsqueeze(-1)
        return dplr_scan(q, k, strength * v, -strength * erased, read, g, state, cu_seqlens=cu_seqlens)
