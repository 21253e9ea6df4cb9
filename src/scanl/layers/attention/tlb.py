"""The Temporal Latent Bottleneck: a fast stream over the tokens of a chunk, and a slow one over chunks."""

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.attention._segments import SegmentLayer
from scanl.layers.attention.rmt import Horizon
from scanl.layers.attention.transformer_xl import distances
from scanl.layers.base import widen
from scanl.layers.channel.mlp import MLP
from scanl.layers.initial_state import StateAxes
from scanl.layers.module import Module
from scanl.layers.parts.masked_attention import attend
from scanl.layers.parts.segments import CallSegments, behind_horizon, chosen


class BottleneckState(NamedTuple):
    """State of `TemporalLatentBottleneck`. Keys and values are zeros where no step of the present chunk is."""

    slots: Annotated[Tensor, StateAxes("num_slots, dim", "the slow stream")]
    keys: Annotated[
        Tensor,
        StateAxes("depth + 1, chunk_size, num_heads, head_dim", "keys of the fast stream's blocks, then of the slow"),
    ]
    values: Annotated[Tensor, StateAxes("depth + 1, chunk_size, num_heads, head_dim", "their values")]
    steps: Annotated[Tensor, StateAxes("", "steps read", dtype=torch.int64, after=torch.add)]


class CrossBlock(Module):
    """h + W_o attention(norm(h), other_norm(s)), then h + mlp(norm(h)). Without other_norm: s = h, with one norm.

    Initialisation: q_proj, k_proj, v_proj, o_proj N(0, 1/D); the network as `mlp`.
    """

    def __init__(self, dim: int, num_heads: int, expand: float, norm_eps: float, cross: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.mlp_norm = nn.LayerNorm(dim, eps=norm_eps), nn.LayerNorm(dim, eps=norm_eps)
        self.other_norm = nn.LayerNorm(dim, eps=norm_eps) if cross else None
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.normal_(linear.weight, std=dim**-0.5)
        self.mlp = MLP(dim, expand)

    def queries(self, h: Tensor) -> Tensor:
        """Return (B, T, H, K) of h (B, T, D)."""
        return widen(self.q_proj(_normed(self.norm, h))).unflatten(-1, (self.num_heads, -1))

    def pair(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, S, H, K) of s (B, S, D)."""
        s = _normed(self.norm if self.other_norm is None else self.other_norm, s)
        k, v = (widen(proj(s)).unflatten(-1, (self.num_heads, -1)) for proj in (self.k_proj, self.v_proj))
        return k, v

    def after(self, h: Tensor, attended: Tensor) -> Tensor:
        """Return the output of the block from its input h and the attention's (B, T, H, K)."""
        h = h + self.o_proj(attended.flatten(2).to(h.dtype))
        return h + self.mlp(_normed(self.mlp_norm, h))[0]


def _normed(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return norm(x.to(norm.weight.dtype))


@registry.register("tlb")
class TemporalLatentBottleneck(SegmentLayer):
    """Temporal Latent Bottleneck: blocks over chunks of tokens, which a few slow vectors connect.

    The fast stream has `depth` blocks of attention within a chunk, then one that reads the slow stream. After a chunk
    the slow stream, N vectors, reads the outputs of the fast stream. A step depends on earlier chunks through the slow
    stream alone. Codes of positions, sines and cosines, are added to the tokens of a chunk, and to the slow stream
    before each chunk. It starts at zero.

    The layer is the whole network: `Stack(dim, 1, "tlb", channel_mixer="none")`.
    Differs: attention within a chunk is causal, and the outputs are the norm of the fast stream at each step. In the
    authors' program for classification it is not masked, and the output is the mean of the slow stream.
    Gradients flow through the slow stream; with `horizon` k they stop at every k-th boundary of chunks.

    Parameters: fast, a list of `depth` blocks, reader and slow: norm, mlp_norm (D), other_norm (D) in the last two;
    q_proj, k_proj, v_proj, o_proj (D, D); mlp. norm (D).
    Initialisation: maps N(0, 1/fan_in), biases 0, norms 1 and 0.
    """

    id = "S-tlb"
    cost = ("T W", "W")
    aliases = ("temporal_latent_bottleneck",)
    equation = "y = norm(reader(blocks(x), s)) within each chunk x,  after it s' = slow(s, reader(blocks(x), s))"
    source = (
        'Didolkar et al., "Temporal Latent Bottleneck: Synthesis of Fast and Slow Processing Mechanisms in Sequence '
        'Learning", arXiv:2205.14794, sec. 2, and its code'
    )
    residual_out: ClassVar[str | None] = None
    excused: ClassVar = {"default_sizes_are_in_proportion": "it holds whole blocks"}
    sample: ClassVar = {"num_heads": 2, "num_slots": 2, "chunk_size": 3, "depth": 1, "expand": 1.0}
    state: ClassVar = BottleneckState

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.Heads = 8,
        num_slots: Annotated[options.Slots, "N, vectors of the slow stream"] = 8,
        chunk_size: Annotated[options.ChunkSize, "steps of a chunk"] = 32,
        depth: Annotated[options.Depth, "R, blocks of the fast stream before it reads the slow one"] = 2,
        expand: Annotated[options.Expand, "features of the networks as a multiple of dim"] = 4.0,
        horizon: Horizon = None,
        norm_eps: options.NormEps = 1e-6,
    ) -> None:
        super().__init__()
        self.dim, self.num_heads, self.head_dim, self.depth = dim, num_heads, dim // num_heads, depth
        self.num_slots, self.chunk_size, self.horizon = num_slots, chunk_size, horizon
        self.fast = nn.ModuleList(CrossBlock(dim, num_heads, expand, norm_eps, False) for _ in range(depth))
        self.reader, self.slow = (CrossBlock(dim, num_heads, expand, norm_eps, True) for _ in range(2))
        self.norm = nn.LayerNorm(dim, eps=norm_eps)

    def over(self, x: Tensor, state: BottleneckState, segments: CallSegments) -> tuple[Tensor, BottleneckState]:
        slots, keys, values, steps = state
        vectors = distances(self.num_slots, self.dim, None, x)
        everything = torch.ones(1, 1, 1, dtype=torch.bool, device=x.device)
        caches, (slow_keys, slow_values) = (keys[:, :-1], values[:, :-1]), (keys[:, -1], values[:, -1])
        ys = []
        for piece, (h, queries, *written) in zip(segments.pieces, self._fast_stream(x, caches, segments), strict=True):
            coded = slots.to(x.dtype) + vectors
            h = self.reader.after(h, attend(queries, *self.reader.pair(coded), everything))
            ys.append(h)
            steps = steps + piece.count
            pair = zip((slow_keys, slow_values), self.slow.pair(h), strict=True)
            slow_keys, slow_values = (piece.write(cache.to(tensor.dtype), tensor) for cache, tensor in pair)

            def after(
                slots: Tensor = slots, keys: Tensor = slow_keys, values: Tensor = slow_values, steps: Tensor = steps,
                coded: Tensor = coded, written: Sequence[Tensor] = written,
            ) -> list[Tensor]:  # fmt: skip
                new = self.slow.after(coded, attend(self.slow.queries(coded), keys, values, everything))
                last = behind_horizon([new.to(slots.dtype)], steps // self.chunk_size, self.horizon)
                return [*last, *map(torch.zeros_like, (keys, values, *written))]

            caches = chosen(piece.count > 0, lambda written=written: written, caches)
            slots, slow_keys, slow_values, *caches = piece.at_end(after, (slots, slow_keys, slow_values, *caches))
        y = _normed(self.norm, segments.join(ys)).to(x.dtype)
        pairs = zip(caches, (slow_keys, slow_values), strict=True)
        keys, values = (torch.cat([fast, slow.unsqueeze(1)], 1) for fast, slow in pairs)
        return y, BottleneckState(slots, keys, values, steps)

    def _fast_stream(
        self, x: Tensor, caches: Sequence[Tensor], segments: CallSegments
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return of each piece the outputs of the fast blocks, the reader's queries of them, and their keys and values.

        The blocks read one chunk alone, so all pieces of a run are computed at once. caches: keys and values of the
        chunk in which the call begins, (B, depth, S, H, K) each.
        """
        codes = distances(self.chunk_size, self.dim, None, x)
        place, cut = torch.arange(self.chunk_size, device=x.device), segments.cut(x)
        for run, piece in segments.runs():
            count = run.stop - run.start
            # A run of several pieces has whole chunks, which need no cache, or begins the call.
            pasts = caches if run.start == 0 else [torch.zeros_like(cache) for cache in caches]
            if isinstance(piece.begin, Tensor):
                pasts = [F.pad(cache.unsqueeze(1), (*(0, 0) * 4, 0, count - 1)).flatten(0, 1) for cache in pasts]
            places, written = piece.places(x), []
            h, visible = torch.stack(list(cut[run]), 1).flatten(0, 1) + codes[places], place <= places[..., None]
            for index, block in enumerate(self.fast):
                block = cast(CrossBlock, block)
                pair = zip((past[:, index] for past in pasts), block.pair(h), strict=True)
                k, v = (piece.write(cache.to(tensor.dtype), tensor) for cache, tensor in pair)
                written.append((k, v))
                h = block.after(h, attend(block.queries(h), k, v, visible))
            stacked = (torch.stack(several, 1) for several in zip(*written, strict=True))
            results = (h, self.reader.queries(h), *stacked)
            yield from zip(*(result.unflatten(0, (-1, count)).unbind(1) for result in results), strict=True)
