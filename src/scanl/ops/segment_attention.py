r"""Sliding-window softmax attention that can be continued from a memory of fixed size.

.. math:: y_t = \sum_{j=t-W+1}^{t} \frac{e^{\,c\, q_t^\top k_j}}{\sum_{i=t-W+1}^{t} e^{\,c\, q_t^\top k_i}}\, v_j,
   \qquad j \ge 0

Differs: every query sees W tokens, itself included, so the
results do not depend on where a sequence is cut into segments. In Transformer-XL every token of a segment sees the
whole memory. Gradients flow through the memory unless the caller detaches it.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from scanl.errors import ConfigError
from scanl.ops._attention import softmax_attention
from scanl.ops._frame.declaration import FLOATING, HALF_DTYPES, Call, OpSample
from scanl.ops._frame.draws import Draws
from scanl.ops._frame.nonfinite import faulty, replaced, suspected
from scanl.ops._frame.op import op
from scanl.ops._matrix_memory import scale_of
from scanl.ops.offsets import offsets

_BLOCK = 64  # shorter query blocks cost more in calls than they save by reading fewer keys


class SegmentMemory(NamedTuple):
    """The last W tokens of every row, in a ring: the token at position p is in slot p mod W."""

    keys: Tensor  # (B, W, G, K)
    values: Tensor  # (B, W, G, V)
    position: Tensor  # (B,), int64: the number of tokens read so far, i.e. the position of the next token


def init_memory(
    batch_size: int,
    window: int,
    heads: int,
    key_size: int,
    value_size: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> SegmentMemory:
    """Return an empty memory. heads: G, the number of heads of the keys and values."""
    return SegmentMemory(
        torch.zeros(batch_size, window, heads, key_size, device=device, dtype=dtype),
        torch.zeros(batch_size, window, heads, value_size, device=device, dtype=dtype),
        torch.zeros(batch_size, device=device, dtype=torch.int64),
    )


def _form(
    sizes: Mapping[str, Any], options: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> SegmentMemory:
    """Return an empty memory."""
    B, G, K, V = (sizes[axis] for axis in "BGKV")
    return init_memory(B, options["window"], G, K, V, device=device, dtype=dtype)


def _check(operands: Mapping[str, Any], options: Mapping[str, Any], cu_seqlens: Tensor | None) -> None:
    """Check the options against each other and against the operands."""
    window = options["window"]
    if not isinstance(window, int) or window < 1:
        raise ConfigError(f"segment_attention: window is {window!r}, expected an integer of at least 1")
    if operands["mask"] is not None and cu_seqlens is not None:
        raise ConfigError(
            "segment_attention: mask is given with cu_seqlens or starts, expected one: packed sequences have no padding"
        )
    if options["overwrite"] and torch.is_grad_enabled():
        tensors = (operands["q"], operands["k"], operands["v"], *(operands["memory"] or ()))
        if any(isinstance(value, Tensor) and value.requires_grad for value in tensors):
            raise ConfigError("segment_attention: overwrite is True, expected False because gradients are recorded")


@op(
    "q: B T H K, k: B T G K, v: B T G V, mask?: bool B T, memory: tree -> B T H V",
    id="P-segattn",
    equation="y_t = sum_j softmax_j(scale q_t^T k_j) v_j,  t - W < j <= t",
    source=(
        'Beltagy, Peters and Cohan, "Longformer", arXiv:2004.05150, section 3.1; the memory carried between '
        'segments: Dai et al., "Transformer-XL", arXiv:1901.02860, section 3.2; beside a recurrence: De et al., '
        '"Griffin", arXiv:2402.19427, section 2.3; query heads that share a key head: Ainslie et al., "GQA", '
        "arXiv:2305.13245"
    ),
    neutral={},
    values="v",
    dtypes=HALF_DTYPES + FLOATING,
    divides={"G": "H"},
    form=_form,
    check=_check,
    widens=False,
    excused={
        "a wide state": "the memory keeps keys and values as they are, in their own dtype; nothing is summed",
    },
)
def segment_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: SegmentMemory | None = None,
    *,
    window: int,
    scale: float | None = None,
    mask: Tensor | None = None,
    overwrite: bool = False,
    **call: Unpack[Call],
) -> tuple[Tensor, SegmentMemory]:
    """Attend from each token to itself and the window - 1 tokens before it, in this segment and in the memory.

    q: (B, T, H, K).   k: (B, T, G, K), v: (B, T, G, V), where G divides H: query head h reads key head h // (H / G),
    without copies.   memory: the tokens before this segment; None when there are none.
    window: W, how many tokens a query sees, itself included.   scale: of the scores; 1/sqrt(K) when None.
    mask: (B, T) bool, False for padding, at any position. A padded token is not read, and its output is zero.
    cu_seqlens: offsets (N+1,) of N sequences packed into one row (B == 1), each with its own row of `memory`.
    overwrite: at T = 1, write the new token into the tensors of `memory` instead of into a copy. The memory passed in
    must not be used again. This works only where no gradient is recorded.

    Returns y, (B, T, H, V), and the memory, whose size does not depend on T. Keys and values keep their dtype.
    The op encodes no positions; the caller may. The first token of a row has position memory.position (0 when None);
    each following token adds 1, except padding. Raises ShapeError for a wrong shape, dtype or device, ConfigError for
    options that do not fit.

    Time and memory are O(T W). On a CPU many scores of float32 are computed by our kernel, and half precision as
    float32; other blocks of about W queries go through torch's scaled_dot_product_attention. float64 has second
    derivatives, and what our kernel computes; torch's fused kernels, for other dtypes, raise for them.

    >>> q = torch.zeros(1, 4, 1, 1)  # scores of zero: the mean of what is seen
    >>> v = torch.tensor([2.0, 4.0, 6.0, 8.0]).view(1, 4, 1, 1)
    >>> y, memory = segment_attention(q, q, v, window=2)
    >>> y.flatten().tolist()  # 2; (2+4)/2; (4+6)/2; (6+8)/2
    [2.0, 3.0, 5.0, 7.0]
    >>> y, memory = segment_attention(q[:, :1], q[:, :1], v[:, :1], memory, window=2)  # (8+2)/2
    >>> y.item(), memory.position.tolist(), memory.values.flatten().tolist()  # position 4 in slot 0, 3 in slot 1
    (5.0, [5], [2.0, 8.0])
    """
    if memory is None:
        memory = init_memory(q.shape[0], window, k.shape[2], k.shape[3], v.shape[3], device=k.device, dtype=k.dtype)
    keys, values, position = memory
    scale, shared, ys = scale_of(q, scale), q.shape[2] // max(1, k.shape[2]), []
    for t in range(q.shape[1]):
        valid = torch.ones_like(position, dtype=torch.bool) if mask is None else mask[:, t]
        written = (torch.arange(window, device=q.device) == (position % window)[:, None]) & valid[:, None]
        keys = torch.where(written[:, :, None, None], k[:, t : t + 1], keys)
        values = torch.where(written[:, :, None, None], v[:, t : t + 1], values)
        position = position + valid
        visible = ((_held(position, window) >= 0) | ~valid[:, None])[
            :, :, None
        ]  # a padded row sees all: output is unused
        query, key, value = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q[:, t], keys, values))
        scores = scale * torch.einsum("bhk,bwhk->bwh", query, key.repeat_interleave(shared, 2))
        weights = scores.masked_fill(~visible, -torch.inf).softmax(1)
        y = torch.einsum("bwh,bwhv->bhv", weights, value.repeat_interleave(shared, 2)).to(q.dtype)
        ys.append(torch.where(valid[:, None, None], y, 0))
    y = torch.stack(ys, 1) if ys else (q.sum() + v.sum()).expand(*q.shape[:3], v.shape[3])
    return y, SegmentMemory(keys, values, position)


@segment_attention.backend("parallel", dtypes=HALF_DTYPES + FLOATING, whole=True)
def _parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    memory: SegmentMemory | None,
    window: int,
    scale: float | None,
    overwrite: bool,
    reverse: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, SegmentMemory]:
    """Attend in blocks of about W queries, each over its own keys and the keys of the previous block."""
    batch, steps = q.shape[:2]
    if reverse:
        packed = None if cu_seqlens is None else steps - cu_seqlens.flip(0)
        q, k, v, mask = q.flip(1), k.flip(1), v.flip(1), None if mask is None else mask.flip(1)
        turned = memory if memory is None or packed is None else SegmentMemory(*(tensor.flip(0) for tensor in memory))
        options: dict[str, Any] = {"window": window, "scale": scale, "overwrite": overwrite}
        y, after = _parallel(q, k, v, mask=mask, memory=turned, reverse=False, cu_seqlens=packed, **options)
        return y.flip(1), after if packed is None else SegmentMemory(*(tensor.flip(0) for tensor in after))
    if memory is mask is cu_seqlens is None and steps > 1 and not torch.compiler.is_compiling():
        position = torch.full((batch,), steps, device=k.device)
        y = _attend_finite(q, k, v, None, window, scale)
        return y, SegmentMemory(_newest(k, window), _newest(v, window), position)
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    previous = memory or init_memory(rows, window, k.shape[2], k.shape[3], v.shape[3], device=k.device, dtype=k.dtype)
    if cu_seqlens is not None and (memory is not None or not torch.compiler.is_compiling()):
        return _each_alone(q, k, v, previous, memory is None, window, scale, cu_seqlens)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.long()
        start = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=steps)
        y = _attend_finite(q, k, v, None, window, scale, start)
        return y, _read(previous, k, v, cu_seqlens[:-1], cu_seqlens.diff(), window)
    if mask is not None:
        # Padding may hold anything. A NaN in it would survive a weight of zero, so replace it by zeros.
        q, k, v = (torch.where(mask[:, :, None, None], x, 0) for x in (q, k, v))
    if steps == 1:
        y, after = _step(q, k, v, previous, window, scale, mask, overwrite)
    elif mask is None:
        y = _attend_finite(q, k, v, memory, window, scale)
        first = steps * torch.arange(batch, device=q.device)
        after = _read(previous, k, v, first, torch.full_like(first, steps), window)
    else:
        # Move padding to the right, where no unpadded query sees it.
        order = mask.int().argsort(dim=1, descending=True, stable=True)[:, :, None, None]
        q, k, v = (x.take_along_dim(order, 1) for x in (q, k, v))
        y = _attend_finite(q, k, v, memory, window, scale).take_along_dim(order.argsort(1), 1)
        after = _read(previous, k, v, steps * torch.arange(batch, device=q.device), mask.sum(1), window)
    return (y if mask is None else torch.where(mask[:, :, None, None], y, 0)), after


def _held(position: Tensor, window: int) -> Tensor:
    """Return (B, W): the position of the token in each slot; negative for an empty slot."""
    last = position[:, None] - 1
    return last - (last - torch.arange(window, device=position.device)) % window


def _newest(tokens: Tensor, window: int) -> Tensor:
    """Return the ring (B, W, ...) after the tokens (B, T, ...) of new sequences."""
    steps = tokens.shape[1]
    if steps < window:
        return pad(tokens, (0, 0, 0, 0, 0, window - steps))
    return tokens[:, steps - window :].roll(steps % window, 1)


def _read(memory: SegmentMemory, k: Tensor, v: Tensor, first: Tensor, lengths: Tensor, window: int) -> SegmentMemory:
    """Return the memory after each row reads `lengths` tokens of the flat k and v, starting at `first`."""
    if k.shape[0] * k.shape[1] == 0:
        return memory
    position = memory.position + lengths
    index = _held(position, window) - memory.position[:, None]
    new = (index >= 0)[:, :, None, None]
    index = (first[:, None] + index.clamp_min(0)).clamp_max(k.shape[0] * k.shape[1] - 1)

    def ring(old: Tensor, tokens: Tensor) -> Tensor:
        gathered = tokens.flatten(0, 1).index_select(0, index.flatten()).view(*index.shape, *tokens.shape[2:])
        return torch.where(new, gathered, old)

    return SegmentMemory(ring(memory.keys, k), ring(memory.values, v), position)


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: SegmentMemory,
    window: int,
    scale: float | None,
    mask: Tensor | None,
    overwrite: bool,
) -> tuple[Tensor, SegmentMemory]:
    """Process one token: it replaces the token that leaves the window; the query attends to the ring unsorted."""
    slot = memory.position % window
    valid = torch.ones_like(slot, dtype=torch.bool) if mask is None else mask[:, 0]
    if overwrite:
        row = torch.arange(len(slot), device=slot.device)
        for old, token in ((memory.keys, k), (memory.values, v)):
            old[row, slot] = torch.where(valid[:, None, None], token[:, 0], old[row, slot])
        keys, values = memory.keys, memory.values
    else:
        written = (torch.arange(window, device=slot.device) == slot[:, None]) & valid[:, None]
        keys, values = (
            torch.where(written[:, :, None, None], new, old) for old, new in zip(memory, (k, v), strict=False)
        )
    position = memory.position + valid
    # A padded row that has read nothing sees the empty slots, since a softmax over nothing is undefined.
    visible = (_held(position, window) >= 0) | (position == 0)[:, None]
    y = _softmax(_wide(q), _wide(keys), _wide(values), visible[:, None], scale).to(q.dtype)
    if suspected(q):
        y = y * _of_queries(q)
    return y, SegmentMemory(keys, values, position)


def _attend_finite(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: SegmentMemory | None,
    window: int,
    scale: float | None,
    start: Tensor | None = None,
) -> Tensor:
    """Call `_attend` so that a token that is not finite makes NaN only of the queries that see it.

    Without this, a query that does not see the token multiplies it by a weight of zero, which gives NaN. A query that
    is not finite makes its own output NaN; torch's kernels would give zero where every score is -inf.
    """
    if not suspected(q, k, v, *(() if memory is None else memory[:2])):
        return _attend(q, k, v, memory, window, scale, start)
    t = torch.arange(q.shape[1], device=q.device)
    # For each value channel, the step of the latest fault at or before each step; step 0 is the segment's first.
    fault = faulty(v) | faulty(k).any(-1, keepdim=True)
    latest = torch.where(fault, t[:, None, None], -window).cummax(1).values
    if memory is not None:
        positions = _held(memory.position, window)
        fault = faulty(memory.values) | faulty(memory.keys).any(-1, keepdim=True)
        fault = fault & (positions >= 0)[:, :, None, None]
        age = (positions - memory.position[:, None])[:, :, None, None]
        latest = torch.maximum(latest, torch.where(fault, age, -window).amax(1, keepdim=True))
        memory = SegmentMemory(replaced(memory.keys), replaced(memory.values), memory.position)
    first = t - window if start is None else torch.maximum(t - window, start - 1)
    spoil = torch.where(latest > first[:, None, None], torch.nan, 1.0).to(q.dtype)
    y = _attend(q, replaced(k), replaced(v), memory, window, scale, start)
    spoil = spoil.repeat_interleave(q.shape[2] // max(1, k.shape[2]), 2)
    return y * spoil * _of_queries(q)


def _of_queries(q: Tensor) -> Tensor:
    """Return (B, T, H, 1): NaN for a query that is not finite, else 1. Multiplying by it makes the gradient NaN too."""
    return torch.where(faulty(q).any(-1, keepdim=True), torch.nan, 1.0).to(q.dtype)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: SegmentMemory | None,
    window: int,
    scale: float | None,
    start: Tensor | None = None,
) -> Tensor:
    """Attend over a segment. start: for packed tokens (B == 1), the first index of each token's sequence."""
    batch, steps = q.shape[:2]
    dtype = q.dtype
    q, k, v = _wide(q), _wide(k), _wide(v)  # before cutting into blocks, so that block gradients add up in float32
    if memory is None and start is None and steps <= window:
        # No token leaves the window, so no mask is needed; memory then does not grow with the square of the steps.
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return softmax_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2).to(dtype)
    t = torch.arange(steps, device=q.device)
    block = max(window - 1, _BLOCK)
    if steps <= 2 * block:
        visible = _band(t, t, window)
        if start is not None:
            visible = visible & (t >= start[:, None])
        visible = visible[None]
        if memory is not None:
            positions = _held(memory.position, window)[:, None]
            past = (positions >= 0) & (positions > memory.position[:, None, None] + t[:, None] - window)
            visible = torch.cat([past, visible.expand(batch, -1, -1)], 2)
            k, v = (torch.cat([old.to(x.dtype), x], 1) for old, x in zip(memory, (k, v), strict=False))
        return _softmax(q, k, v, visible, scale).to(dtype)
    # The first block sees the memory. Every other block sees itself and the block before it; they run in one call.
    begin = slice(0, block)
    y = _attend(q[:, begin], k[:, begin], v[:, begin], memory, window, scale, None if start is None else start[begin])
    blocks = -(-steps // block)
    q, k, v = (pad(x, (0, 0, 0, 0, 0, blocks * block - steps)).unflatten(1, (blocks, block)) for x in (q, k, v))
    k, v = (torch.cat([x[:, :-1], x[:, 1:]], 2).flatten(0, 1) for x in (k, v))
    t = torch.arange(2 * block, device=q.device)
    visible = _band(t[block:], t, window)[None]
    if start is not None:
        start = pad(start, (0, blocks * block - steps)).unflatten(0, (blocks, block))[1:]
        offset = block * torch.arange(blocks - 1, device=q.device)
        visible = visible & (t + offset[:, None, None] >= start[:, :, None])
    later = _softmax(q[:, 1:].flatten(0, 1), k, v, visible, scale)
    later = later.unflatten(0, (batch, blocks - 1)).flatten(1, 2)[:, : steps - block]
    return torch.cat([y, later], 1).to(dtype)


def _band(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Return a mask of the keys that each query sees, from their positions."""
    age = queries[:, None] - keys
    return (age >= 0) & (age < window)


def _softmax(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None) -> Tensor:
    """Attend from q (B, C, H, K) to k (B, S, G, K) where `visible` (B or 1, C, S).

    Query heads that use the same key head are treated as more queries of that head.
    """
    length, heads, shared = q.shape[1], k.shape[2], q.shape[2] // max(1, k.shape[2])
    q = q.unflatten(2, (heads, shared)).transpose(1, 2).flatten(2, 3)
    visible = visible if shared == 1 else visible.repeat_interleave(shared, 1)
    y = softmax_attention(q, k.transpose(1, 2), v.transpose(1, 2), visible, scale=scale)
    return y.unflatten(2, (length, shared)).transpose(1, 2).flatten(2, 3)


def _wide(x: Tensor) -> Tensor:
    """Widen half precision to float32 on a CPU. Kernels of accelerators accumulate in float32 already."""
    return x.float() if x.device.type == "cpu" and x.dtype.itemsize < 4 else x


def _each_alone(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: SegmentMemory,
    fresh: bool,
    window: int,
    scale: float | None,
    cu_seqlens: Tensor,
) -> tuple[Tensor, SegmentMemory]:
    """Attend within each packed sequence separately. fresh: the memories are empty."""
    bounds = offsets(cu_seqlens, q.shape[1], "segment_attention")
    parts = []
    for n, (i, j) in enumerate(itertools.pairwise(bounds)):
        alone = None if fresh else SegmentMemory(*(tensor[n : n + 1] for tensor in memory))
        more: dict[str, Any] = {"window": window, "scale": scale, "overwrite": False, "reverse": False}
        result = _parallel(q[:, i:j], k[:, i:j], v[:, i:j], mask=None, memory=alone, cu_seqlens=None, **more)
        parts.append(result)
    if not parts:
        return _attend(q, k, v, None, window, scale), memory
    memories = [after for _, after in parts]
    return torch.cat([y for y, _ in parts], 1), SegmentMemory(
        *(torch.cat(tensors) for tensors in zip(*memories, strict=True))
    )


@segment_attention.samples
def _samples() -> Iterator[OpSample]:
    draw = Draws()

    def some(batch: int, steps: int, heads: int, shared: int, key: int, value: int) -> dict[str, Tensor]:
        q, k = draw(batch, steps, heads, key), draw(batch, steps, shared, key)
        return {"q": q, "k": k, "v": draw(batch, steps, shared, value)}

    def memory(batch: int, window: int, shared: int, key: int, value: int) -> SegmentMemory:
        """Return a memory whose rows have read different numbers of tokens, unless there is only one row."""
        position = torch.arange(batch) * window // 2 + 1
        occupied = (_held(position, window) >= 0)[:, :, None, None]
        return SegmentMemory(
            draw(batch, window, shared, key) * occupied, draw(batch, window, shared, value) * occupied, position
        )

    yield OpSample({**some(2, 7, 2, 2, 3, 4), "memory": memory(2, 3, 2, 3, 4)}, {"window": 3})
    yield OpSample({**some(2, 5, 4, 2, 3, 2), "memory": memory(2, 8, 2, 3, 2)}, {"window": 8, "scale": 1.0})
    packed = {**some(1, 9, 4, 2, 3, 2), "memory": memory(3, 4, 2, 3, 2)}
    yield OpSample(packed, {"window": 4, "cu_seqlens": torch.tensor([0, 2, 2, 9])})


@segment_attention.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    q, k = torch.zeros(2, 4, 4, 3), torch.zeros(2, 4, 2, 3)
    operands = {"q": q, "k": k, "v": k}
    yield OpSample({**operands, "q": q[:, :, :3]}, {"window": 3}), "k has G=2, expected a divisor of H=3 from q"
    yield OpSample({**operands, "mask": torch.ones(2, 4)}, {"window": 3}), "mask is float32, expected bool"
    yield (
        OpSample({**operands, "mask": torch.ones(2, 3) > 0}, {"window": 3}),
        "mask has shape (2, 3), expected (B, T) with",
    )
    yield (
        OpSample({**operands, "memory": init_memory(2, 3, 2, 3, 3)}, {"window": 4}),
        "memory.keys has shape (2, 3, 2, 3), expected (2, 4, 2, 3) because of q, k, v, window",
    )
