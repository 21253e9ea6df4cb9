r"""Moving-average equipped gated attention: attention whose queries and keys read a moving average.

.. math:: m_t = \mathrm{EMA}(x)_t, \quad [u; z; r; h'] = W m_t + b, \quad q, k = \gamma_{1,2} \odot \mathrm{SiLU}(z) +
          \beta_{1,2}, \quad y_t = \sigma(u) \odot \left(\mathrm{SiLU}\big(h' + U (\mathrm{SiLU}(r) \odot
          \textstyle\sum_j a_{tj} \mathrm{SiLU}(V x_j))\big) - x_t\right)
"""

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError, ShapeError, nearest
from scanl.layers.base import Layer, register, widen
from scanl.layers.module import Module
from scanl.layers.parts.blocks import Blocks
from scanl.layers.parts.positions import check_length
from scanl.layers.parts.rotary import rotate
from scanl.layers.ssm._base import BY_CONVOLUTION
from scanl.layers.ssm.mega_ema import MegaEMA
from scanl.layers.state import Device, DType
from scanl.ops._frame.nonfinite import replaced

FUNCTIONS = ("softmax", "relu2", "laplace")
BIASES = ("simple", "rotary")


class SimpleBias(Module):
    """b_ij = rel_pos_bias[M - 1 + j - i], one number for each distance below M. Initialisation: N(0, 0.02²)."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.rel_pos_bias = nn.Parameter(0.02 * torch.randn(2 * reach - 1))

    def forward(self, queries: Tensor, keys: int) -> Tensor:
        """Return (N, Q, S) for the positions of queries (N, Q) and keys at 0 to S - 1."""
        return widen(self.rel_pos_bias)[self.reach - 1 + torch.arange(keys, device=queries.device) - queries[..., None]]


class RotaryBias(Module):
    """b_ij = <R_i alpha, R_j beta>, with R the rotation of positions. alpha, beta (1, Z), initially N(0, 0.02²)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha, self.beta = (nn.Parameter(0.02 * torch.randn(1, width)) for _ in range(2))

    def forward(self, queries: Tensor, keys: int) -> Tensor:
        """Return (N, Q, S) for the positions of queries (N, Q) and keys at 0 to S - 1."""
        there = torch.arange(keys, device=queries.device)[None]
        at, of = (
            rotate(widen(part).expand(*steps.shape, 1, -1), steps, part.shape[1], 10000.0)[:, :, 0]
            for part, steps in ((self.alpha, queries), (self.beta, there))
        )
        return at @ of.mT


class MegaState(NamedTuple):
    """State of `Mega`.

    average: of the moving average (B, D, N).   keys (B, W, Z), values (B, W, V): those of the present chunk, zeros
    where it has no steps.   steps: number of steps read (B, 1), int64.
    """

    average: Tensor
    keys: Tensor
    values: Tensor
    steps: Tensor


@register("mega")
class Mega(Layer):
    """Gated attention of MEGA, with its moving average. With `chunk_size`, MEGA-chunk.

    The moving average gives the queries, the keys and the gates; the values come from the input. There is one head. The
    attention a has a bias of positions b and is the softmax of q_t . k_j / sqrt(Z) + b, or one of two functions of
    q_t . k_j / l + b, where l counts the keys that the query sees: relu2, max(s, 0)², or laplace,
    (1 + erf((s - 0.707107) / (0.282095 sqrt(2)))) / 2.

    A sequence of at most `max_length` steps attends to all its past. With `chunk_size` a step attends within its chunk
    alone, a sequence may have any length, and only the moving average passes from chunk to chunk.

    `forward` also takes `residual` (B, T, D), the input of a block before its norm. A stack passes it. The gate mixes
    the result with `residual`, and residual + y is the released block with the norm first. Without `residual` the gate
    mixes with x.

    Differs: a call may end anywhere in a chunk, because the state holds the present chunk. The whole model is
    `scanl.models.mega`.

    Args:
        dim: D, model width.
        z_dim: Z, channels of queries and keys.
        hidden: V, channels of values; by default 2 D.
        ndim: N, leaky sums of each channel in the moving average.
        chunk_size: W, steps of a chunk; None for attention to all of the past.
        max_length: length of the longest sequence without chunks.
        attention: "softmax", "relu2" or "laplace".
        bias: "simple", a number for each distance, or "rotary", <R_i alpha, R_j beta>, for which Z is even.

    Parameters as in the released code: move.alpha, move.delta, move.beta (D, N, 1), move.gamma (D, N), move.omega (D);
    v_proj (V, D), mx_proj (2 D + Z + V, D), h_proj (D, V), with biases; gamma, beta (2, Z); rel_pos_bias.rel_pos_bias
    (2 W - 1), or rel_pos_bias.alpha and rel_pos_bias.beta (1, Z).
    Initialisation as there: linear weights, gamma and the bias N(0, 0.02²), beta and linear biases 0; the moving
    average as in `mega_ema`.
    State: MegaState. Its size is that of a chunk, or of `max_length` steps.
    """

    id = "S-mega"
    equation = (
        "m = EMA(x),  [u; z; r; h'] = W m,  q, k = gamma_{1,2} * SiLU(z) + beta_{1,2},  "
        "y_t = sigmoid(u) * (SiLU(h' + U(SiLU(r) * sum_j softmax_j(q_t . k_j / sqrt(Z) + b_tj) v_j)) - residual_t)"
    )
    source = (
        'Ma et al., "Mega: Moving Average Equipped Gated Attention", arXiv:2209.10655, sec. 3.2 to 3.4, and its code'
    )
    op = "linear_scan"
    takes: ClassVar = frozenset({"residual"})
    excused: ClassVar = BY_CONVOLUTION
    sample: ClassVar = {"z_dim": 4, "hidden": 6, "ndim": 2, "chunk_size": 3}

    def __init__(
        self,
        dim: int,
        z_dim: int = 64,
        hidden: int | None = None,
        ndim: int = 16,
        chunk_size: int | None = None,
        max_length: int = 1024,
        attention: str = "softmax",
        bias: str = "simple",
    ) -> None:
        super().__init__()
        hidden = 2 * dim if hidden is None else hidden
        sizes = {"z_dim": z_dim, "hidden": hidden, "ndim": ndim, "chunk_size": chunk_size, "max_length": max_length}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ConfigError(f"mega: {name} is {size}, expected at least 1")
        if attention not in FUNCTIONS:
            raise nearest("attention of mega", attention, FUNCTIONS)
        if bias not in BIASES:
            raise nearest("bias of mega", bias, BIASES)
        if bias == "rotary" and z_dim % 2:
            raise ConfigError(f"mega: z_dim is {z_dim}, expected an even number because bias is 'rotary'")
        self.dim, self.z_dim, self.hidden = dim, z_dim, hidden
        self.chunk_size, self.max_length, self.attention = chunk_size, max_length, attention
        self.reach = max_length if chunk_size is None else chunk_size
        self.move = MegaEMA(dim, ndim)
        self.v_proj = nn.Linear(dim, hidden)
        self.mx_proj = nn.Linear(dim, 2 * dim + z_dim + hidden)
        self.h_proj = nn.Linear(hidden, dim)
        for project in (self.v_proj, self.mx_proj, self.h_proj):
            nn.init.normal_(project.weight, std=0.02)
            nn.init.zeros_(project.bias)
        self.gamma = nn.Parameter(0.02 * torch.randn(2, z_dim))
        self.beta = nn.Parameter(torch.zeros(2, z_dim))
        self.rel_pos_bias = SimpleBias(self.reach) if bias == "simple" else RotaryBias(z_dim)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> MegaState:
        keys, values = (
            self._zeros(batch_size, self.reach, width, device=device, dtype=dtype, at_least=torch.float32)
            for width in (self.z_dim, self.hidden)
        )
        average = self.move.init_state(batch_size, device=device, dtype=dtype)
        return MegaState(average, keys, values, self._zeros(batch_size, 1, device=device, dtype=torch.int64))

    def forward(
        self,
        x: Tensor,
        state: MegaState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, MegaState]:
        self._check(x, state, cu_seqlens)
        residual = x if residual is None else residual
        if residual.shape != x.shape:
            raise ShapeError(f"mega: residual has shape {tuple(residual.shape)}, expected {tuple(x.shape)} from x")
        average, keys, values, read = (None, None, None, None) if state is None else state
        if self.chunk_size is None:
            check_length("mega", x, read, cu_seqlens, self.max_length)
        blocks = Blocks(x, read, self.reach, cu_seqlens)
        averaged, average = self.move(x, average, cu_seqlens=cu_seqlens)
        sizes = [self.dim, self.z_dim, self.hidden, self.dim]
        update, z, gate, ahead = self.mx_proj(averaged).split(sizes, -1)
        q, k = (F.silu(widen(z))[..., None, :] * widen(self.gamma) + widen(self.beta)).unbind(-2)
        k, v = blocks.keys(k, keys), blocks.keys(widen(F.silu(self.v_proj(x))), values)
        read_out = blocks.taken(self._attend(blocks.queries(q), k, v, blocks)).to(x.dtype)
        h = F.silu(ahead + self.h_proj(read_out * F.silu(gate)))
        y = update.sigmoid() * (h - residual.to(x.dtype))
        return y, MegaState(average, blocks.kept(k), blocks.kept(v), blocks.after)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks) -> Tensor:
        """Attend from q (N, Q, Z) to k (N, S, Z), v (N, S, V), causally, with the bias of positions.

        This is not `segment_attention`, which has neither a bias nor another function than the softmax.
        """
        seen = blocks.seen(k)
        scores, bias = q @ replaced(k).mT, self.rel_pos_bias(blocks.at, k.shape[1])
        if self.attention == "softmax":
            weights = (scores / math.sqrt(self.z_dim) + bias).masked_fill(~seen, -torch.inf).softmax(-1)
        else:
            scores = scores / (blocks.at + 1)[..., None] + bias
            if self.attention == "relu2":
                scores = scores.relu().square()
            else:
                scores = (1 + torch.erf((scores - 0.707107) / (0.282095 * math.sqrt(2)))) / 2
            weights = scores.masked_fill(~seen, 0)
        return (weights @ replaced(v)) * blocks.spoilt(k, v).to(v.dtype)
