r"""DiagAttention, the block of TransNormer's lower layers: attention within blocks of tokens that do not overlap.

.. math:: o_t = \sum_{j = W \lfloor t/W \rfloor}^{t} f(q_t^\top k_j / \sqrt K)\, v_j, \quad f = \mathrm{ReLU}
          \text{ (T1) or softmax (T2)}
"""

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.layers.base import Layer, preset, register, widen
from scanl.layers.packing import sequence_index
from scanl.layers.parts.householder_rotary import HouseholderRotary
from scanl.layers.parts.norm import simple_rms_norm
from scanl.layers.parts.positions import positions
from scanl.layers.state import Device, DType
from scanl.ops._frame.nonfinite import faulty, replaced, since


class DiagAttentionState(NamedTuple):
    """State of `DiagAttention`: the present block, zeros where it has no tokens yet.

    keys, values: (B, W, H, K).   steps: number of steps read (B, 1), int64.
    """

    keys: Tensor
    values: Tensor
    steps: Tensor


@register("diag_attention")
class DiagAttention(Layer):
    """DiagAttention of TransNormer: a token attends to those before it in its block; the next block starts anew.

    The defaults are TransNormer's T1, without a softmax; `diag_attention_t2` is T2. The authors have it in the lower
    half of the layers, and `norm_attention` in the higher half.

    Args:
        dim: D, model width; H queries, keys and values of K = D / H channels.
        num_heads: H.
        block_size: W, tokens of a block.
        softmax: softmax of the scores, and no norm; otherwise their ReLU, and a norm over all heads.

    Parameters as in the released code: q_proj, k_proj, v_proj, out_proj (D, D) with biases; urpe.theta (1, 1, K // 2)
    and the buffer urpe.v (K), of the positions, which begin at 0 in each block. The norm has none.
    Initialisation as there: Xavier uniform; the biases of q, k and v as in PyTorch, that of out_proj 0;
    theta_i = 10000^(-2i/K).
    State: keys and values (B, W, H, K) of the present block, zeros, and the count of steps.
    """

    id = "S-transnormer"
    equation = "y_t = W_o SRMSNorm(sum_j ReLU(q_t . k_j / sqrt(K)) v_j),  W floor(t / W) <= j <= t"
    source = 'Qin et al., "The Devil in Linear Transformer", arXiv:2210.10340, sec. 4.2'
    op = None
    sample: ClassVar = {"num_heads": 3, "block_size": 3}
    residual_out = "out_proj"

    def __init__(self, dim: int, num_heads: int = 8, block_size: int = 64, softmax: bool = False) -> None:
        super().__init__()
        if num_heads < 1 or dim < 1 or dim % num_heads:
            raise ConfigError(f"{self._who()}: num_heads is {num_heads}, expected a divisor of dim={dim}")
        if block_size < 1:
            raise ConfigError(f"{self._who()}: block_size is {block_size}, expected at least 1")
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.block_size, self.softmax = block_size, softmax
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))
        for project in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(project.weight)
        nn.init.zeros_(self.out_proj.bias)
        self.urpe = HouseholderRotary(self.head_dim)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> DiagAttentionState:
        shape = (batch_size, self.block_size, self.num_heads, self.head_dim)
        keys, values = (self._zeros(*shape, device=device, dtype=dtype, at_least=torch.float32) for _ in range(2))
        return DiagAttentionState(keys, values, self._zeros(batch_size, 1, device=device, dtype=torch.int64))

    def forward(
        self, x: Tensor, state: DiagAttentionState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, DiagAttentionState]:
        self._check(x, state, cu_seqlens)
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        keys, values, read = self.init_state(rows) if state is None else state
        W, filled = self.block_size, read[:, 0] % self.block_size
        steps, after = positions(read, x.shape[1], cu_seqlens)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (widen(project(x)).unflatten(-1, (self.num_heads, -1)) for project in projections)
        q, k = (self.urpe(part, steps % W) for part in (q / math.sqrt(self.head_dim), k))
        # All rows, or packed sequences, get whole blocks of slots, one row after another. The first slots of a row are
        # those of its present block. The last block is the next state, so it may be empty.
        lengths = (after - read)[:, 0]
        blocks = (filled + lengths) // W + 1
        first = W * (blocks.cumsum(0) - blocks)
        count = (x.shape[0] * x.shape[1] + rows * (W - 1)) // W + rows  # at least the sum of `blocks`
        if cu_seqlens is None:
            owner = torch.arange(rows, device=x.device)[:, None]
        else:
            owner = sequence_index(cu_seqlens, x.shape[1])[None]
        slots = (first + filled)[owner] + steps - read[:, 0][owner]
        present, last = ((first + offset)[:, None] + torch.arange(W, device=x.device) for offset in (0, W * blocks - W))

        def placed(new: Tensor, kept: Tensor | None) -> Tensor:
            empty = new.new_zeros(count * W, *new.shape[2:])
            empty = empty if kept is None else empty.index_put((present,), kept.to(new.dtype))
            return empty.index_put((slots,), new)

        k, v = placed(k, keys), placed(v, values)
        y = self._attend(
            placed(q, None).unflatten(0, (count, W)), k.unflatten(0, (count, W)), v.unflatten(0, (count, W))
        )
        y = y.flatten(0, 1)[slots].flatten(-2)
        y = y if self.softmax else simple_rms_norm(y)
        return self.out_proj(y.to(x.dtype)), DiagAttentionState(k[last], v[last], after)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend within blocks (N, W, H, K), causally. A number that is not finite reaches no earlier token."""
        fault = (faulty(k) | faulty(v)).flatten(2).any(2)
        scores = torch.einsum("nihk,njhk->nhij", q, replaced(k))
        causal = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril()
        if self.softmax:
            weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        else:
            weights = scores.relu().masked_fill(~causal, 0)
        o = torch.einsum("nhij,njhk->nihk", weights, replaced(v))
        return o * since(fault, 1)[..., None, None].to(o.dtype)


@preset("diag_attention_t2", softmax=True)
class DiagAttentionT2(DiagAttention):
    """DiagAttention of TransNormer T2, with a softmax."""

    id = "S-transnormer"
    equation = "y_t = W_o sum_j softmax_j(q_t . k_j / sqrt(K)) v_j,  W floor(t / W) <= j <= t"
    source = DiagAttention.source
    own_path = True
