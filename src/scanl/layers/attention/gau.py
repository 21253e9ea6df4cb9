"""Gated attention unit: attention of one head, without a softmax, whose result a gate multiplies."""

from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer, as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.packing import each_alone
from scanl.layers.parts.blocks import Blocks
from scanl.layers.parts.position_bias import RotaryBias, SimpleBias
from scanl.layers.parts.positions import check_length, positions
from scanl.layers.parts.rotary import rotate
from scanl.ops._attention import squared_attention
from scanl.ops._frame.nonfinite import replaced
from scanl.ops.offsets import row_ends, sequences

PositionBias = Annotated[
    Literal["simple", "rotary"],
    'b: "simple", a number for each distance, or "rotary", <R_i alpha, R_j beta>, for which S is even',
]


QueryKeyDim = Annotated[options.KeyDim, "S, channels of queries and keys; by default D / 4, even, at most 128"]


INITIAL_BIAS = 0.5  # b(1), bias of the step before, at the start


class GatedAttentionUnit(Layer):
    """Base class of `gau` and `flash`. `reach`: n, steps of a block, within which all is quadratic."""

    def __init__(
        self,
        dim: int,
        z_dim: int | None,
        expand: float,
        reach: int,
        position_bias: str,
        rope_fraction: float,
        rope_base: float,
        causal: bool,
        count: int,
    ) -> None:
        """count: number of queries and keys that are made of z."""
        super().__init__()
        z_dim = 2 * max(1, min(64, dim // 8)) if z_dim is None else z_dim
        self.dim, self.z_dim, self.hidden_dim, self.reach = dim, z_dim, int(expand * dim), reach
        if position_bias == "rotary" and z_dim % 2:
            self._refuse("z_dim", z_dim, "an even number because position_bias is 'rotary'")
        if self.hidden_dim < 1:
            self._refuse("expand", expand, f"at least 1/{dim} because of dim={dim}")
        self.rotated, self.rope_base = int(z_dim * rope_fraction), rope_base
        self.causal, self.bidirectional = causal, not causal
        if self.rotated % 2:
            self._refuse("rope_fraction", rope_fraction, f"an even number of channels of z_dim={z_dim}")
        self.in_proj = nn.Linear(dim, 2 * self.hidden_dim + z_dim)
        self.out_proj = nn.Linear(self.hidden_dim, dim)
        for linear in (self.in_proj, self.out_proj):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        self.gamma = nn.Parameter(0.02 * torch.randn(count, z_dim))
        self.beta = nn.Parameter(torch.zeros(count, z_dim))
        self.rel_pos_bias = SimpleBias(reach) if position_bias == "simple" else RotaryBias(z_dim)
        if isinstance(self.rel_pos_bias, SimpleBias) and reach > 1:
            self.rel_pos_bias.rel_pos_bias.detach()[reach - 2] = INITIAL_BIAS

    def _operands(self, x: Tensor, past: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return u (B, T, E), v (B, T, E) and the rotated queries and keys (B, T, count, S)."""
        u, v, z = F.silu(self.in_proj(x)).split([self.hidden_dim, self.hidden_dim, self.z_dim], -1)
        heads = widen(z)[..., None, :] * widen(self.gamma) + widen(self.beta)
        if self.rotated:
            begun = x.new_zeros(sequences(x, cu_seqlens), 1, dtype=torch.int64) if past is None else past
            steps, _ = positions(begun, x.shape[1], cu_seqlens)
            heads = rotate(heads, steps, self.rotated, self.rope_base)
        return u, widen(v), heads

    def _within(self, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks) -> Tensor:
        """Attend from q (N, Q, S) to k (N, S, S), v (N, S, E), within blocks."""
        bias, (q, k_head, v_head) = (
            blocks.bias(self.rel_pos_bias, k.shape[1]),
            (x[:, None] for x in (q, replaced(k), replaced(v))),
        )
        y = squared_attention(q, k_head, v_head, blocks.seen(k), bias, scale=1 / self.reach)[:, 0]
        return y * blocks.spoilt(k, v).to(v.dtype)

    def _output(self, u: Tensor, attended: Tensor) -> Tensor:
        return self.out_proj(u * attended.to(u.dtype))


class GAUState(NamedTuple):
    """State of `GAU`: zeros where no step is."""

    keys: Annotated[Tensor, StateAxes("reach, z_dim", "keys of `max_length` steps")]
    values: Annotated[Tensor, StateAxes("reach, hidden_dim", "their values")]
    steps: Annotated[Tensor, StateAxes("1", "number of steps read", dtype=torch.int64, after=torch.add)]


@registry.register("gau")
class GAU(GatedAttentionUnit):
    """Gated attention unit: one head of attention with squared ReLU, in a gated linear unit.

    It stands for attention and feed-forward network together: two such layers have the parameters of a block of both.
    A sequence of at most n = `max_length` steps attends to all its past; a longer one raises an error. With
    causal=False the sum is over all j, also those to come: the paper's form for masked language models. The published
    block is x + y with a norm before the layer, which a stack forms with channel_mixer="none".

    Differs: in the paper n is the length of the present sequence, so an output would depend on steps to come. Here n is
    constant: a sequence of n steps gives what the paper gives. The bias b is added after the division, as in the paper;
    FLASH-pytorch divides it too.

    Parameters: in_proj (2 E + S, D), the rows of u, v and z; out_proj (D, E), both with biases; gamma, beta (2, S), for
    q and k; rel_pos_bias.rel_pos_bias (2 n - 1), or rel_pos_bias.alpha and rel_pos_bias.beta (1, S).
    Initialisation: linear weights, gamma and the bias of positions N(0, 0.02²), beta and linear biases 0.
    Differs: the simple bias of distance 1 starts at 0.5. Where it starts below 0, as the published one may, the ReLU
    hides the step before from the output and from the gradient: two layers of 32 channels that learn to copy it stay at
    chance after 150 steps for 2 of 6 starts, and for none with 0.5.
    """

    id = "S-gau"
    cost = ("T^2", "T")
    aliases = ("gated_attention_unit",)
    equation = (
        "u, v, z = SiLU(W x),  q, k = gamma_{1,2} * z + beta_{1,2},  "
        "y_t = W_o (u_t * sum_{j <= t} ReLU(q_t . k_j / n + b_{t-j})^2 v_j)"
    )
    source = 'Hua, Dai, Liu and Le, "Transformer Quality in Linear Time", arXiv:2202.10447, sec. 2'
    state: ClassVar = GAUState
    sample: ClassVar = {"z_dim": 6, "expand": 0.5, "max_length": 80}

    def __init__(
        self,
        dim: options.Dim,
        z_dim: QueryKeyDim | None = None,
        expand: Annotated[options.Expand, "u and v have E = int(expand D) channels"] = 2.0,
        max_length: Annotated[options.MaxLength, "n, length of the longest sequence"] = 2048,
        position_bias: PositionBias = "simple",
        rope_fraction: Annotated[options.RopeFraction, "share of S that turns with the position"] = 0.0,
        rope_base: options.RopeBase = 10000.0,
        causal: options.Causal = True,
    ) -> None:
        super().__init__(dim, z_dim, expand, max_length, position_bias, rope_fraction, rope_base, causal, 2)
        self.longest = max_length

    def run(self, x: Tensor, state: GAUState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, GAUState]:
        if self.causal and cu_seqlens is not None and row_ends(cu_seqlens) is not None:
            return each_alone(self.forward, x, state, cu_seqlens)  # pyright: ignore[reportReturnType]
        keys, values, past = state or (None, None, None)
        check_length(self._who(), x, past, cu_seqlens, self.longest)
        blocks = Blocks(x, past, self.reach, cu_seqlens, self.causal)
        u, v, heads = self._operands(x, past, cu_seqlens)
        q, k = heads.unbind(2)
        k, v = blocks.keys(k, keys), blocks.keys(v, values)
        with as_widened(x):
            attended = blocks.taken(self._within(blocks.queries(q), k, v, blocks))
        return self._output(u, attended), GAUState(blocks.kept(k), blocks.kept(v), blocks.after)
