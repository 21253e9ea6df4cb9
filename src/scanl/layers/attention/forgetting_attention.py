"""Forgetting attention of the Forgetting Transformer: forget gates lower the scores of softmax attention."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.attention.attention import Attention
from scanl.layers.attention.softmax_attention import memory
from scanl.layers.base import widen
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.ops import SegmentMemory, linear_scan
from scanl.ops.offsets import row_ends


@registry.register("forgetting_attention")
class ForgettingAttention(Attention):
    """Forgetting Transformer (FoX): each head forgets by a gate that depends on the input; there are no positions.

    A sequence longer than `max_length` raises an error, as for `attention`. The gates enter as one more channel of
    queries and keys: the sum of ln f since the key, computed in float32 or wider. The shift of keys and values, and the
    norm of each head's output before the gate, in the paper's "Pro" block are not part of this layer.

    Parameters as in flash-linear-attention: q_proj, k_proj, v_proj, o_proj (D, D); f_proj (H, D) with a bias; g_proj
    (D, D) for the gate; q_norm.weight, k_norm.weight (D) for the norms.
    Initialisation: linear weights N(0, 0.02²), the bias 0, so f is near 1/2; norms 1.
    """

    id = "S-fox"
    carried_by = "turns"
    cost = ("T^2", "T")
    aliases = ("FoX", "forgetting_transformer")
    equation = (
        "y_t = W_o sum_{j<=t} softmax_j(q_t . k_j / sqrt(K) + sum_{l=j+1..t} ln f_l) v_j,  f_t = sigmoid(W_f x_t + b)"
    )
    source = (
        'Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate", arXiv:2503.02130, eq. (5) to (8)'
    )
    excused: ClassVar = {
        "bits_are_the_same_in_any_company": "logarithms of the gates are summed from the first step of a call"
    }
    sample: ClassVar = {"num_heads": 3, "max_length": 80}

    state: ClassVar = memory(
        "num_heads, head_dim + 1", "num_heads, head_dim", "keys; their last channel is the sum of ln f since that step"
    )

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.Heads = 8,
        max_length: Annotated[options.MaxLength, "length of the longest sequence in tokens"] = 2048,
        qk_norm: Annotated[bool, "RMSNorm of each head of queries and of keys"] = False,
        output_gate: Annotated[options.OutputGate, "a sigmoid gate on the output"] = False,
        norm_eps: options.NormEps = 1e-5,
    ) -> None:
        super().__init__(dim, num_heads, max_length=max_length, rope_fraction=0.0)
        self.f_proj = nn.Linear(dim, num_heads)
        self.g_proj = nn.Linear(dim, dim, bias=False) if output_gate else None
        self.q_norm, self.k_norm = (
            GatedRMSNorm(dim, norm_eps, groups=num_heads) if qk_norm else None for _ in range(2)
        )
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(self.f_proj.bias)

    def _attend(
        self, x: Tensor, state: SegmentMemory | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, SegmentMemory]:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, None), self.k_norm(k, None)
        q, k, v = (widen(tensor).unflatten(-1, (self.num_heads, self.head_dim)) for tensor in (q, k, v))
        log_f = F.logsigmoid(widen(self.f_proj(x)))
        # Sums from the start of this segment. The scores are divided by sqrt(K + 1), so the queries make up for it.
        since, total = linear_scan(log_f, log_f.new_ones(()), cu_seqlens=cu_seqlens)
        q = F.pad(q / math.sqrt(self.head_dim), (0, 1), value=1.0) * math.sqrt(self.head_dim + 1)
        y, memory = self._over(q, torch.cat([k, -since.unsqueeze(-1)], -1), v, state, cu_seqlens)
        if (ends := row_ends(cu_seqlens)) is not None and len(total) != len(memory.keys):
            total = total[ends.last]
        forgotten = torch.cat([memory.keys[..., :-1], memory.keys[..., -1:] + total[:, None, :, None]], -1)
        y = y.flatten(2).to(x.dtype)
        y = y if self.g_proj is None else self.g_proj(x).sigmoid() * y
        return self.o_proj(y), memory._replace(keys=forgotten)
