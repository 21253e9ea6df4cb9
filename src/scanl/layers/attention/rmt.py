"""The Recurrent Memory Transformer: memory tokens stand before and after the tokens of each segment."""

from typing import Annotated, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.attention._blocks import TransformerBlock
from scanl.layers.attention._segments import SegmentLayer
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.masked_attention import attend
from scanl.layers.parts.norm import RMSNorm
from scanl.layers.parts.segments import CallSegments, SegmentPiece, behind_horizon
from scanl.layers.state import Device, DType
from scanl.options import at_least

Horizon = Annotated[
    int | None, at_least(1), "segments after which a gradient stops; None for backpropagation through all"
]


class MemoryTokens(NamedTuple):
    """State of `RecurrentMemoryTransformer`. Keys and values are zeros where no step of the present segment is."""

    memory: Annotated[Tensor, StateAxes("num_slots, dim", "memory tokens")]
    keys: Annotated[
        Tensor, StateAxes("depth, num_slots + chunk_size, num_heads, head_dim", "rotated keys of memory and segment")
    ]
    values: Annotated[Tensor, StateAxes("depth, num_slots + chunk_size, num_heads, head_dim", "their values")]
    steps: Annotated[Tensor, StateAxes("", "steps read", dtype=torch.int64, after=torch.add)]


@registry.register("rmt")
class RecurrentMemoryTransformer(SegmentLayer):
    """Recurrent Memory Transformer: blocks of a transformer that pass memory tokens from segment to segment.

    A segment is read as [memory; tokens; memory]. The memory before the tokens is read by them; the outputs of the
    memory after them are the memory of the next segment. The tokens are causal and see the memory before them alone.
    Two forms of the mask between memory tokens:

    - "bidirectional": all tokens of one memory see each other, as in the authors' program of the first paper.
    - "causal": a memory token sees itself and what stands before it, as in their wrapper of any causal model, of the
      paper on a million tokens (arXiv:2304.11062).

    The memory is written at the end of a segment of `chunk_size` steps, so an unfinished segment writes none. Gradients
    flow through the memory; with `horizon` k they stop at every k-th boundary. The authors detach the memory and run
    the k segments before each segment again.

    The layer is the whole network: `Stack(dim, 1, "rmt", layer_options={"depth": 6}, channel_mixer="none")`.
    Differs: blocks have RMSNorms, rotary positions, which count memory tokens and start again in each segment, and
    gated networks; the memory tokens at the start are independent, in the first program they are all the same.

    Parameters: memory (M, D); for each block norm, mlp_norm (D); q_proj, k_proj, v_proj, o_proj (D, D); mlp.gate,
    mlp.up (expand D, D), mlp.down (D, expand D); norm (D).
    Initialisation: memory N(0, 1); maps N(0, 1/fan_in), those into the residual stream divided by sqrt(2 depth).
    """

    id = "S-rmt"
    cost = ("T W", "W")
    aliases = ("recurrent_memory_transformer", "memory_transformer")
    equation = "[.; y; m'] = blocks([m; x; m]) over each segment x, m' the memory m of the next"
    source = 'Bulatov, Kuratov and Burtsev, "Recurrent Memory Transformer", arXiv:2207.06881, sec. 3.2, and its code'
    residual_out: ClassVar[str | None] = None
    excused: ClassVar = {"default_sizes_are_in_proportion": "it holds whole blocks"}
    sample: ClassVar = {"num_heads": 2, "num_slots": 2, "chunk_size": 3, "depth": 2, "expand": 1.0}
    state: ClassVar = MemoryTokens

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.Heads = 8,
        num_slots: Annotated[int, at_least(1), "M, memory tokens"] = 8,
        chunk_size: Annotated[options.ChunkSize, "steps of a segment"] = 128,
        depth: Annotated[options.Depth, "L, blocks"] = 1,
        expand: Annotated[options.Expand, "features of the networks as a multiple of dim"] = 2.0,
        variant: Annotated[
            Literal["bidirectional", "causal"], 'mask between memory tokens: "bidirectional" or "causal"'
        ] = "bidirectional",
        horizon: Horizon = None,
        rope_base: options.RopeBase = 10000.0,
        norm_eps: options.NormEps = 1e-6,
    ) -> None:
        super().__init__()
        if dim % (2 * num_heads):
            self._refuse("num_heads", num_heads, f"a divisor of dim/2={dim / 2:g}")
        self.dim, self.num_heads, self.head_dim, self.depth = dim, num_heads, dim // num_heads, depth
        self.num_slots, self.chunk_size, self.variant, self.horizon = num_slots, chunk_size, variant, horizon
        self.memory = nn.Parameter(torch.randn(num_slots, dim))
        self.blocks = nn.ModuleList(
            TransformerBlock(dim, num_heads, expand, rope_base, norm_eps, depth) for _ in range(depth)
        )
        self.norm = RMSNorm(dim, eps=norm_eps)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> MemoryTokens:
        zeros = super().init_state(batch_size, device=device, dtype=dtype)
        return zeros._replace(memory=zeros.memory + self.memory.to(zeros.memory))

    def over(self, x: Tensor, state: MemoryTokens, segments: CallSegments) -> tuple[Tensor, MemoryTokens]:
        memory, keys, values, steps = state
        ys = []
        for piece, new in zip(segments.pieces, segments.cut(x), strict=True):
            y, written, keys, values = self._read(piece, new, memory.to(x.dtype), keys, values)
            steps = steps + piece.count
            ys.append(y)
            after = (torch.zeros_like(keys), torch.zeros_like(values))
            memory, keys, values = piece.at_end(
                lambda: (*behind_horizon([written.to(memory.dtype)], steps // self.chunk_size, self.horizon), *after),  # noqa: B023
                (memory, keys, values),
            )
        return segments.join(ys), MemoryTokens(memory, keys, values, steps)

    def _read(
        self, piece: SegmentPiece, new: Tensor, memory: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the outputs of a piece, the memory that is written after it, and the keys and values behind it."""
        slots, size = self.num_slots, self.chunk_size
        begins, ends = ((where if isinstance(where, bool) else True) for where in (piece.begin == 0, piece.ends))
        present = range(slots + size) if not isinstance(piece.begin, int) else range(slots + piece.begin + new.shape[1])
        places = piece.places(new) + slots
        front = torch.arange(slots if begins else 0, device=new.device)[None]
        back = torch.arange(slots if ends else 0, device=new.device)[None] + slots + size
        positions = torch.cat([each_memory.expand(len(places), -1) for each_memory in (front, places, back)], 1)
        h = torch.cat([*([memory] if begins else []), new, *([memory] if ends else [])], 1)
        visible = self._visible(positions, len(present), ends)
        cuts = [front.shape[1], new.shape[1], back.shape[1]]
        stored = []
        complete = isinstance(piece.begin, int) and new.shape[1] == size  # then nothing of the segment is kept
        for index, block in enumerate(self.blocks):
            block = cast(TransformerBlock, block)
            q, *pair = block.projected(h, positions)
            if complete:
                h = block.after(h, attend(q, *pair, visible))
                continue
            caches = [
                self._cached(piece, cache[:, index].to(tensor.dtype), *tensor.split(cuts, 1)[:2])
                for cache, tensor in zip((keys, values), pair, strict=True)
            ]
            behind = [tensor[:, sum(cuts[:2]) :] for tensor in pair]
            k, v = (
                torch.cat([cache[:, : len(present)], tensor], 1) for cache, tensor in zip(caches, behind, strict=True)
            )
            h = block.after(h, attend(q, k, v, visible))
            stored.append(caches)
        y = self.norm(h.to(self.norm.weight.dtype)).to(new.dtype)
        y, written = y[:, cuts[0] : sum(cuts[:2])], y[:, sum(cuts[:2]) :].clone()
        if not complete:
            keys, values = (torch.stack(caches, 1) for caches in zip(*stored, strict=True))
        return y, written, keys, values

    def _cached(self, piece: SegmentPiece, cache: Tensor, front: Tensor, new: Tensor) -> Tensor:
        """Return the keys or values of memory and segment (B, M + S, H, K), with those of a piece in their places."""
        slots = self.num_slots
        if front.shape[1]:
            (cache,) = piece.at_begin(lambda: [torch.cat([front, torch.zeros_like(cache[:, slots:])], 1)], [cache])
        return torch.cat([cache[:, :slots], piece.write(cache[:, slots:], new)], 1)

    def _visible(self, positions: Tensor, present: int, ends: bool) -> Tensor:
        """Return (B or 1, Q, S): what queries at `positions` see of the rows, and of the last memory at an end."""
        slots, size = self.num_slots, self.chunk_size
        last = torch.arange(slots if ends else 0, device=positions.device) + slots + size
        rows = torch.cat([torch.arange(present, device=positions.device), last])
        visible = rows <= positions[..., None]
        if self.variant == "bidirectional":
            for first in (0, slots + size):
                memory = (rows >= first) & (rows < first + slots)
                among = (positions >= first) & (positions < first + slots)
                visible = visible | (memory & among[..., None])
        return visible
