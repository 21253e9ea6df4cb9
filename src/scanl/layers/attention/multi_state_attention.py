"""Softmax attention as a multi-state RNN: a cache of M keys and values, from which each step drops one."""

import math
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from scanl.layers import options, registry
from scanl.layers.attention.softmax_attention import SoftmaxAttention
from scanl.layers.base import as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.packing import each_alone
from scanl.layers.parts.positions import positions
from scanl.layers.parts.rotary import rotate
from scanl.ops._attention import softmax_attention
from scanl.ops._frame.nonfinite import faulty, readable, replaced, suspected
from scanl.ops._frame.opaque import opaque


class MultiState(NamedTuple):
    rows: Annotated[
        Tensor,
        StateAxes(
            "reach, num_kv_heads, 2 * head_dim",
            "rotated keys beside values of the tokens kept, oldest first, after blank rows",
        ),
    ]
    position: Annotated[Tensor, StateAxes("", "steps read", dtype=torch.int64, after=torch.add)]


BLOCK = 128  # steps; of a longer block the chosen rows cost more, of a shorter one the copies of the cache


def _shapes(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, position: Tensor, tova: bool) -> list[Tensor]:
    return [torch.empty_like(q), torch.empty_like(rows)]


@opaque(
    "multi_state_attention(Tensor q, Tensor k, Tensor v, Tensor rows, Tensor position, bool tova) -> Tensor[]", _shapes
)
def _attended(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, position: Tensor, tova: bool) -> list[Tensor]:
    """Attend in blocks of steps, and return y with the last rows. q: (B, T, H, K), scaled.   k, v: (B, T, G, K).

    The rows that the steps of a block see are among the M rows at its start and its own. So the scores of a block are
    one product of matrices. Only the choice of the rows takes one step after the other.

    In a block a row that is not seen has weight zero, and zero times NaN is NaN. So numbers of rows that are not finite
    are replaced by zeros, and steps that see such a row are NaN afterwards.
    """
    capacity, width = rows.shape[1], k.shape[-1]
    new, ys = torch.cat([k, v], -1), []
    doubtful = suspected(rows, new)
    for first in range(0, q.shape[1], BLOCK):
        queries, rows = q[:, first : first + BLOCK], torch.cat([rows, new[:, first : first + BLOCK]], 1)
        steps, slots = queries.shape[1], torch.arange(rows.shape[1], device=q.device)
        keys, values = (replaced(rows) if doubtful else rows).transpose(1, 2).split(width, -1)
        blank = slots < capacity - first - position[:, None]
        if tova:
            with torch.no_grad():
                scores = queries.unflatten(2, (keys.shape[1], -1)).permute(0, 2, 3, 1, 4).flatten(2, 3) @ keys.mT
            visible, stay = _tova(scores.unflatten(2, (-1, steps)).flatten(1, 2), blank, capacity)
        else:
            visible, stay = _window(steps, blank, capacity)
        y = softmax_attention(queries.transpose(1, 2), keys, values, visible, scale=1.0)
        if doubtful:
            fault_k, fault_v = faulty(rows).transpose(1, 2).split(width, -1)
            fault = (fault_k.any(-1, keepdim=True) | fault_v).to(y.dtype)
            spoil = torch.where(visible.to(y.dtype)[:, None] @ fault > 0, torch.nan, 1.0).to(y.dtype)
            y = y * spoil.repeat_interleave(y.shape[1] // spoil.shape[1], 1)
        ys.append(y.transpose(1, 2))
        stay = stay + rows.shape[1] * torch.arange(len(rows), device=q.device)[:, None]
        rows = rows.flatten(0, 1).index_select(0, stay.flatten()).unflatten(0, stay.shape)
    return [torch.cat(ys, 1), rows]


def _window(steps: int, blank: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Return what each step sees and the rows that stay, as `_tova` does, if each step drops the oldest row."""
    batch, size = blank.shape
    age = torch.arange(size, device=blank.device) - torch.arange(steps, device=blank.device)[:, None]
    visible = (age >= 0) & (age <= capacity) & ~blank[:, None]
    return visible, torch.arange(steps, size, device=blank.device).expand(batch, capacity)


@torch.no_grad()
def _tova(scores: Tensor, blank: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Return whether a step sees a row, (B, steps, rows), and the rows that stay, (B, M).

    scores: of M rows and of the block's own, (B, H, steps, M + steps).   blank: (B, M + steps), rows without a token.
    """
    batch, _, steps, size = scores.shape
    slots = torch.arange(size, device=scores.device)
    # A row with a token has rank 0, and its weight decides. A blank row goes before it, an absent one never.
    rank = scores.new_zeros(batch, size).masked_fill(blank, -1).masked_fill(slots >= capacity, torch.inf)
    # How many steps drop a blank row, whatever the weights are.
    free = min(blank.sum(1).tolist(), default=0) if readable(blank) else 0
    seen = []
    for t in range(steps):
        rank = torch.where(slots == capacity + t, 0, rank)
        seen.append(torch.zeros_like(rank).masked_fill(rank != 0, -torch.inf))
        order = rank
        if t >= free:
            weights = (scores[:, :, t] + seen[-1][:, None]).softmax(-1).sum(1)
            order = torch.where(rank == 0, weights.nan_to_num(0), rank)
        rank = rank.scatter(1, order.argmin(-1, keepdim=True), torch.inf)
    return torch.stack(seen, 1) == 0, (rank == torch.inf).int().argsort(dim=1, stable=True)[:, :capacity]


@registry.register("multi_state_attention")
class MultiStateAttention(SoftmaxAttention):
    """Attention as a multi-state RNN: a transformer whose cache has M rows, by TOVA or by a window.

    TOVA means token omission via attention. A step attends to the rows of the cache and to itself. Then the row with
    the least weight, as a mean over all heads, is dropped. This may be the step's own row. All heads keep the same
    tokens. Keys are cached with the rotation of their true position. Rows are chosen one step after the other, from the
    scores of 128 steps at once: H T (M + 128) scores of each sequence are in memory.
    Differs: the authors drop rows once after a whole prompt, by the weights of its last token. Here each step drops one
    row, so a prompt gives the same as its tokens one by one.

    Parameters as in `attention`: q_proj (H K, D); k_proj, v_proj (G K, D); o_proj (D, H K).
    Initialisation: weights N(0, 1/D), biases 0.
    """

    id = "S-msrnn"
    cost = ("T W", "W")
    aliases = ("TOVA", "MSRNN", "multi_state_rnn")
    equation = (
        "y_t = W_o sum_{j in C_t or j = t} p_tj v_j,  p_t = softmax_j(R_t q_t . R_j k_j / sqrt(K)),  "
        "C_{t+1} = C_t with t, without argmin_j sum_h p_tj of head h"
    )
    source = 'Oren et al., "Transformers are Multi-State RNNs", arXiv:2401.06104'
    state: ClassVar = MultiState
    sample: ClassVar = {"num_heads": 3, "window": 5}

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.FreeHeads = 8,
        num_kv_heads: Annotated[options.KeyValueHeads | None, "heads of keys and values; by default num_heads"] = None,
        head_dim: Annotated[options.HeadDim | None, "K, channels of a head; by default dim / num_heads"] = None,
        window: Annotated[options.Window, "M, rows of the cache"] = 512,
        variant: Annotated[
            Literal["tova", "window"],
            '"tova"; or "window", which drops the oldest row: a step sees itself and M before it',
        ] = "tova",
        rope_base: options.RopeBase = 10000.0,
        rope_fraction: options.RopeFraction = 1.0,
        bias: options.Bias = False,
    ) -> None:
        heads = num_heads if num_kv_heads is None else num_kv_heads
        super().__init__(dim, num_heads, heads, head_dim, window, rope_base, rope_fraction, bias, bias)
        self.variant = variant

    def run(  # pyright: ignore[reportIncompatibleMethodOverride]: the state of this attention is another
        self, x: Tensor, state: MultiState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, MultiState]:
        if cu_seqlens is not None:
            return each_alone(self.forward, x, state, cu_seqlens)
        start: MultiState = state or self.init_state(x.shape[0])
        if x.shape[1] == 0:
            return self.o_proj(self.q_proj(x)), start
        q, k, v = (
            widen(project(x)).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        places, _ = positions(start.position[:, None], x.shape[1])
        q, k = (rotate(tensor, places, self.rotated, self.rope_base) for tensor in (q, k))
        with as_widened(x):
            y, rows = _attended(
                q / math.sqrt(self.head_dim), k, v, start.rows.to(q.dtype), start.position, self.variant == "tova"
            )
        return self.o_proj(y.flatten(2).to(x.dtype)), MultiState(rows, start.position + x.shape[1])
