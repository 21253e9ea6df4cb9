r"""Gated linear attention.

.. math:: S_t = \mathrm{Diag}(\alpha_t) S_{t-1} + k_t v_t^\top, \quad o_t = S_t^\top q_t / \sqrt{K}, \quad
          \alpha_t = \sigma(W_2 W_1 x_t + b)^{1/\tau}
"""

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.base import register, widen
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.layers.parts.query_key_value import MemoryState, QueryKeyValue, whole_heads
from scanl.ops import linear_attention


@register("gla")
class GLA(QueryKeyValue):
    """Gated linear attention: a low-rank gate gives each key channel its decay.

    Differs from the paper, as the released code does: the norm of each head is RMSNorm, and the output gate has no
    bias.

    Args:
        dim: D, model width.
        expand_k, expand_v: all heads together have expand_k * D channels of keys and expand_v * D of values.
        num_heads: H.
        use_short_conv: convolutions and SiLU over q, k and v.
        conv_size, conv_bias: W, their window, and their bias.
        use_output_gate: a SiLU gate after the norm.
        gate_logit_normalizer: τ, the temperature of the decay.
        gate_low_rank_dim: rank of the gate's weight.
        norm_eps: ε of the norm.

    Parameters as in flash-linear-attention: q_proj, k_proj (H K, D); v_proj, g_proj (H V, D); gk_proj.0 (rank, D);
    gk_proj.1 (H K, rank) with a bias; with convolutions q_conv1d, k_conv1d, v_conv1d, weight (width, 1, W);
    g_norm_swish_gate.weight (V), or g_norm.weight if there is no output gate; o_proj (D, H V).
    Initialisation: linear weights Xavier uniform of gain 2^(-2.5), biases 0, the convolutions as in PyTorch and
    in fla's layers. (fla's models draw convolutions from N(0, 0.02²).)
    State: S (B, H, K, V), zeros, and the last inputs of the convolutions.
    """

    id = "S-gla"
    aliases = ("gated_linear_attention",)
    equation = (
        "S_t = Diag(alpha_t) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t / sqrt(K),  "
        "alpha_t = sigmoid(W_2 W_1 x_t + b)^(1/tau);  y = W_o (RMSNorm(o) * SiLU(W_g x))"
    )
    source = (
        'Yang, Wang, Shen, Panda and Kim, "Gated Linear Attention Transformers with Hardware-Efficient Training", '
        "arXiv:2312.06635, eq. (3) and sec. 4.4"
    )
    op = "linear_attention"
    sample: ClassVar = {"num_heads": 2, "gate_low_rank_dim": 3}
    residual_out = "o_proj"

    def __init__(
        self,
        dim: int,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_logit_normalizer: float = 16,
        gate_low_rank_dim: int = 16,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.head_k_dim = whole_heads("gla", "expand_k", expand_k, dim, num_heads)
        self.head_v_dim = whole_heads("gla", "expand_v", expand_v, dim, num_heads)
        if min(conv_size, gate_low_rank_dim) < 1 or not gate_logit_normalizer > 0:
            found = f"gate_low_rank_dim is {gate_low_rank_dim}, gate_logit_normalizer is {gate_logit_normalizer}"
            raise ConfigError(f"gla: {found} and conv_size is {conv_size}, expected positive numbers")
        self.dim, self.num_heads, self.gate_logit_normalizer = dim, num_heads, gate_logit_normalizer
        key, value = num_heads * self.head_k_dim, num_heads * self.head_v_dim
        self.memory = (num_heads, self.head_k_dim, self.head_v_dim)
        self._make_projections((key, key, value), conv_size if use_short_conv else None, conv_bias)
        self.g_proj = nn.Linear(dim, value, bias=False) if use_output_gate else None
        self.gk_proj = nn.Sequential(nn.Linear(dim, gate_low_rank_dim, bias=False), nn.Linear(gate_low_rank_dim, key))
        norm = GatedRMSNorm(self.head_v_dim, norm_eps)
        self.g_norm_swish_gate, self.g_norm = (norm, None) if use_output_gate else (None, norm)
        self.o_proj = nn.Linear(value, dim, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, gain=2**-2.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self, x: Tensor, state: MemoryState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, MemoryState]:
        convolved = self.q_conv1d is not None
        qkv, recurrent, conv = self._read(x, state, cu_seqlens, (convolved, convolved, convolved))
        g = F.logsigmoid(widen(self.gk_proj(x))) / self.gate_logit_normalizer
        q, k, v, g = (part.unflatten(-1, (self.num_heads, -1)) for part in (*qkv, g))
        o, recurrent = linear_attention(q, k, v, g, state=recurrent, cu_seqlens=cu_seqlens)
        norm = self.g_norm_swish_gate or self.g_norm
        assert norm is not None
        y = norm(o, None if self.g_proj is None else self.g_proj(x).view_as(o))
        return self.o_proj(y.flatten(-2)), MemoryState(recurrent, conv)
