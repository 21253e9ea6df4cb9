r"""T2R: linear attention with a learned feature map, into which a softmax transformer is converted.

.. math:: \phi(x) = \mathrm{ReLU}(W_\phi x + b_\phi), \quad
          o_t = \frac{\sum_{j \le t} \phi(q_t / \sqrt K) \cdot \phi(k_j)\, v_j}
                     {\max(\sum_{j \le t} \phi(q_t / \sqrt K) \cdot \phi(k_j),\, \epsilon)}
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.attention.softmax_attention import SoftmaxAttention
from scanl.layers.base import as_widened, register, widen
from scanl.layers.memory.linear_attention import LinearAttentionState
from scanl.layers.parts.positions import positions
from scanl.layers.parts.rotary import rotate
from scanl.layers.state import Device, DType
from scanl.ops import normalized_linear_attention


@register("t2r")
class T2R(SoftmaxAttention):
    """Transformer-to-RNN: the projections of a softmax attention, and a feature map learned for each head.

    `scanl.learning.t2r` converts a model with `attention`, such as a checkpoint of transformers, and learns the maps.
    The map is one for queries and keys. Rotary positions, if the transformer has them, are applied before it.

    Args:
        dim: D, model width.
        num_heads: H, heads of the queries.
        num_kv_heads: heads of keys and values, each used by H / num_kv_heads heads of queries; by default H.
        head_dim: K; by default D / H.
        num_features: m, features of a head.
        rope_base: b of the rotary angles.
        rope_fraction: fraction of each head that is rotated; the paper's transformers have none.
        bias: biases in the projections.
        eps: ε, the least denominator.

    Parameters as of `attention`, and phi_weight (H, m, K), phi_bias (H, m).
    Initialisation: weights of the projections N(0, 1/D), their biases 0; phi_weight and phi_bias uniform in ±1/sqrt(K).
    State: S with z as one more column (B, H, m, K + 1), zeros, and a count of steps (B, 1).
    """

    id = "S-t2r"
    equation = (
        "o_t = sum_{j<=t} (phi(q_t) . phi(k_j)) v_j / max(sum_{j<=t} phi(q_t) . phi(k_j), eps),  "
        "phi(x) = ReLU(W_phi x + b_phi),  q_t = R_t W_q x_t / sqrt(K),  k_j = R_j W_k x_j;  y = W_o o"
    )
    source = 'Kasai et al., "Finetuning Pretrained Transformers into RNNs", arXiv:2103.13076'
    op = "linear_attention"
    sample: ClassVar = {"num_heads": 3, "num_features": 5}

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        num_features: int = 64,
        rope_base: float = 10000.0,
        rope_fraction: float = 0.0,
        bias: bool = False,
        eps: float = 1e-2,
    ) -> None:
        if num_features < 1:
            raise ConfigError(f"{self._who()}: num_features is {num_features}, expected at least 1")
        heads = num_heads if num_kv_heads is None else num_kv_heads
        super().__init__(dim, num_heads, heads, head_dim, 1, rope_base, rope_fraction, bias, bias)
        self.num_features, self.eps = num_features, eps
        bound = 1 / math.sqrt(self.head_dim)
        self.phi_weight, self.phi_bias = (
            nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
            for shape in ((num_heads, num_features, self.head_dim), (num_heads, num_features))
        )

    def init_state(  # type: ignore[override]
        self, batch_size: int, *, device: Device = None, dtype: DType = None
    ) -> LinearAttentionState:
        shape = (batch_size, self.num_heads, self.num_features, self.head_dim + 1)
        recurrent = self._zeros(*shape, device=device, dtype=dtype, at_least=torch.float32)
        return LinearAttentionState(recurrent, torch.zeros(batch_size, 1, dtype=torch.int64, device=recurrent.device))

    def forward(  # type: ignore[override]
        self, x: Tensor, state: LinearAttentionState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, LinearAttentionState]:
        state = self._begin(x, state, cu_seqlens)
        assert state.steps is not None
        places, steps = positions(state.steps, x.shape[1], cu_seqlens)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (widen(project(x)).unflatten(-1, (-1, self.head_dim)) for project in projections)
        q, k = (rotate(each, places, self.rotated, self.rope_base) for each in (q, k))
        k, v = (each.repeat_interleave(self.num_heads // self.num_kv_heads, 2) for each in (k, v))
        with as_widened(x):
            q, k = (self._features(each) for each in (q / math.sqrt(self.head_dim), k))
            o, recurrent = normalized_linear_attention(
                q, k, v, state=state.recurrent, eps=self.eps, cu_seqlens=cu_seqlens
            )
        return self.o_proj(o.flatten(2).to(x.dtype)), LinearAttentionState(recurrent, steps)

    def _features(self, x: Tensor) -> Tensor:
        return F.relu(torch.einsum("bthk,hmk->bthm", x, widen(self.phi_weight)) + widen(self.phi_bias))
