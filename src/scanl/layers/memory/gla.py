"""Gated linear attention."""

from typing import Annotated, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.layers.parts.query_key_value import MemoryState, QueryKeyValue
from scanl.ops import linear_attention
from scanl.options import above


@registry.register("gla")
class GLA(QueryKeyValue):
    """Gated linear attention: a low-rank gate gives each key channel its decay.

    Differs from the paper, as the released code does: the norm of each head is RMSNorm, and the output gate has no
    bias.

    Parameters as in flash-linear-attention: q_proj, k_proj (H K, D); v_proj, g_proj (H V, D); gk_proj.0 (rank, D);
    gk_proj.1 (H K, rank) with a bias; with convolutions q_conv1d, k_conv1d, v_conv1d, weight (width, 1, W);
    g_norm_swish_gate.weight (V), or g_norm.weight if there is no output gate; o_proj (D, H V).
    Initialisation: linear weights Xavier uniform of gain 2^(-2.5), biases 0, the convolutions as in PyTorch.
    """

    id = "S-gla"
    aliases = ("gated_linear_attention", "flash_linear_attention")
    equation = (
        "S_t = Diag(alpha_t) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t / sqrt(K),  "
        "alpha_t = sigmoid(W_2 W_1 x_t + b)^(1/tau);  y = W_o (RMSNorm(o) * SiLU(W_g x))"
    )
    source = (
        'Yang, Wang, Shen, Panda and Kim, "Gated Linear Attention Transformers with Hardware-Efficient Training", '
        "arXiv:2312.06635, eq. (3) and sec. 4.4"
    )
    op = "linear_attention"
    sample: ClassVar = {"num_heads": 2, "gate_rank": 3}
    residual_out = "o_proj"

    def __init__(
        self,
        dim: options.Dim,
        expand_k: options.ExpandKeys = 0.5,
        expand_v: options.ExpandValues = 1.0,
        num_heads: options.FreeHeads = 4,
        conv_size: options.ConvSizeOrNone = None,
        conv_bias: options.ConvBias = False,
        output_gate: Annotated[options.OutputGate, "a SiLU gate after the norm"] = True,
        gate_logit_normalizer: Annotated[float, above(0), "τ, the temperature of the decay"] = 16,
        gate_rank: Annotated[options.Rank, "rank of the weight of the decay's gate"] = 16,
        norm_eps: options.NormEps = 1e-5,
    ) -> None:
        super().__init__()
        self.head_k_dim, self.head_v_dim = (round(expand * dim) // num_heads for expand in (expand_k, expand_v))
        self.dim, self.num_heads, self.gate_logit_normalizer = dim, num_heads, gate_logit_normalizer
        key, value = num_heads * self.head_k_dim, num_heads * self.head_v_dim
        self.memory = (num_heads, self.head_k_dim, self.head_v_dim)
        self._make_projections((key, key, value), conv_size, conv_bias)
        self.g_proj = nn.Linear(dim, value, bias=False) if output_gate else None
        self.gk_proj = nn.Sequential(nn.Linear(dim, gate_rank, bias=False), nn.Linear(gate_rank, key))
        norm = GatedRMSNorm(self.head_v_dim, norm_eps)
        self.g_norm_swish_gate, self.g_norm = (norm, None) if output_gate else (None, norm)
        self.o_proj = nn.Linear(value, dim, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, gain=2**-2.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def run(self, x: Tensor, state: MemoryState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, MemoryState]:
        convolved = self.q_conv1d is not None
        qkv, recurrent, conv = self._read(x, state, cu_seqlens, (convolved, convolved, convolved))
        g = F.logsigmoid(widen(self.gk_proj(x))) / self.gate_logit_normalizer
        q, k, v, g = (tensor.unflatten(-1, (self.num_heads, -1)) for tensor in (*qkv, g))
        o, recurrent = linear_attention(q, k, v, g, state=recurrent, cu_seqlens=cu_seqlens)
        norm = self.g_norm_swish_gate or self.g_norm
        assert norm is not None
        y = norm(o, None if self.g_proj is None else self.g_proj(x).view_as(o))
        return self.o_proj(y.flatten(-2)), MemoryState(recurrent, conv)
