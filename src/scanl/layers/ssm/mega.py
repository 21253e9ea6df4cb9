"""Moving-average equipped gated attention: attention whose queries and keys read a moving average."""

import math
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ShapeError
from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import InnerState, StateAxes
from scanl.layers.packing import each_alone
from scanl.layers.parts.blocks import Blocks
from scanl.layers.parts.position_bias import RotaryBias, SimpleBias
from scanl.layers.parts.positions import check_length
from scanl.layers.ssm._base import BY_CONVOLUTION
from scanl.layers.ssm.mega_ema import MegaEMA
from scanl.ops._attention import of_pairs, softmax_attention, squared_attention
from scanl.ops._frame.nonfinite import replaced
from scanl.ops.fused.gated import gated
from scanl.ops.offsets import row_ends


class MegaState(NamedTuple):
    """State of `Mega`. Keys and values are those of the present chunk, zeros where it has no steps."""

    average: Annotated[Tensor, InnerState("move")]
    keys: Annotated[Tensor, StateAxes("reach, z_dim", "keys of the present chunk, or of `max_length` steps")]
    values: Annotated[Tensor, StateAxes("reach, hidden_dim", "their values")]
    steps: Annotated[Tensor, StateAxes("1", "number of steps read", dtype=torch.int64, after=torch.add)]


@registry.register("mega")
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
    `scanl.models.whole.mega`.

    Parameters as in the released code: move.alpha, move.delta, move.beta (D, N, 1), move.gamma (D, N), move.omega (D);
    v_proj (V, D), mx_proj (2 D + Z + V, D), h_proj (D, V), with biases; gamma, beta (2, Z); rel_pos_bias.rel_pos_bias
    (2 W - 1), or rel_pos_bias.alpha and rel_pos_bias.beta (1, Z).
    Initialisation as in that code: linear weights, gamma and the bias N(0, 0.02²), beta and linear biases 0; the moving
    average as in `mega_ema`.
    """

    id = "S-mega"
    cost = ("T^2", "T")
    aliases = ("MEGA_chunk", "moving_average_equipped_gated_attention")
    equation = (
        "m = EMA(x),  [u; z; r; h'] = W m,  q, k = gamma_{1,2} * SiLU(z) + beta_{1,2},  "
        "y_t = sigmoid(u) * (SiLU(h' + U(SiLU(r) * sum_j softmax_j(q_t . k_j / sqrt(Z) + b_tj) v_j)) - residual_t)"
    )
    source = (
        'Ma et al., "Mega: Moving Average Equipped Gated Attention", arXiv:2209.10655, sec. 3.2 to 3.4, and its code'
    )
    op = "linear_scan"
    carried_by = "turns"
    excused: ClassVar = BY_CONVOLUTION
    state: ClassVar = MegaState
    sample: ClassVar = {"z_dim": 4, "hidden_dim": 6, "state_dim": 2, "chunk_size": 3}

    def __init__(
        self,
        dim: options.Dim,
        z_dim: Annotated[options.KeyDim, "Z, channels of queries and keys"] = 64,
        hidden_dim: Annotated[options.HiddenDim | None, "V, channels of values; by default 2 D"] = None,
        state_dim: Annotated[options.StateDim, "N, leaky sums of each channel in the moving average"] = 16,
        chunk_size: Annotated[
            options.ChunkSize | None, "W, steps of a chunk; None for attention to all of the past"
        ] = None,
        max_length: Annotated[options.MaxLength, "length of the longest sequence without chunks"] = 1024,
        activation: Annotated[
            Literal["softmax", "relu2", "laplace"], 'function of the scores: "softmax", "relu2" or "laplace"'
        ] = "softmax",
        position_bias: Annotated[
            Literal["simple", "rotary"],
            'b: "simple", a number for each distance, or "rotary", <R_i alpha, R_j beta>, for which Z is even',
        ] = "simple",
    ) -> None:
        super().__init__()
        hidden_dim = 2 * dim if hidden_dim is None else hidden_dim
        if position_bias == "rotary" and z_dim % 2:
            self._refuse("z_dim", z_dim, "an even number because position_bias is 'rotary'")
        self.dim, self.z_dim, self.hidden_dim = dim, z_dim, hidden_dim
        self.chunk_size, self.activation = chunk_size, activation
        self.longest = max_length if chunk_size is None else None
        self.reach = max_length if chunk_size is None else chunk_size
        self.move = MegaEMA(dim, state_dim)
        self.v_proj = nn.Linear(dim, hidden_dim)
        self.mx_proj = nn.Linear(dim, 2 * dim + z_dim + hidden_dim)
        self.h_proj = nn.Linear(hidden_dim, dim)
        for project in (self.v_proj, self.mx_proj, self.h_proj):
            nn.init.normal_(project.weight, std=0.02)
            nn.init.zeros_(project.bias)
        self.gamma = nn.Parameter(0.02 * torch.randn(2, z_dim))
        self.beta = nn.Parameter(torch.zeros(2, z_dim))
        self.rel_pos_bias = SimpleBias(self.reach) if position_bias == "simple" else RotaryBias(z_dim)

    def run(
        self, x: Tensor, state: MegaState | None, cu_seqlens: Tensor | None, residual: Tensor | None = None
    ) -> tuple[Tensor, MegaState]:
        residual = x if residual is None else residual
        if residual.shape != x.shape:
            raise ShapeError(
                f"{self._who()}: residual has shape {tuple(residual.shape)}, expected {tuple(x.shape)} from x"
            )
        if cu_seqlens is not None and row_ends(cu_seqlens) is not None:
            both = torch.cat([x, residual.to(x.dtype)], -1)
            return each_alone(self._joined, both, state, cu_seqlens)  # pyright: ignore[reportReturnType]
        average, keys, values, past = state or (None, None, None, None)
        check_length(self._who(), x, past, cu_seqlens, self.longest)
        blocks = Blocks(x, past, self.reach, cu_seqlens)
        averaged, average = self.move(x, average, cu_seqlens=cu_seqlens)
        sizes = [self.dim, self.z_dim, self.hidden_dim, self.dim]
        update, z, gate, ahead = self.mx_proj(averaged).split(sizes, -1)
        q, k = (F.silu(widen(z))[..., None, :] * widen(self.gamma) + widen(self.beta)).unbind(-2)
        k, v = blocks.keys(k, keys), blocks.keys(widen(F.silu(self.v_proj(x))), values)
        read_out = blocks.taken(self._attend(blocks.queries(q), k, v, blocks)).to(x.dtype)
        h = F.silu(ahead + self.h_proj(gated(gate, read_out)))
        y = update.sigmoid() * (h - residual.to(x.dtype))
        return y, MegaState(average, blocks.kept(k), blocks.kept(v), blocks.after)

    def _joined(self, both: Tensor, state: MegaState | None) -> tuple[Tensor, MegaState]:
        """Return what `run` does for x and the residual in one tensor."""
        x, residual = both.chunk(2, -1)
        return self.run(x, state, None, residual)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks) -> Tensor:
        """Attend from q (N, Q, Z) to k (N, S, Z), v (N, S, V), causally, with the bias of positions.

        This is not `segment_attention`, which has neither a bias nor another function than the softmax.
        """
        seen, bias = blocks.seen(k), blocks.bias(self.rel_pos_bias, k.shape[1])
        q = q if self.activation == "softmax" else q / (blocks.at + 1)[..., None]
        q, k_head, v_head = (x[:, None] for x in (q, replaced(k), replaced(v)))
        if self.activation == "softmax":
            y = softmax_attention(q, k_head, v_head, seen, bias)
        elif self.activation == "relu2":
            y = squared_attention(q, k_head, v_head, seen, bias, scale=1.0)
        else:
            scores = q @ k_head.mT + of_pairs(bias, q.shape[2], k.shape[1])
            weights = (1 + torch.erf((scores - 0.707107) / (0.282095 * math.sqrt(2)))) / 2
            y = weights.masked_fill(~seen[:, None], 0) @ v_head
        return y[:, 0] * blocks.spoilt(k, v).to(v.dtype)
