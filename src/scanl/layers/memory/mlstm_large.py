r"""mLSTM as in xLSTM-7B: the matrix memory of `mlstm` in a layer without a convolution, with capped gates.

.. math::
   C_t = f_t C_{t-1} + i_t k_t v_t^\top, \quad n_t = f_t n_{t-1} + i_t k_t, \quad
   h_t = \frac{C_t^\top q_t}{\max(|n_t^\top q_t|, 1)}
"""

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.base import Layer, register, soft_cap
from scanl.layers.memory.mlstm import remember
from scanl.layers.parts.norm import HeadNorm
from scanl.layers.state import Device, DType


class MLSTMLargeState(NamedTuple):
    """State of `MLSTMLarge`.

    memory: e^-m C, with e^-m n in the last column, (B, H, K, V+1).   m: the stabiliser (B, H).
    """

    memory: Tensor
    m: Tensor


@register("mlstm_large")
class MLSTMLarge(Layer):
    """mLSTM as in xLSTM-7B: capped gates that read x, a gated output, no up-projection and no convolution.

    The gates' preactivations are capped: c tanh(x / c). A stabiliser keeps the gates from overflow, as in `MLSTM`.

    Args:
        dim: D, model width.
        num_heads: H.
        qk_dim_factor, v_dim_factor: all heads together have int(qk_dim_factor * D) channels of queries and of keys,
            and int(v_dim_factor * D) of values.
        gate_soft_cap: c.
        norm_eps: epsilon of the norm of each head.
        eps: added to the denominator.

    Parameters as in transformers' xLSTMLayer: q, k (H K, D); v, ogate_preact (H V, D); igate_preact, fgate_preact
    (H, D) with biases; multihead_norm.weight (H V); out_proj (D, H V).
    Initialisation as there: q, k, v N(0, 2/(5D)); the weights of all three gates 0, the biases -10 for i and
    linspace(3, 6) over the heads for f; norm 1; in a stack of L layers out_proj N(0, (2/L)²/D), and alone L = 1.
    State: MLSTMLargeState, zeros.
    """

    id = "S-mlstm"
    equation = (
        "C_t = f_t C_{t-1} + i_t k_t v_t^T,  n_t = f_t n_{t-1} + i_t k_t,  "
        "y_t = W_o (sigmoid(o_t) * norm(C_t^T q_t / max(|n_t . q_t|, 1))),  i_t = exp(cap(w_i . x)),  "
        "f_t = sigmoid(cap(w_f . x))"
    )
    source = 'Beck et al., "xLSTM 7B: A Recurrent LLM for Fast and Efficient Inference", arXiv:2503.13427, section 3'
    op = "linear_attention"
    sample: ClassVar = {"num_heads": 2}
    residual_out = "out_proj"
    residual_by_depth = True

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qk_dim_factor: float = 0.5,
        v_dim_factor: float = 1.0,
        gate_soft_cap: float = 15.0,
        norm_eps: float = 1e-6,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        keys, values = int(dim * qk_dim_factor), int(dim * v_dim_factor)
        for option, factor, width in (("qk_dim_factor", qk_dim_factor, keys), ("v_dim_factor", v_dim_factor, values)):
            if num_heads < 1 or width < 1 or width % num_heads:
                raise ConfigError(
                    f"mlstm_large: num_heads is {num_heads}, expected a divisor of {width} channels because of "
                    f"{option}={factor}"
                )
        if not gate_soft_cap > 0:
            raise ConfigError(f"mlstm_large: gate_soft_cap is {gate_soft_cap}, expected more than 0")
        self.dim, self.num_heads = dim, num_heads
        self.qk_dim_factor, self.v_dim_factor = qk_dim_factor, v_dim_factor
        self.gate_soft_cap, self.eps = gate_soft_cap, eps
        self.q, self.k = nn.Linear(dim, keys, bias=False), nn.Linear(dim, keys, bias=False)
        self.v, self.ogate_preact = nn.Linear(dim, values, bias=False), nn.Linear(dim, values, bias=False)
        self.igate_preact, self.fgate_preact = nn.Linear(dim, num_heads), nn.Linear(dim, num_heads)
        self.multihead_norm = HeadNorm(values, norm_eps, zero_centered=False)
        self.out_proj = nn.Linear(values, dim, bias=False)
        for linear in (self.q, self.k, self.v):
            nn.init.normal_(linear.weight, std=math.sqrt(2 / (5 * dim)))
        for gate in (self.igate_preact, self.fgate_preact, self.ogate_preact):
            nn.init.zeros_(gate.weight)
        nn.init.constant_(self.igate_preact.bias, -10)
        with torch.no_grad():
            self.fgate_preact.bias.copy_(torch.linspace(3, 6, num_heads))
        self.enter_stack(0, [self])

    def enter_stack(self, index: int, layers: Sequence[Layer]) -> None:
        nn.init.normal_(self.out_proj.weight, std=2 / len(layers) / math.sqrt(self.dim))

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> MLSTMLargeState:
        heads, keys, values = self.num_heads, int(self.dim * self.qk_dim_factor), int(self.dim * self.v_dim_factor)
        shape = (batch_size, heads, keys // heads, values // heads + 1)
        return MLSTMLargeState(
            self._zeros(*shape, device=device, dtype=dtype, at_least=torch.float32),
            self._zeros(batch_size, heads, device=device, dtype=dtype, at_least=torch.float32),
        )

    def forward(
        self, x: Tensor, state: MLSTMLargeState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, MLSTMLargeState]:
        memory, m = self._begin(x, state, cu_seqlens)
        q, k, v = (part(x).unflatten(-1, (self.num_heads, -1)) for part in (self.q, self.k, self.v))
        i, f = (soft_cap(gate(x), self.gate_soft_cap) for gate in (self.igate_preact, self.fgate_preact))
        h, memory, m = remember(q, k, v, i, F.logsigmoid(f), memory, m, cu_seqlens, self.eps)
        h = self.multihead_norm(h).to(x.dtype)
        return self.out_proj(self.ogate_preact(x).sigmoid() * h), MLSTMLargeState(memory, m)
