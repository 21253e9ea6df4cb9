"""DiagAttention, the block of TransNormer's lower layers: attention within blocks of tokens that do not overlap."""

import math
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.blocks import Blocks
from scanl.layers.parts.householder_rotary import HouseholderRotary
from scanl.layers.parts.norm import simple_rms_norm
from scanl.ops._frame.nonfinite import replaced


class DiagAttentionState(NamedTuple):
    """State of `DiagAttention`: the present block, zeros where it has no tokens yet."""

    keys: Annotated[Tensor, StateAxes("window, num_heads, head_dim")]
    values: Annotated[Tensor, StateAxes("window, num_heads, head_dim")]
    steps: Annotated[Tensor, StateAxes("1", "steps read", dtype=torch.int64, after=torch.add)]


@registry.register("diag_attention")
class DiagAttention(Layer):
    """DiagAttention of TransNormer: a token attends to itself and to the earlier tokens of its block.

    The defaults are TransNormer's T1, without a softmax; `diag_attention_t2` is T2. The authors use this layer in the
    lower half of the model, and `norm_attention` in the higher half.

    Parameters as in the released code: q_proj, k_proj, v_proj, out_proj (D, D) with biases; urpe.theta (1, 1, K // 2)
    and the buffer urpe.v (K), of the positions, which begin at 0 in each block. The norm has none.
    Initialisation as in that code: Xavier uniform; the biases of q, k and v as in PyTorch, that of out_proj 0; theta_i
    = 10000^(-2i/K).
    """

    id = "S-transnormer"
    cost = ("T W", "W")
    equation = "y_t = W_o SRMSNorm(sum_j ReLU(q_t . k_j / sqrt(K)) v_j),  W floor(t / W) <= j <= t"
    source = 'Qin et al., "The Devil in Linear Transformer", arXiv:2210.10340, sec. 4.2'
    op = None
    sample: ClassVar = {"num_heads": 3, "window": 3}
    state: ClassVar = DiagAttentionState
    residual_out = "out_proj"

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.Heads = 8,
        window: Annotated[options.Window, "W, tokens of a block"] = 64,
        softmax: Annotated[
            bool, "softmax of the scores, and no norm; otherwise their ReLU, and a norm over all heads"
        ] = False,
    ) -> None:
        super().__init__()
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.window, self.softmax = window, softmax
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))
        for project in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(project.weight)
        nn.init.zeros_(self.out_proj.bias)
        self.urpe = HouseholderRotary(self.head_dim)

    def run(
        self, x: Tensor, state: DiagAttentionState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, DiagAttentionState]:
        keys, values, past = state or (None, None, None)
        blocks = Blocks(x, past, self.window, cu_seqlens)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (widen(project(x)).unflatten(-1, (self.num_heads, -1)) for project in projections)
        q, k = (self.urpe(tensor, blocks.steps) for tensor in (q / math.sqrt(self.head_dim), k))
        k, v = blocks.keys(k, keys), blocks.keys(v, values)
        y = blocks.taken(self._attend(blocks.queries(q), k, v, blocks)).flatten(-2)
        y = y if self.softmax else simple_rms_norm(y)
        return self.out_proj(y.to(x.dtype)), DiagAttentionState(blocks.kept(k), blocks.kept(v), blocks.after)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks) -> Tensor:
        """Attend within blocks (N, W, H, K), causally. A number that is not finite reaches no earlier token."""
        scores = torch.einsum("nihk,njhk->nhij", q, replaced(k))
        hidden = ~blocks.seen(k)[:, None]
        if self.softmax:
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        else:
            weights = scores.relu().masked_fill(hidden, 0)
        o = torch.einsum("nhij,njhk->nihk", weights, replaced(v))
        return o * blocks.spoilt(k, v)[..., None].to(o.dtype)


@registry.preset("diag_attention_t2", softmax=True)
class DiagAttentionT2(DiagAttention):
    """DiagAttention of TransNormer T2, with a softmax."""

    id = "S-transnormer"
    equation = "y_t = W_o sum_j softmax_j(q_t . k_j / sqrt(K)) v_j,  W floor(t / W) <= j <= t"
    source = DiagAttention.source
    own_path = True
