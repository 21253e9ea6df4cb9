"""Multi-scale retention, the token mixer of RetNet."""

from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import Layer
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.positions import positions
from scanl.layers.parts.rotary import rotate_pairs
from scanl.ops import linear_attention
from scanl.ops.fused.gated import gated
from scanl.ops.fused.rms_norm import rms_norm
from scanl.options import at_least


class RetNetState(NamedTuple):
    recurrent: Annotated[Tensor, StateAxes("num_heads, key_dim, head_dim", "S")]
    steps: Annotated[
        Tensor, StateAxes("1", "steps read, from which the rotation continues", dtype=torch.int64, after=torch.add)
    ]


@registry.register("retnet")
class RetNet(Layer):
    """Retention: rotated queries and keys, a constant decay for each head, and a gate after the norm.

    Differs: the released code also divides the scores by sums that have no gradient. The norm of each head cancels
    that, up to its ε, so it is omitted here, as in the paper's recurrence.

    Parameters as in torchscale: q_proj, k_proj (D, D); v_proj, g_proj (H V, D); out_proj (D, H V). The norm has none.
    Initialisation as in that code: Xavier uniform with gain 2^(-2.5), for out_proj 2^(-1); until November 2023 it was
    1.
    """

    id = "S-retnet"
    aliases = ("retention", "retentive")
    equation = (
        "S_t = gamma_h S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  gamma_h = 1 - 2^(-5-h),  "
        "q_t = e^{i t theta} W_q x_t,  k_t = e^{i t theta} W_k x_t / sqrt(K);  "
        "y = W_o (SiLU(W_g x) * RMSNorm(o))"
    )
    source = 'Sun et al., "Retentive Network: A Successor to Transformer for LLMs", arXiv:2307.08621, eq. (6) and (8)'
    op = "linear_attention"
    state: ClassVar = RetNetState
    sample: ClassVar = {"num_heads": 3, "expand_v": 0.75}
    residual_out = "out_proj"

    def __init__(
        self,
        dim: options.Dim,
        num_heads: Annotated[options.Heads, "H; head h remembers about 2^(5+h) steps"] = 8,
        expand_v: options.ExpandValues = 2.0,
        norm_eps: Annotated[float, at_least(0), "ε of the norm"] = 1e-6,
    ) -> None:
        super().__init__()
        if dim % (2 * num_heads):
            self._refuse("num_heads", num_heads, f"a divisor of dim/2={dim / 2:g}")
        value = round(expand_v * dim)
        self.dim, self.num_heads, self.norm_eps = dim, num_heads, norm_eps
        self.key_dim, self.head_dim = dim // num_heads, value // num_heads
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.g_proj = nn.Linear(dim, value, bias=False), nn.Linear(dim, value, bias=False)
        self.out_proj = nn.Linear(value, dim, bias=False)
        for project in (self.q_proj, self.k_proj, self.v_proj, self.g_proj):
            nn.init.xavier_uniform_(project.weight, gain=2**-2.5)
        nn.init.xavier_uniform_(self.out_proj.weight, gain=2**-1)

    def run(self, x: Tensor, state: RetNetState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, RetNetState]:
        recurrent, past = self._begin(x, state, cu_seqlens)
        steps, past = positions(past, x.shape[1], cu_seqlens)
        exponents = torch.arange(self.key_dim // 2, device=x.device, dtype=torch.float64)
        angles = 10000.0 ** (-exponents / max(1, self.key_dim // 2 - 1))  # from 1 to 1/10000
        turn = steps[..., None, None] * angles  # in double: a stream may be a million steps long
        q, k = (
            rotate_pairs(project(x).unflatten(-1, (self.num_heads, -1)), turn) for project in (self.q_proj, self.k_proj)
        )
        v = self.v_proj(x).unflatten(-1, (self.num_heads, -1))
        g = torch.log1p(-torch.exp2(-5.0 - torch.arange(self.num_heads, device=x.device, dtype=torch.float64)))
        o, recurrent = linear_attention(q, k, v, g.to(q.dtype), state=recurrent, cu_seqlens=cu_seqlens)
        o = rms_norm(o, None, self.norm_eps).to(x.dtype)
        return self.out_proj(gated(self.g_proj(x), o.flatten(-2))), RetNetState(recurrent, past)
