"""Softmax attention over a sliding window, as between the recurrences of Griffin."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

from torch import nn

from scanl.layers import options, registry
from scanl.layers.attention.softmax_attention import SoftmaxAttention
from scanl.layers.base import Layer


@registry.register("window_attention")
class WindowAttention(SoftmaxAttention):
    """Local attention: each token attends to the last `window` tokens, itself included. The state has constant size.

    In the released recurrentgemma (Google DeepMind) a window of w means w tokens before the present one; use
    window = w + 1 here for the same. As there, half of each head is rotated; the paper does not mention this.

    Parameters as in RecurrentGemma of transformers: q_proj (H K, D); k_proj, v_proj (num_kv_heads K, D); o_proj
    (D, H K) with bias.
    Initialisation as in recurrentgemma: weights N(0, 1/D), and in a stack of L layers o_proj N(0, 2/(L H K)); biases 0.
    """

    id = "S-griffin"
    cost = ("T W", "W")
    aliases = ("local_attention", "sliding_window_attention", "SWA")
    carried_by = "ops"
    equation = "y_t = W_o sum_{j > t-W} softmax_j(R_t q_t . R_j k_j / sqrt(K)) v_j"
    source = (
        'De et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient Language '
        'Models", arXiv:2402.19427, sec. 2.3'
    )
    sample: ClassVar = {"num_heads": 3, "window": 5}
    residual_by_depth = True

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.FreeHeads = 8,
        num_kv_heads: Annotated[options.KeyValueHeads, "heads of keys and values; 1 is multi-query attention"] = 1,
        head_dim: Annotated[options.HeadDim | None, "K, channels of a head; by default dim / num_heads"] = None,
        window: Annotated[options.Window, "W, tokens that a query sees"] = 1024,
        rope_base: options.RopeBase = 10000.0,
        rope_fraction: options.RopeFraction = 0.5,
        bias: Annotated[options.Bias, "biases in q_proj, k_proj and v_proj"] = False,
    ) -> None:
        super().__init__(dim, num_heads, num_kv_heads, head_dim, window, rope_base, rope_fraction, bias, True)

    def enter_stack(self, index: int, layers: Sequence[Layer]) -> None:
        nn.init.normal_(self.o_proj.weight, std=math.sqrt(2 / (len(layers) * self.o_proj.in_features)))
