"""T2R: linear attention with a learned feature map, into which a softmax transformer is converted."""

import math
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.attention.softmax_attention import SoftmaxAttention
from scanl.layers.base import as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.positions import positions
from scanl.layers.parts.rotary import rotate
from scanl.ops import normalized_linear_attention
from scanl.options import at_least


class T2RState(NamedTuple):
    recurrent: Annotated[Tensor, StateAxes("num_heads, num_features, head_dim + 1", "S, with z as one more column")]
    steps: Annotated[Tensor, StateAxes("1", "steps read", dtype=torch.int64, after=torch.add)]


@registry.register("t2r")
class T2R(SoftmaxAttention):
    """Transformer-to-RNN: the projections of a softmax attention, and a feature map learned for each head.

    `scanl.learning.t2r` converts a model with `attention`, such as a checkpoint of transformers, and learns the maps.
    The map is one for queries and keys. Rotary positions, if the transformer has them, are applied before it.

    Parameters as in `attention`, and phi_weight (H, m, K), phi_bias (H, m).
    Initialisation: weights of the projections N(0, 1/D), their biases 0; phi_weight and phi_bias uniform in ±1/sqrt(K).
    """

    id = "S-t2r"
    aliases = ("transformer_to_rnn",)
    equation = (
        "o_t = sum_{j<=t} (phi(q_t) . phi(k_j)) v_j / max(sum_{j<=t} phi(q_t) . phi(k_j), eps),  "
        "phi(x) = ReLU(W_phi x + b_phi),  q_t = R_t W_q x_t / sqrt(K),  k_j = R_j W_k x_j;  y = W_o o"
    )
    source = 'Kasai et al., "Finetuning Pretrained Transformers into RNNs", arXiv:2103.13076'
    op = "linear_attention"
    state: ClassVar = T2RState
    sample: ClassVar = {"num_heads": 3, "num_features": 5}

    def __init__(
        self,
        dim: options.Dim,
        num_heads: Annotated[options.FreeHeads, "H, heads of the queries"] = 8,
        num_kv_heads: Annotated[
            options.KeyValueHeads | None, "heads of keys and values, each for several of queries; by default num_heads"
        ] = None,
        head_dim: Annotated[options.HeadDim | None, "K, channels of a head; by default dim / num_heads"] = None,
        num_features: Annotated[int, at_least(1), "m, features of a head"] = 64,
        rope_base: options.RopeBase = 10000.0,
        rope_fraction: Annotated[
            options.RopeFraction, "share of a head's channels that turn with the position; 0 in the paper"
        ] = 0.0,
        bias: options.Bias = False,
        eps: Annotated[options.Eps, "ε, the least denominator"] = 1e-2,
    ) -> None:
        heads = num_heads if num_kv_heads is None else num_kv_heads
        super().__init__(dim, num_heads, heads, head_dim, 1, rope_base, rope_fraction, bias, bias)
        self.num_features, self.eps = num_features, eps
        bound = 1 / math.sqrt(self.head_dim)
        self.phi_weight, self.phi_bias = (
            nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
            for shape in ((num_heads, num_features, self.head_dim), (num_heads, num_features))
        )

    def run(  # type: ignore[override]
        self, x: Tensor, state: T2RState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, T2RState]:
        recurrent, past = self._begin(x, state, cu_seqlens)
        places, steps = positions(past, x.shape[1], cu_seqlens)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (widen(project(x)).unflatten(-1, (-1, self.head_dim)) for project in projections)
        q, k = (rotate(tensor, places, self.rotated, self.rope_base) for tensor in (q, k))
        k, v = (tensor.repeat_interleave(self.num_heads // self.num_kv_heads, 2) for tensor in (k, v))
        with as_widened(x):
            q, k = (self._features(tensor) for tensor in (q / math.sqrt(self.head_dim), k))
            o, recurrent = normalized_linear_attention(q, k, v, state=recurrent, eps=self.eps, cu_seqlens=cu_seqlens)
        return self.o_proj(o.flatten(2).to(x.dtype)), T2RState(recurrent, steps)

    def _features(self, x: Tensor) -> Tensor:
        return F.relu(torch.einsum("bthk,hmk->bthm", x, widen(self.phi_weight)) + widen(self.phi_bias))
