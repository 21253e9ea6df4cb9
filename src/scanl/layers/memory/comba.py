"""Comba: a matrix memory whose correction uses the value that it held before the decay."""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import UNDECAYED_HINT, widen
from scanl.layers.parts.delta_memory import DeltaMemory
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.ops import dplr_scan
from scanl.ops.delta_rule import unit


@registry.register("comba")
class Comba(DeltaMemory):
    """Comba: gated DeltaNet whose correction reads the memory before it decays, and whose queries are corrected too.

    As in the released code, the corrected queries, the keys and p_t = σ(c) k_t are scaled to unit length, so σ(c) acts
    through the queries alone.

    Parameters as in flash-linear-attention: `gated_deltanet`'s; decay and D (num_heads), which are c and d of
    the equation. D has no weight decay.
    Initialisation: as in `gated_deltanet`; decay 1, D correction_factor.
    """

    id = "S-comba"
    equation = (
        "S_t = alpha_t S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T,  p_t = k_t,  "
        "o_t = S_t^T unit(q_t - d sigmoid(c) k_t) / sqrt(K);  y = W_o (RMSNorm(o) * sigmoid(W_g x))"
    )
    source = 'Hu et al., "Comba: Improving Bilinear RNNs with Closed-loop Control", arXiv:2506.02475, sec. 3'
    op = "dplr_scan"
    hints: ClassVar = {"D": UNDECAYED_HINT}

    def __init__(
        self,
        dim: options.Dim,
        correction_factor: Annotated[float, "initial value of D; the authors suggest 0.02 for small models"] = 1.0,
        **shared: Any,
    ) -> None:
        super().__init__(dim, **shared)
        self.decay = nn.Parameter(torch.ones(self.num_heads))
        self.D = nn.Parameter(torch.full((self.num_heads,), float(correction_factor)))
        self.o_norm = GatedRMSNorm(self.head_v_dim, self.o_norm.eps, activation="sigmoid")

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
        q, k, p = (unit(tensor, 1e-6) for tensor in (q - widen(self.D)[:, None] * p, k, p))
        erased, probe = (tensor.repeat_interleave(self.num_v_heads // self.num_heads, 2) for tensor in (k, p))
        strength = beta.unsqueeze(-1)
        return dplr_scan(q, k, strength * v, -strength * erased, probe, g, state, cu_seqlens=cu_seqlens)
