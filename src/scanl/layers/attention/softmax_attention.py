r"""Base class of the attention layers: projections, rotated queries and keys, softmax over a bounded memory.

.. math:: y_t = W_o \sum_{j=t-W+1}^{t} \mathrm{softmax}_j\big(R_t W_q x_t \cdot R_j W_k x_j / \sqrt K\big)\, W_v x_j
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from scanl.layers.base import Layer
from scanl.layers.initial_state import StateAxes, StateFields
from scanl.layers.packing import sequence_index
from scanl.layers.parts.positions import positions
from scanl.layers.parts.rotary import rotate
from scanl.ops import SegmentMemory, segment_attention
from scanl.ops._attention import softmax_attention
from scanl.ops._frame.nonfinite import readable, suspected
from scanl.ops._frame.opaque import opaque
from scanl.ops.offsets import row_ends, sequences


def memory(keys: str, values: str, meaning: str) -> StateFields:
    """Return the declaration of a memory of `reach` steps. keys, values: axes of a step's keys and values."""
    return StateFields(
        SegmentMemory,
        keys=StateAxes(f"reach, {keys}", meaning),
        values=StateAxes(f"reach, {values}"),
        position=StateAxes("", "steps read", dtype=torch.int64, after=torch.add),
    )


class SoftmaxAttention(Layer):
    """Base class of `attention` and `window_attention`. `reach`: number of tokens that a query sees, itself included.

    The state counts positions, so a sequence read in pieces gets the same rotations as the whole.
    """

    residual_out = "o_proj"
    state: ClassVar = memory("num_kv_heads, head_dim", "num_kv_heads, head_dim", "rotated keys")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int | None,
        reach: int,
        rope_base: float,
        rope_fraction: float,
        bias: bool,
        out_bias: bool,
    ) -> None:
        super().__init__()
        if head_dim is None and dim % num_heads:
            self._refuse("num_heads", num_heads, f"a divisor of dim={dim} without head_dim")
        self.dim, self.num_heads, self.num_kv_heads = dim, num_heads, num_kv_heads
        self.head_dim = head_dim or dim // num_heads
        self.reach, self.rope_base = reach, rope_base
        self.rotated = int(self.head_dim * rope_fraction)
        if self.rotated % 2:
            self._refuse("rope_fraction", rope_fraction, f"an even number of channels of head_dim={self.head_dim}")
        self.q_proj = nn.Linear(dim, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, dim, bias=out_bias)
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.normal_(linear.weight, std=math.sqrt(1 / dim))
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, reach={self.reach}, rotated={self.rotated}"

    def run(self, x: Tensor, state: SegmentMemory | None, cu_seqlens: Tensor | None) -> tuple[Tensor, SegmentMemory]:
        return self._attend(x, state, cu_seqlens)

    def _attend(
        self, x: Tensor, state: SegmentMemory | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, SegmentMemory]:
        q, k, v = self._projected(x, state, cu_seqlens)
        y, memory = self._over(q, k, v, state, cu_seqlens)
        return self.o_proj(y.flatten(2)), memory

    def _projected(
        self, x: Tensor, state: SegmentMemory | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys, and values (B, T, heads, channels)."""
        heads = ((self.q_proj, self.num_heads), (self.k_proj, self.num_kv_heads), (self.v_proj, self.num_kv_heads))
        q, k, v = (proj(x).unflatten(-1, (count, self.head_dim)) for proj, count in heads)
        steps = places(x, state, cu_seqlens)
        q, k = (rotate(tensor, steps, self.rotated, self.rope_base) for tensor in (q, k))
        return q, k, v

    def _over(
        self, q: Tensor, k: Tensor, v: Tensor, state: SegmentMemory | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, SegmentMemory]:
        """Attend with queries to keys and values (B, T, heads, channels), and to the state's."""
        return over(q, k, v, state, cu_seqlens, self.reach)


def places(x: Tensor, state: SegmentMemory | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return the positions of steps (B or 1, T), counted from the state's."""
    rows = sequences(x, cu_seqlens)
    past = torch.zeros(rows, dtype=torch.int64, device=x.device) if state is None else state.position
    return positions(past[:, None], x.shape[1], cu_seqlens)[0]


def over(
    q: Tensor, k: Tensor, v: Tensor, state: SegmentMemory | None, cu_seqlens: Tensor | None, reach: int
) -> tuple[Tensor, SegmentMemory]:
    """Attend with queries to the last `reach` keys and values (B, T, heads, channels), also to the state's."""
    # The memory's numbers were rounded to half precision when they were written, so float32 holds them exactly.
    wide = torch.promote_types(q.dtype, torch.float32)
    memory = None
    if state is not None and not unread(state):
        memory = state._replace(keys=state.keys.to(q.dtype), values=state.values.to(q.dtype))
    if cu_seqlens is None:
        keys, values, past = (None, None, None) if memory is None else memory
        y, *after = _attended(q, k, v, keys, values, past, reach)
        memory = SegmentMemory(*after)
    elif memory is None and (begins := _begins(q, cu_seqlens, reach)) is not None and not suspected(q, k, v):
        y, memory = _within_pieces(q, k, v, begins, reach)
    else:
        y, memory = segment_attention(q, k, v, memory, window=reach, cu_seqlens=cu_seqlens)
    memory = memory._replace(keys=memory.keys.to(wide), values=memory.values.to(wide))
    return y, memory


def _begins(x: Tensor, cu_seqlens: Tensor, reach: int) -> Tensor | None:
    """Return the step (B, T) at which the piece of each step begins; None unless rows of at most `reach` are cut."""
    ends = row_ends(cu_seqlens)
    steps = 0 if ends is None else x.shape[1] // len(ends.first)
    if ends is None or steps > reach:
        return None
    rows = steps * torch.arange(len(ends.first), device=x.device)
    if not torch.equal(cu_seqlens[ends.first], rows.to(cu_seqlens.dtype)):
        return None
    return cu_seqlens[sequence_index(cu_seqlens, x.shape[1])].view(-1, steps) - rows[:, None]


def _within_pieces(q: Tensor, k: Tensor, v: Tensor, begins: Tensor, reach: int) -> tuple[Tensor, SegmentMemory]:
    """Attend within pieces of rows that are packed (1, B T, heads, channels), and read the last piece of each row."""
    dtype, steps = q.dtype, torch.arange(begins.shape[1], device=q.device)
    q, k, v = (tensor.squeeze(0).unflatten(0, begins.shape) for tensor in (q, k, v))
    wide = torch.promote_types(dtype, torch.float32) if q.device.type == "cpu" else dtype
    visible = (steps >= begins[..., None]).tril()
    query, key, value = (tensor.to(wide).transpose(1, 2) for tensor in (q, k, v))
    y = softmax_attention(query, key, value, visible).transpose(1, 2)
    places = begins[:, -1:] + steps
    unused = (places >= len(steps))[..., None, None]

    def ring(tokens: Tensor) -> Tensor:
        index = places.clamp(max=len(steps) - 1) + len(steps) * torch.arange(len(places), device=q.device)[:, None]
        last = tokens.flatten(0, 1).index_select(0, index.flatten()).view_as(tokens).masked_fill(unused, 0)
        return pad(last, (0, 0, 0, 0, 0, reach - len(steps)))

    return y.flatten(0, 1)[None].to(dtype), SegmentMemory(ring(k), ring(v), len(steps) - begins[:, -1])


def _attended_shapes(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, values: Tensor | None, position: Tensor | None, window: int
) -> list[Tensor]:
    caches = [tensor.new_empty(tensor.shape[0], window, *tensor.shape[2:]) for tensor in (k, v)]
    return [q.new_empty(*q.shape[:3], v.shape[3]), *caches, q.new_empty(q.shape[0], dtype=torch.int64)]


@opaque(
    "window_attention(Tensor q, Tensor k, Tensor v, Tensor? keys, Tensor? values, Tensor? position, int window) "
    "-> Tensor[]",
    _attended_shapes,
)
def _attended(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, values: Tensor | None, position: Tensor | None, window: int
) -> list[Tensor]:
    memory = None if keys is None or values is None or position is None else SegmentMemory(keys, values, position)
    y, memory = segment_attention(q, k, v, memory, window=window)
    return [y, *memory]


def unread(state: SegmentMemory) -> bool:
    """Whether nothing has been read yet. False where that is not known, or would synchronise the GPU."""
    if not readable(state.position) or state.position.device.type != "cpu" or state.keys.requires_grad:
        return False
    return not state.position.any()
