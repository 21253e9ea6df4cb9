"""mLSTM as in xLSTM-7B: the matrix memory of `mlstm` in a layer without a convolution, with capped gates."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer
from scanl.layers.initial_state import StateAxes
from scanl.layers.memory._exponential_gates import remember
from scanl.layers.parts.norm import HeadNorm
from scanl.layers.parts.soft_cap import soft_cap
from scanl.options import above


class MLSTMLargeState(NamedTuple):
    memory: Annotated[
        Tensor, StateAxes("num_heads, head_k_dim, head_v_dim + 1", "e^-m C, with e^-m n in the last column")
    ]
    m: Annotated[Tensor, StateAxes("num_heads", "the stabilizer")]


@registry.register("mlstm_large")
class MLSTMLarge(Layer):
    """mLSTM as in xLSTM-7B: capped gates that read x, a gated output, no up-projection and no convolution.

    The gates' preactivations are capped: c tanh(x / c). A stabilizer keeps the gates from overflow, as in `MLSTM`.

    Parameters as in transformers' xLSTMLayer: q, k (H K, D); v, ogate_preact (H V, D); igate_preact, fgate_preact
    (H, D) with biases; multihead_norm.weight (H V); out_proj (D, H V).
    Initialisation as in that code: q, k, v N(0, 2/(5D)); the weights of all three gates 0, the biases -10 for i and
    linspace(3, 6) over the heads for f; norm 1; in a stack of L layers out_proj N(0, (2/L)²/D), and alone L = 1.
    """

    id = "S-mlstm"
    kind: ClassVar = {"gated": True}
    equation = (
        "C_t = f_t C_{t-1} + i_t k_t v_t^T,  n_t = f_t n_{t-1} + i_t k_t,  "
        "y_t = W_o (sigmoid(o_t) * norm(C_t^T q_t / max(|n_t . q_t|, 1))),  i_t = exp(cap(w_i . x)),  "
        "f_t = sigmoid(cap(w_f . x))"
    )
    source = 'Beck et al., "xLSTM 7B: A Recurrent LLM for Fast and Efficient Inference", arXiv:2503.13427, section 3'
    op = "linear_attention"
    carried_by = "turns"
    state: ClassVar = MLSTMLargeState
    sample: ClassVar = {"num_heads": 2}
    residual_out = "out_proj"
    residual_by_depth = True

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.FreeHeads = 8,
        expand_k: options.ExpandKeys = 0.5,
        expand_v: options.ExpandValues = 1.0,
        gate_soft_cap: Annotated[float, above(0), "c, bound of the gates' preactivations"] = 15.0,
        norm_eps: options.NormEps = 1e-6,
        eps: options.Eps = 1e-6,
    ) -> None:
        super().__init__()
        self.dim, self.num_heads, self.gate_soft_cap, self.eps = dim, num_heads, gate_soft_cap, eps
        keys, values = round(expand_k * dim), round(expand_v * dim)
        self.head_k_dim, self.head_v_dim = keys // num_heads, values // num_heads
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

    def run(
        self, x: Tensor, state: MLSTMLargeState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, MLSTMLargeState]:
        memory, m = self._begin(x, state, cu_seqlens)
        q, k, v = (project(x).unflatten(-1, (self.num_heads, -1)) for project in (self.q, self.k, self.v))
        i, f = (soft_cap(gate(x), self.gate_soft_cap) for gate in (self.igate_preact, self.fgate_preact))
        h, memory, m = remember(q, k, v, i, F.logsigmoid(f), memory, m, cu_seqlens, self.eps)
        h = self.multihead_norm(h).to(x.dtype)
        return self.out_proj(self.ogate_preact(x).sigmoid() * h), MLSTMLargeState(memory, m)
