"""Decaying fast weights: a matrix memory whose rows and columns decay by gates that depend on the input."""

from typing import Annotated, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.parts.query_key_value import MemoryState, QueryKeyValue
from scanl.ops import linear_attention


@registry.register("decaying_fast_weights")
class DecayingFastWeights(QueryKeyValue):
    """Decaying fast weights: each key channel and each value channel has its own decay; there is no normaliser.

    Parameters: q_proj, k_proj, fk_proj (H K, D); v_proj, fv_proj (H V, D); o_proj (D, H V). The released code has only
    the kernels, which get the gates, so these names are ours.
    Initialisation: as in PyTorch; the paper states none.
    """

    id = "S-mao"
    aliases = ("gated_fast_weights",)
    equation = (
        "S_t = (f_k f_v^T) * S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  f_k = sigmoid(W_fk x_t),  f_v = sigmoid(W_fv x_t)"
    )
    source = 'Mao, "Fine-Tuning Pre-trained Transformers into Decaying Fast Weights", arXiv:2210.04243, sec. 3.2'
    op = "linear_attention"
    sample: ClassVar = {"num_heads": 2}
    residual_out = "o_proj"

    def __init__(
        self,
        dim: options.Dim,
        expand_k: options.ExpandKeys = 1.0,
        expand_v: options.ExpandValues = 1.0,
        num_heads: options.FreeHeads = 8,
        bias: Annotated[options.Bias, "biases of the two gates"] = True,
    ) -> None:
        super().__init__()
        self.head_k_dim, self.head_v_dim = (round(expand * dim) // num_heads for expand in (expand_k, expand_v))
        self.dim, self.num_heads = dim, num_heads
        key, value = num_heads * self.head_k_dim, num_heads * self.head_v_dim
        self.memory = (num_heads, self.head_k_dim, self.head_v_dim)
        self._make_projections((key, key, value), None, False)
        self.fk_proj, self.fv_proj = nn.Linear(dim, key, bias=bias), nn.Linear(dim, value, bias=bias)
        self.o_proj = nn.Linear(value, dim, bias=False)

    def run(self, x: Tensor, state: MemoryState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, MemoryState]:
        qkv, recurrent, conv = self._read(x, state, cu_seqlens, (False, False, False))
        decays = (F.logsigmoid(widen(project(x))) for project in (self.fk_proj, self.fv_proj))
        q, k, v, g, gv = (tensor.unflatten(-1, (self.num_heads, -1)) for tensor in (*qkv, *decays))
        o, recurrent = linear_attention(q, k, v, g, gv, state=recurrent, scale=1.0, cu_seqlens=cu_seqlens)
        return self.o_proj(o.to(x.dtype).flatten(-2)), MemoryState(recurrent, conv)
