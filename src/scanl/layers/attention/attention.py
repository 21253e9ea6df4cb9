"""Causal softmax attention over all previous tokens, up to a maximal length."""

from typing import Annotated, ClassVar

from torch import Tensor

from scanl.layers import options, registry
from scanl.layers.attention.softmax_attention import SoftmaxAttention
from scanl.layers.parts.positions import check_length
from scanl.ops import SegmentMemory


@registry.register("attention")
class Attention(SoftmaxAttention):
    """Self-attention of a transformer, with rotary positions and a cache for `max_length` tokens.

    A longer sequence raises an error. In a compiled graph with a state the length is not known; there a token attends
    to the last `max_length` tokens instead.

    Parameters as in Llama in transformers: q_proj (H K, D); k_proj, v_proj (num_kv_heads K, D); o_proj (D, H K).
    Initialisation: weights N(0, 1/D), biases 0.
    """

    id = "S-attn"
    cost = ("T^2", "T")
    aliases = ("softmax_attention", "multi_head_attention", "MHA", "self_attention", "SA", "vanilla_attention")
    carried_by = "ops"
    equation = "y_t = W_o sum_{j <= t} softmax_j(R_t q_t . R_j k_j / sqrt(K)) v_j"
    source = (
        'Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, eq. (1); positions: Su et al., '
        '"RoFormer", arXiv:2104.09864'
    )
    sample: ClassVar = {"num_heads": 3, "max_length": 80}

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.FreeHeads = 8,
        num_kv_heads: Annotated[options.KeyValueHeads | None, "heads of keys and values; by default num_heads"] = None,
        head_dim: Annotated[options.HeadDim | None, "K, channels of a head; by default dim / num_heads"] = None,
        max_length: Annotated[options.MaxLength, "length of the longest sequence in tokens"] = 2048,
        rope_base: options.RopeBase = 10000.0,
        rope_fraction: options.RopeFraction = 1.0,
        bias: options.Bias = False,
    ) -> None:
        heads = num_heads if num_kv_heads is None else num_kv_heads
        super().__init__(dim, num_heads, heads, head_dim, max_length, rope_base, rope_fraction, bias, bias)
        self.longest = max_length

    def run(self, x: Tensor, state: SegmentMemory | None, cu_seqlens: Tensor | None) -> tuple[Tensor, SegmentMemory]:
        check_length(self._who(), x, None if state is None else state.position, cu_seqlens, self.longest)
        return self._attend(x, state, cu_seqlens)
