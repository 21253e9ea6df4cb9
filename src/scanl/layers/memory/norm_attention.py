"""NormAttention, the block of TransNormer's higher layers: linear attention with a norm in place of the denominator."""

from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.householder_rotary import HouseholderRotary
from scanl.layers.parts.norm import simple_rms_norm
from scanl.layers.parts.positions import positions
from scanl.ops import linear_attention
from scanl.ops._frame.context import late
from scanl.ops.feature_maps import elu_plus_one
from scanl.options import one_of

_ACTIVATIONS = {"elu": late(F, "elu"), "elu_plus_one": elu_plus_one}


class NormAttentionState(NamedTuple):
    recurrent: Annotated[Tensor, StateAxes("num_heads, head_dim, head_dim", "S")]
    steps: Annotated[Tensor, StateAxes("1", "steps read", dtype=torch.int64, after=torch.add)]


@registry.register("norm_attention")
class NormAttention(Layer):
    """NormAttention of TransNormer: a norm over all heads replaces the denominator, so no gradient grows without bound.

    The defaults are TransNormer's T1; `norm_attention_t2` is T2. The authors use this layer in the higher half of the
    model, and `diag_attention` in the lower half.

    Parameters as in the released code: q_proj, k_proj, v_proj, out_proj (D, D) with biases; urpe.theta (1, 1, K // 2)
    and the buffer urpe.v (K), of the positions. The norm has none.
    Initialisation as in that code: Xavier uniform, of gain 1/sqrt(2) for q, k and v, whose biases are as in PyTorch;
    the bias of out_proj 0; theta_i = 10000^(-2i/K).
    """

    id = "S-transnormer"
    equation = "S_t = S_{t-1} + phi(k_t) v_t^T,  y_t = W_o SRMSNorm(S_t^T phi(q_t)),  phi = ELU, then positions"
    source = 'Qin et al., "The Devil in Linear Transformer", arXiv:2210.10340, eq. (9)'
    op = "linear_attention"
    state: ClassVar = NormAttentionState
    sample: ClassVar = {"num_heads": 3}
    residual_out = "out_proj"

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.Heads = 8,
        activation: Annotated[
            options.Activation, one_of(_ACTIVATIONS), 'φ, "elu", which may be negative, or "elu_plus_one"'
        ] = "elu",
    ) -> None:
        super().__init__()
        self.dim, self.num_heads, self.head_dim, self.activation = dim, num_heads, dim // num_heads, activation
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))
        for project, gain in ((self.q_proj, 0.5), (self.k_proj, 0.5), (self.v_proj, 0.5), (self.out_proj, 1)):
            nn.init.xavier_uniform_(project.weight, gain=gain**0.5)
        nn.init.zeros_(self.out_proj.bias)
        self.urpe = HouseholderRotary(self.head_dim)

    def run(
        self, x: Tensor, state: NormAttentionState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, NormAttentionState]:
        recurrent, past = self._begin(x, state, cu_seqlens)
        steps, past = positions(past, x.shape[1], cu_seqlens)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (widen(project(x)).unflatten(-1, (self.num_heads, -1)) for project in projections)
        q, k = (self.urpe(_ACTIVATIONS[self.activation](tensor), steps) for tensor in (q, k))
        o, recurrent = linear_attention(q, k, v, state=recurrent, scale=1.0, cu_seqlens=cu_seqlens)
        return self.out_proj(simple_rms_norm(o.flatten(-2)).to(x.dtype)), NormAttentionState(recurrent, past)


@registry.preset("norm_attention_t2", activation="elu_plus_one")
class NormAttentionT2(NormAttention):
    """NormAttention of TransNormer T2, with positive features."""

    id = "S-transnormer"
    equation = "S_t = S_{t-1} + phi(k_t) v_t^T,  y_t = W_o SRMSNorm(S_t^T phi(q_t)),  phi = ELU + 1, then positions"
    source = NormAttention.source
