"""The Block-Recurrent Transformer: state vectors that attend to blocks of tokens, and tokens that attend to them."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.attention._segments import SegmentLayer
from scanl.layers.attention.rmt import Horizon
from scanl.layers.base import UNDECAYED_HINT, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.module import Module
from scanl.layers.parts.masked_attention import attend
from scanl.layers.parts.norm import RMSNorm
from scanl.layers.parts.segments import CallSegments, SegmentPiece, behind_horizon
from scanl.layers.state import Device, DType
from scanl.ops.fused.rms_norm import rms_norm

BUCKETS, FARTHEST = 32, 128  # of the bias: distances from 128 on share the last bucket


class BlockRecurrentState(NamedTuple):
    """State of `BlockRecurrent`. Keys and values are zeros where no step is."""

    slots: Annotated[Tensor, StateAxes("num_slots, dim", "state vectors")]
    keys: Annotated[Tensor, StateAxes("2 * window, num_heads, head_dim", "keys of the previous and the present block")]
    values: Annotated[Tensor, StateAxes("2 * window, num_heads, head_dim", "their values")]
    steps: Annotated[Tensor, StateAxes("", "steps read", dtype=torch.int64, after=torch.add)]


def distance_bias(weight: Tensor, distances: Tensor) -> Tensor:
    """Return (..., H, L) of a weight (H, 32) for distances (..., L), of which far ones share."""
    exact = BUCKETS // 2
    far = (distances.clamp(min=1).double() / exact).log() / math.log(FARTHEST / exact) * (BUCKETS - exact)
    bucket = torch.where(distances < exact, distances.clamp(min=0), (exact + far.long()).clamp(max=BUCKETS - 1))
    return weight[:, bucket].movedim(0, -2)


class TwoAttentionHeads(Module):
    """Queries for two attentions, and keys and values, of vectors (..., D); keys and queries have length 1.

    The logits of an attention are multiplied by |scale|, or |cross_scale| where the other side's keys are read.
    """

    def __init__(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.cross_proj, self.k_proj, self.v_proj = (
            nn.Linear(dim, num_heads * head_dim, bias=False) for _ in range(4)
        )
        for linear in (self.q_proj, self.cross_proj, self.k_proj, self.v_proj):
            nn.init.trunc_normal_(linear.weight, std=dim**-0.5, a=-2 * dim**-0.5, b=2 * dim**-0.5)
        self.scale, self.cross_scale = (nn.Parameter(torch.ones(num_heads)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries of x among itself and across, multiplied by their scales, keys and values, (..., H, K)."""
        split = (
            widen(proj(x)).unflatten(-1, (self.num_heads, -1))
            for proj in (self.q_proj, self.cross_proj, self.k_proj, self.v_proj)
        )
        q, cross, k, v = split
        length = v.new_full(v.shape[-1:], v.shape[-1] ** -0.5)
        q, cross, k = (rms_norm(y, length, 1e-6 / v.shape[-1]) for y in (q, cross, k))
        return widen(self.scale).abs()[:, None] * q, widen(self.cross_scale).abs()[:, None] * cross, k, v


def attend_to_window(
    heads: TwoAttentionHeads,
    bias: nn.Parameter,
    piece: SegmentPiece,
    q: Tensor,
    new: Sequence[Tensor],
    caches: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a piece's attention to the W tokens before each, and the keys and values with the new ones.

    new, caches: keys and values, of the piece and (B, 2 W, H, K) of the previous and the present block.
    """
    window = piece.size
    keys, values = (
        torch.cat([cache[:, :window], piece.write(cache[:, window:], rows)], 1)
        for cache, rows in zip(caches, new, strict=True)
    )
    after = torch.arange(1 - piece.width, 2 * window, device=q.device)  # a key's place less a query's
    begin = piece.begin if isinstance(piece.begin, int) else piece.begin[:, None]
    distances = (begin + window - after).view(-1, len(after))
    scaled = widen(heads.scale).abs()[:, None] * distance_bias(widen(bias), distances)
    distances = piece.places(q)[..., None] + window - torch.arange(2 * window, device=q.device)
    return attend(q, keys, values, (distances > 0) & (distances <= window), 1.0, scaled), keys, values


class Gate(Module):
    """s g + z (1 - g) with g = sigmoid(gate), "fixed", or s sigmoid(F a + 1) + z sigmoid(I a - 1), "lstm"; z = W a + b.

    tanh: whether it acts on z.
    """

    def __init__(self, width: int, dim: int, kind: str, tanh: bool) -> None:
        super().__init__()
        self.tanh = tanh
        self.out = nn.Linear(width, dim)
        nn.init.trunc_normal_(self.out.weight, std=width**-0.5, a=-2 * width**-0.5, b=2 * width**-0.5)
        nn.init.zeros_(self.out.bias)
        self.gate = nn.Parameter(0.1 * torch.randn(dim)) if kind == "fixed" else None
        self.input, self.forget = (nn.Linear(width, dim) if kind == "lstm" else None for _ in range(2))
        for linear in (self.input, self.forget):
            if linear is not None:
                deviation = (0.1 / width) ** 0.5
                nn.init.trunc_normal_(linear.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
                nn.init.normal_(linear.bias, std=0.1)

    def forward(self, s: Tensor, a: Tensor) -> Tensor:
        """Return the next state of s (B, N, D), in its dtype, from a (B, N, width)."""
        z = self.out(a).to(s.dtype)
        z = z.tanh() if self.tanh else z
        if self.gate is not None:
            g = self.gate.to(s.dtype).sigmoid()
            return s * g + z * (1 - g)
        assert self.input is not None
        assert self.forget is not None
        return s * (self.forget(a).to(s.dtype) + 1).sigmoid() + z * (self.input(a).to(s.dtype) - 1).sigmoid()


@registry.register("block_recurrent")
class BlockRecurrent(SegmentLayer):
    """The recurrent layer of the Block-Recurrent Transformer, without the network of the tokens.

    Tokens attend to the `window` tokens before them, themselves not among them, and to N state vectors. At the end of a
    block of `window` tokens the state vectors attend to each other and to the keys of the previous and the present
    block, and a gate updates them. Both read the state before the block. Tokens and states have a set of keys and
    values each, which both directions share, and queries of their own for each attention. Keys and queries have length
    1, and each head learns a scale. Attention among tokens has a bias by distance, in 32 buckets as in T5.

    Forms of the update, a = [attention among states; attention to tokens]:

    - "skip": s' = gate(s, W a), the best in the paper with a fixed gate.
    - "dual": s'' = gate(s, W a), then s' = gate(s'', W_2 relu(W_1 norm(s''))).
    - "single": s' = gate(s, tanh(W_2 relu(W_1 a))).

    As in the authors' program, the block before the first one has keys and values of zeros, which are attended to.
    Gradients flow through states and keys; with `horizon` k they stop at every k-th boundary of blocks. The authors
    detach both every 4096 tokens.

    Differs: in that program z = W a has no bias, and tanh acts on it in "single" alone; here also with the LSTM gate,
    as in the paper. In block-recurrent-transformer-pytorch the gate weighs z, and the states read the present block.

    Parameters: tokens and states: q_proj, cross_proj, k_proj, v_proj (H K, D), scale, cross_scale (H); o_proj (D, 2 H
    K); bias (H, 32); slots, ids (N, D); norm (D); gates: out (D, 2 H K) or (D, 4 D) with bias; gate (D), or input,
    forget with bias; hidden (4 D, ·).
    Initialisation: maps truncated normal, N(0, 1/fan_in), of gates N(0, 0.1/fan_in); gate and the biases of gates
    N(0, 0.1²), other biases 0; scales 1; slots N(0, 0.1²), ids N(0, 1); bias N(0, 1/H).
    """

    id = "S-brect"
    cost = ("T W", "W")
    aliases = ("block_recurrent_transformer", "Brect", "block_recurrent_attention")
    equation = (
        "y_t = W_o [attention of x_t to the W tokens before it; attention of x_t to s],  at the end of a block s' = "
        "s * g + W_z [attention of s to s; attention of s to the last 2 W tokens] * (1 - g),  g = sigmoid(b_g)"
    )
    source = 'Hutchins et al., "Block-Recurrent Transformers", arXiv:2203.07852, sec. 3, and its code'
    excused: ClassVar = {"default_sizes_are_in_proportion": "tokens and states have projections each"}
    sample: ClassVar = {"num_heads": 3, "window": 3, "num_slots": 2}
    hints: ClassVar = {"bias": UNDECAYED_HINT, "slots": UNDECAYED_HINT, "ids": UNDECAYED_HINT}
    state: ClassVar = BlockRecurrentState

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.FreeHeads = 8,
        head_dim: Annotated[options.HeadDim | None, "K, channels of a head; by default dim / num_heads"] = None,
        window: Annotated[options.Window, "W, tokens of a block, and tokens that a token sees; 512 in the paper"] = 128,
        num_slots: Annotated[options.Slots, "N, state vectors; 512 in the paper"] = 128,
        forget_gate: Annotated[Literal["fixed", "lstm"], 'gate of the states: "fixed" or "lstm"'] = "fixed",
        variant: Annotated[Literal["skip", "dual", "single"], 'the update: "skip", "dual" or "single"'] = "skip",
        horizon: Horizon = None,
    ) -> None:
        super().__init__()
        if head_dim is None and dim % num_heads:
            self._refuse("num_heads", num_heads, f"a divisor of dim={dim} without head_dim")
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_dim or dim // num_heads
        self.window = self.chunk_size = window
        self.num_slots, self.horizon = num_slots, horizon
        width = 2 * num_heads * self.head_dim
        self.tokens, self.states = (TwoAttentionHeads(dim, num_heads, self.head_dim) for _ in range(2))
        self.o_proj = nn.Linear(width, dim, bias=False)
        nn.init.trunc_normal_(self.o_proj.weight, std=width**-0.5, a=-2 * width**-0.5, b=2 * width**-0.5)
        self.bias = nn.Parameter(torch.randn(num_heads, BUCKETS) * num_heads**-0.5)
        self.slots = nn.Parameter(0.1 * torch.randn(num_slots, dim))
        self.ids = nn.Parameter(torch.randn(num_slots, dim))
        self.norm = RMSNorm(dim, eps=1e-6)
        lstm = forget_gate == "lstm"
        self.gate = None if variant == "single" else Gate(width, dim, forget_gate, lstm)
        self.hidden, self.hidden_norm, self.hidden_gate = None, None, None
        if variant != "skip":
            self.hidden = nn.Linear(dim if variant == "dual" else width, 4 * dim, bias=False)
            deviation = self.hidden.in_features**-0.5
            nn.init.trunc_normal_(self.hidden.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
            self.hidden_norm = RMSNorm(dim, eps=1e-6) if variant == "dual" else None
            self.hidden_gate = Gate(4 * dim, dim, forget_gate, lstm or variant == "single")

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> BlockRecurrentState:
        zeros = super().init_state(batch_size, device=device, dtype=dtype)
        return zeros._replace(slots=zeros.slots + self.slots.to(zeros.slots))

    def over(self, x: Tensor, state: BlockRecurrentState, segments: CallSegments) -> tuple[Tensor, BlockRecurrentState]:
        slots, keys, values, steps = state
        window, ys = self.window, []
        known, begun = None, True  # what tokens read of the states, and whether it is to be computed
        for piece, q, cross, k, v in zip(segments.pieces, *map(segments.cut, self.tokens(x)), strict=True):
            if begun:
                known = self.states(self._normed(slots).to(x.dtype))
            begun = piece.ends is not False
            assert known is not None
            _, _, state_k, state_v = known
            among, keys, values = attend_to_window(self.tokens, self.bias, piece, q, (k, v), (keys, values))
            across = attend(cross, state_k, state_v, None, 1.0)
            ys.append(torch.cat([among, across], 2))
            steps = steps + piece.count

            def after(
                slots: Tensor = slots, keys: Tensor = keys, values: Tensor = values, steps: Tensor = steps,
                reads: tuple[Tensor, ...] = known,
            ) -> list[Tensor]:  # fmt: skip
                q, cross, k, v = reads
                a = torch.cat([attend(q, k, v, None, 1.0), attend(cross, keys, values, None, 1.0)], 2)
                updated = self._updated(slots, a.flatten(2).to(x.dtype))
                blocks = (torch.cat([c[:, window:], torch.zeros_like(c[:, window:])], 1) for c in (keys, values))
                return behind_horizon([updated, *blocks], steps // window, self.horizon)

            slots, keys, values = piece.at_end(after, (slots, keys, values))
        y = self.o_proj(segments.join(ys).flatten(2).to(x.dtype))
        return y, BlockRecurrentState(slots, keys, values, steps)

    def _normed(self, slots: Tensor) -> Tensor:
        return self.norm(slots.to(self.norm.weight.dtype)) + self.ids

    def _updated(self, slots: Tensor, a: Tensor) -> Tensor:
        """Return the state vectors (B, N, D) after their attention a (B, N, 2 H K)."""
        if self.gate is not None:
            slots = self.gate(slots, a)
        if self.hidden is not None and self.hidden_gate is not None:
            if self.hidden_norm is not None:
                a = self.hidden_norm(slots.to(self.hidden_norm.weight.dtype)).to(a.dtype)
            slots = self.hidden_gate(slots, self.hidden(a).relu())
        return slots
