"""The Block-State Transformer: tokens attend to blocks of tokens, and to what state-space models say of the past."""

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.attention._segments import SegmentLayer
from scanl.layers.attention.block_recurrent import BUCKETS, TwoAttentionHeads, attend_to_window
from scanl.layers.base import UNDECAYED_HINT, Layer, widen
from scanl.layers.designation import make_layer
from scanl.layers.initial_state import InnerState, StateAxes
from scanl.layers.parts.masked_attention import attend
from scanl.layers.parts.norm import RMSNorm
from scanl.layers.parts.segments import CallSegments, SegmentPiece, gathered
from scanl.layers.ssm._base import BY_CONVOLUTION
from scanl.layers.state import Device, DType, State


class BSTState(NamedTuple):
    """State of `BlockStateTransformer`. Keys and values are zeros where no step is."""

    systems: Annotated[tuple[State, ...], InnerState("systems")]
    keys: Annotated[Tensor, StateAxes("2 * window, num_heads, head_dim", "keys of the previous and the present block")]
    values: Annotated[Tensor, StateAxes("2 * window, num_heads, head_dim", "their values")]
    context_keys: Annotated[Tensor, StateAxes("num_contexts, num_heads, head_dim", "keys of the block's contexts")]
    context_values: Annotated[Tensor, StateAxes("num_contexts, num_heads, head_dim", "their values")]
    steps: Annotated[Tensor, StateAxes("", "steps read", dtype=torch.int64, after=torch.add)]


@registry.register("bst")
class BlockStateTransformer(SegmentLayer):
    """The Block-State Transformer's layer, without the network of the tokens: a system's outputs are contexts.

    Tokens attend to the `window` tokens before them, themselves not among them, as in `block_recurrent`, and to
    context vectors, which state-space layers of width D make of the whole past. No block waits for another, but for
    the states of the systems. Three forms, by what the contexts of a block are:

    - "single_head": the outputs of one system at the steps of the block up to the token's own.
    - "multi_head": so, with a system for each head.
    - "multi_filter": the last outputs of M systems in the block before, with learned ids; learned vectors for the
      first block.

    `layer` may be any registered causal layer. The paper has S4, and filters that have no finite state.

    Differs: the paper's listing moves the contexts of "multi_filter" along the axis of systems, where the text moves
    them by a block; here by a block. The contexts have a norm, as the state vectors of `block_recurrent` have.

    Parameters: tokens: q_proj, cross_proj, k_proj, v_proj (H K, D), scale, cross_scale (H); systems.i, as in `layer`;
    context_norm (D); context_k.i, context_v.i (H K, D), or (K, D) for each of H systems; o_proj (D, 2 H K); bias (H,
    32); slots, ids (M, D) for "multi_filter".
    Initialisation: maps truncated normal, N(0, 1/fan_in); scales 1; bias N(0, 1/H); slots N(0, 0.1²), ids N(0, 1).
    """

    id = "S-bst"
    cost = ("T W", "W")
    aliases = ("block_state_transformer",)
    equation = (
        "y_t = W_o [attention of x_t to the W tokens before it; attention of x_t to c],  c = SSM(x)_s for the steps "
        "s <= t of the block"
    )
    source = 'Pilault et al., "Block-State Transformers", arXiv:2306.09539, sec. 3 and its listing'
    excused: ClassVar = {
        **BY_CONVOLUTION,
        "default_sizes_are_in_proportion": "tokens and contexts have projections each, beside a whole layer; the "
        "block and its contexts are kept",
    }
    sample: ClassVar = {"num_heads": 3, "window": 3, "layer_options": {"state_dim": 4}}
    hints: ClassVar = {"bias": UNDECAYED_HINT, "slots": UNDECAYED_HINT, "ids": UNDECAYED_HINT}
    state: ClassVar = BSTState

    slots: nn.Parameter | None
    ids: nn.Parameter | None

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.FreeHeads = 8,
        head_dim: Annotated[options.HeadDim | None, "K, channels of a head; by default dim / num_heads"] = None,
        window: Annotated[options.Window, "W, tokens of a block, and tokens that a token sees; 512 in the paper"] = 128,
        num_slots: Annotated[options.Slots, 'M, systems of "multi_filter"'] = 32,
        layer: Annotated[str, "the system, a registered name or module:Class"] = "s4d",
        layer_options: Annotated[Mapping[str, Any] | None, "options of the system"] = None,
        variant: Annotated[
            Literal["single_head", "multi_head", "multi_filter"], '"single_head", "multi_head" or "multi_filter"'
        ] = "single_head",
    ) -> None:
        super().__init__()
        if head_dim is None and dim % num_heads:
            self._refuse("num_heads", num_heads, f"a divisor of dim={dim} without head_dim")
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_dim or dim // num_heads
        self.window = self.chunk_size = window
        self.num_slots, self.variant = num_slots, variant
        by_filter = variant == "multi_filter"
        self.num_contexts = num_slots if by_filter else window
        count = {"single_head": 1, "multi_head": num_heads, "multi_filter": num_slots}[variant]
        self.systems = nn.ModuleList(make_layer(layer, dim, layer_options or {}) for _ in range(count))
        if any(system.bidirectional for system in self.systems):
            self._refuse("layer", layer, "a causal layer")
        width, maps = num_heads * self.head_dim, num_heads if variant == "multi_head" else 1
        self.tokens = TwoAttentionHeads(dim, num_heads, self.head_dim)
        self.context_norm = RMSNorm(dim, eps=1e-6)
        self.context_k, self.context_v = (
            nn.ModuleList(nn.Linear(dim, width // maps, bias=False) for _ in range(maps)) for _ in range(2)
        )
        self.o_proj = nn.Linear(2 * width, dim, bias=False)
        for linear in (*self.context_k, *self.context_v, self.o_proj):
            assert isinstance(linear, nn.Linear)
            deviation = linear.in_features**-0.5
            nn.init.trunc_normal_(linear.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
        self.bias = nn.Parameter(torch.randn(num_heads, BUCKETS) * num_heads**-0.5)
        for name, std in (("slots", 0.1), ("ids", 1.0)):
            self.register_parameter(name, nn.Parameter(std * torch.randn(num_slots, dim)) if by_filter else None)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> BSTState:
        zeros = super().init_state(batch_size, device=device, dtype=dtype)
        if self.slots is None:
            return zeros
        # Not slots[None]: in inference mode a view of a parameter requires a gradient, which counters of flops refuse.
        keys, values = self._projected([torch.stack([self.slots])])
        return zeros._replace(
            context_keys=zeros.context_keys + keys.to(zeros.keys),
            context_values=zeros.context_values + values.to(zeros.keys),
        )

    def over(self, x: Tensor, state: BSTState, segments: CallSegments) -> tuple[Tensor, BSTState]:
        _, keys, values, context_keys, context_values, steps = state
        by_filter, ys = self.slots is not None, []
        row = torch.arange(self.window, device=x.device)
        begun = [None] * len(self.systems) if segments.past is None else state.systems
        contexts, systems = (self._of_filters if by_filter else self._of_steps)(x, begun, segments)
        for piece, (q, cross, k, v), new in zip(
            segments.pieces, zip(*map(segments.cut, self.tokens(x)), strict=True), contexts, strict=True
        ):
            among, keys, values = attend_to_window(self.tokens, self.bias, piece, q, (k, v), (keys, values))
            visible = None
            if not by_filter:
                context_keys, context_values = (
                    piece.write(cache, rows) for cache, rows in zip((context_keys, context_values), new, strict=True)
                )
                visible = row <= piece.places(x)[..., None]
            across = attend(cross, context_keys, context_values, visible, 1.0)
            ys.append(torch.cat([among, across], 2))
            steps = steps + piece.count

            caches = keys, values, context_keys, context_values
            after = functools.partial(self._next_block, new, caches)
            keys, values, context_keys, context_values = piece.at_end(after, caches)
        y = self.o_proj(segments.join(ys).flatten(2).to(x.dtype))
        return y, BSTState(systems, keys, values, context_keys, context_values, steps)

    def _of_steps(
        self, x: Tensor, states: Sequence[State], segments: CallSegments
    ) -> tuple[Sequence[Sequence[Tensor]], tuple[State, ...]]:
        """Return the keys and values of each piece's steps, and the states of the systems after x."""
        pairs = [system(x, past) for system, past in zip(self.systems, states, strict=True)]
        outputs, after = zip(*pairs, strict=True)
        return list(zip(*map(segments.cut, self._projected(outputs)), strict=True)), after

    def _of_filters(
        self, x: Tensor, states: Sequence[State], segments: CallSegments
    ) -> tuple[Sequence[Sequence[Tensor]], tuple[State, ...]]:
        """Return the keys and values (B, M, H, K) after each piece, if it ends its block, and the states after x."""
        systems: Any = list(self.systems)
        ends, pieces = segments.ends, segments.pieces
        if ends is None:
            outputs, after = Layer.at_places(systems, x, states, range(x.shape[1]))
            cut = segments.cut(torch.stack(list(outputs), 2))
            rows = [_last(piece, new) for piece, new in zip(pieces, cut, strict=True)]
        else:
            kind = type(systems[0]) if len(set(map(type, systems))) == 1 else Layer
            outputs, after = kind.at_places(systems, x, states, ends)
            rows = torch.stack(list(outputs), 2).unbind(1)
        if len(rows) == 0:
            return [()] * len(pieces), tuple(after)
        contexts = [tensor.unbind(1) for tensor in self._projected([torch.stack(list(rows), 1)])]
        pairs = [*zip(*contexts, strict=True)]
        return [*pairs, *[()] * (len(pieces) - len(pairs))], tuple(after)

    def _next_block(self, new: Sequence[Tensor], caches: Sequence[Tensor]) -> list[Tensor]:
        """Return the caches with which the next block begins. new: the contexts that it has from the beginning."""
        *blocks, keys, values = caches
        moved = [torch.cat([rows[:, self.window :], torch.zeros_like(rows[:, self.window :])], 1) for rows in blocks]
        if self.slots is not None:
            return [*moved, *(context.clone() for context in new)]
        return [*moved, torch.zeros_like(keys), torch.zeros_like(values)]

    def _projected(self, contexts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys of length 1 and values (B, N, H, K) of contexts (B, N, D), one for all heads or for each."""
        kind = self.context_norm.weight.dtype
        contexts = [self.context_norm(c.to(kind)) for c in contexts]
        if self.ids is not None:
            contexts = [c + self.ids for c in contexts]
        k, v = (
            widen(torch.cat([linear(c) for linear, c in zip(maps, contexts, strict=True)], -1)).unflatten(
                -1, (self.num_heads, self.head_dim)
            )
            for maps in (self.context_k, self.context_v)
        )
        return k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt(), v


def _last(piece: SegmentPiece, rows: Tensor) -> Tensor:
    """Return (B, ...), the row of the last step of a piece, of rows (B, width, ...)."""
    if isinstance(piece.count, int):
        return rows[:, piece.count - 1]
    return gathered(rows, (piece.count - 1).clamp(min=0)[:, None])[:, 0]


@registry.preset("bst_multi_filter", variant="multi_filter")
class BSTMultiFilter(BlockStateTransformer):
    """BST with M systems, of which the tokens of a block see the outputs at the end of the block before."""

    id = "S-bst"
    equation = (
        "y_t = W_o [attention of x_t to the W tokens before it; attention of x_t to c_1..c_M],  c_i = SSM_i(x)_s + "
        "id_i for the last step s of the block before"
    )
    source = BlockStateTransformer.source
    sample: ClassVar = {**BlockStateTransformer.sample, "num_slots": 2}
    own_path = True
