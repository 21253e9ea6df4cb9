"""The linear scan on a GPU: a program goes along time for a block of channels, one tile (steps, channels) at a time.

Inside a tile an associative scan joins the steps, so all loads of the tile, and of the next tiles, are in flight at
once. The forward pass reads x, a and writes y. The backward pass is the scan in reverse time; it reads dy, a, y and
writes dx, da. If there are few channels and many steps, sequences are cut into pieces. A first pass computes the
(product, end) of each piece, a scan over these gives the state before each piece, and then all pieces run in parallel.
Then x and a (dy and a) are read twice.

Legend: features are `outer` groups of `inner` channels. In a group, `a` is one per channel or one for all channels, so
a broadcast `a` is never copied. p_ is a pointer, i_ an index, b_ a block. Complex numbers are pairs of reals. For a
real dtype the pair is (re, re), and the second number is never used.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import Config

from scanl.ops._triton._tuned import HAS_SMALL_TILES, tuned

# Bytes of one operand in a tile. Two operands of three tiles in flight fit well in shared memory. Triton's interpreter
# joins element by element, and in the small inputs it gets, most of a larger tile would be masked.
TILE = 128 if HAS_SMALL_TILES else 8192
WIDEST, NARROW = 128, 16  # most and least channels of a block; accesses are coalesced at least to sectors of 32 bytes
PROGRAMS = 512  # enough to fill a GPU; with fewer than half, narrow the blocks; with fewer than a quarter, cut time
MIN_PIECE_TILES = 8  # least tiles of a piece
_tuned = tuned(
    [Config({"STAGES": stages}, warps) for stages, warps in ((3, 4), (4, 4), (3, 8), (2, 2))],
    ("COMPLEX", "A_TIME", "A_INNER", "SUMMARY", "STEPS", "CHANNELS"),
)


@triton.jit
def _join(a, x, b, y):
    """Join two steps. Products of decays are double: each squaring doubles their relative error, up to T-fold."""
    return a * b, b.to(x.dtype) * x + y


@triton.jit
def _join_complex(ar, ai, xr, xi, br, bi, yr, yi):
    cr, ci = br.to(xr.dtype), bi.to(xr.dtype)
    return ar * br - ai * bi, ar * bi + ai * br, cr * xr - ci * xi + yr, cr * xi + ci * xr + yi


@triton.jit
def _scan(ar, ai, xr, xi, hr, hi, COMPLEX: tl.constexpr):
    """Scan a tile that starts from state h; return the products of a, and the states."""
    if COMPLEX:
        ar, ai, xr, xi = tl.associative_scan((ar, ai, xr, xi), 0, _join_complex)
        br, bi = ar.to(xr.dtype), ai.to(xr.dtype)
        return ar, ai, br * hr - bi * hi + xr, br * hi + bi * hr + xi
    else:
        ar, xr = tl.associative_scan((ar, xr), 0, _join)
        h = ar.to(xr.dtype) * hr + xr
        return ar, ar, h, h


@triton.jit
def _times(ar, ai, br, bi, COMPLEX: tl.constexpr):
    if COMPLEX:
        return ar * br - ai * bi, ar * bi + ai * br
    else:
        return ar * br, ar * br


@triton.jit
def _load(p, offsets, mask, dtype: tl.constexpr, COMPLEX: tl.constexpr):
    if COMPLEX:
        pair = tl.expand_dims(offsets, 2) * 2 + tl.arange(0, 2)[None, None, :]
        b = tl.load(p + pair, mask=tl.broadcast_to(tl.expand_dims(mask, 2), pair.shape), other=0.0)
        re, im = tl.split(b.to(dtype))
        return re, im
    else:
        b = tl.load(p + offsets, mask=mask, other=0.0).to(dtype)
        return b, b


@triton.jit
def _store(p, offsets, re, im, mask, COMPLEX: tl.constexpr):
    if COMPLEX:
        pair = tl.expand_dims(offsets, 2) * 2 + tl.arange(0, 2)[None, None, :]
        tl.store(p + pair, tl.join(re, im), mask=tl.broadcast_to(tl.expand_dims(mask, 2), pair.shape))
    else:
        tl.store(p + offsets, re, mask=mask)


@triton.jit
def _last(re, im, i_row, STEPS: tl.constexpr, COMPLEX: tl.constexpr):
    """Return the last row of a tile."""
    last = tl.sum(tl.where(i_row == STEPS - 1, re, 0.0), 0, keep_dims=True)
    if COMPLEX:
        return last, tl.sum(tl.where(i_row == STEPS - 1, im, 0.0), 0, keep_dims=True)
    else:
        return last, last


@triton.jit
def _over_channels(re, im, OWN: tl.constexpr, COMPLEX: tl.constexpr):
    """Sum the gradient of a over channels, unless each channel has its own a."""
    if OWN:
        return re, im
    elif COMPLEX:
        return tl.sum(re, 1, keep_dims=True), tl.sum(im, 1, keep_dims=True)
    else:
        total = tl.sum(re, 1, keep_dims=True)
        return total, total


@triton.jit
def range_of(n, p_table, length, a_batch, size, pieces, sequences, A_TIME: tl.constexpr, TABLE: tl.constexpr):
    """Return, for range n: first row, steps, first row of its a, and the rows of the carries before and after it.

    Without a table each sequence has as many pieces, of `size` steps but for the last.
    """
    if TABLE:
        p = p_table + 5 * n
        begin, steps = tl.load(p), tl.load(p + 1)
        return begin, steps.to(tl.int32), tl.load(p + 2), tl.load(p + 3), tl.load(p + 4)
    else:
        i_sequence = n // pieces
        i_step = (n - i_sequence * pieces) * size
        steps = tl.minimum(size, length - i_step).to(tl.int32)
        a_begin = i_sequence * a_batch + (i_step if A_TIME else 0)
        carry_before = tl.where(i_step == 0, i_sequence, sequences + n - 1)
        carry_after = tl.where(i_step + size >= length, i_sequence, sequences + n + 1)
        return i_sequence * length + i_step, steps, a_begin, carry_before, carry_after


@triton.jit
def _columns(p_a, i_block, i_outer, inner, a_outer, A_INNER: tl.constexpr, COMPLEX: tl.constexpr,
             CHANNELS: tl.constexpr):  # fmt: skip
    """Return a program's channels: a mask, their indices in x and in a row of a, and the index of their group's a."""
    pair: tl.constexpr = 2 if COMPLEX else 1
    i_inner = i_block * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    i_a = i_inner if A_INNER else tl.zeros((1, 1), tl.int32)
    return i_inner < inner, i_outer * inner + i_inner, i_a, p_a + i_outer.to(tl.int64) * a_outer * pair


@_tuned
@triton.jit(do_not_specialize=["length", "a_batch", "size", "pieces", "sequences", "outer", "blocks"])
def _forward(
    p_x, p_a, p_carry, p_y, p_last, p_table, length, a_batch, size, pieces, sequences, a_row, a_outer, outer, inner,
    blocks,
    REVERSE: tl.constexpr, TABLE: tl.constexpr, A_TIME: tl.constexpr, A_INNER: tl.constexpr,
    COMPLEX: tl.constexpr, SUMMARY: tl.constexpr, ADJOINT: tl.constexpr, STEPS: tl.constexpr,
    CHANNELS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Write y and the last state of each range. As a SUMMARY, start from zero, and write the product of a instead of y.

    The adjoint, used for the summary only, is the scan of conj(a) dy with conj(a).
    """
    i_unit = tl.program_id(0)
    i_block, i_outer, i_range = i_unit % blocks, i_unit // blocks % outer, (i_unit // blocks // outer).to(tl.int64)
    begin, steps, a_begin, carry_before, carry_after = range_of(
        i_range, p_table, length, a_batch, size, pieces, sequences, A_TIME, TABLE
    )
    width = outer * inner
    dtype: tl.constexpr = p_carry.dtype.element_ty
    pair: tl.constexpr = 2 if COMPLEX else 1
    sign: tl.constexpr = -1 if REVERSE else 1
    first = begin + steps - 1 if REVERSE else begin
    a_first = a_begin + steps - 1 if REVERSE and A_TIME else a_begin

    i_row = tl.arange(0, STEPS)[:, None]
    there, i_channel, i_a, p_a = _columns(p_a, i_block, i_outer, inner, a_outer, A_INNER, COMPLEX, CHANNELS)
    if not A_TIME:
        b_constant_re, b_constant_im = _load(p_a + a_first * a_row * pair, i_a, i_a < inner, tl.float64, COMPLEX)

    if SUMMARY:
        b_h_re = tl.zeros((1, CHANNELS), dtype)
        b_h_im = b_h_re
        b_p_im = tl.zeros((1, CHANNELS), tl.float64)
        b_p_re = b_p_im + 1
    else:
        p_h = p_carry + (carry_after if REVERSE else carry_before) * width * pair
        b_h_re, b_h_im = _load(p_h, i_channel, there, dtype, COMPLEX)
    for i in tl.range(0, steps, STEPS, num_stages=STAGES):
        live = i + i_row < steps
        mask = live & there
        i_x = sign * i_row * width + i_channel
        p_at = (first + sign * i) * width * pair
        b_x_re, b_x_im = _load(p_x + p_at, i_x, mask, dtype, COMPLEX)
        if A_TIME:
            p_decay = p_a + (a_first + sign * i) * a_row * pair
            b_a_re, b_a_im = _load(p_decay, sign * i_row * a_row + i_a, live & (i_a < inner), tl.float64, COMPLEX)
        else:
            b_a_re, b_a_im = b_constant_re, b_constant_im
        b_a_re = tl.where(mask, b_a_re, 1.0)  # masked steps leave the state unchanged
        b_a_im = tl.where(mask, b_a_im, 0.0)
        if ADJOINT:
            b_a_im = -b_a_im
            b_x_re, b_x_im = _times(b_a_re.to(dtype), b_a_im.to(dtype), b_x_re, b_x_im, COMPLEX)
        b_a_re, b_a_im, b_y_re, b_y_im = _scan(b_a_re, b_a_im, b_x_re, b_x_im, b_h_re, b_h_im, COMPLEX)
        b_h_re, b_h_im = _last(b_y_re, b_y_im, i_row, STEPS, COMPLEX)
        if SUMMARY:
            b_a_re, b_a_im = _last(b_a_re, b_a_im, i_row, STEPS, COMPLEX)
            b_p_re, b_p_im = _times(b_p_re, b_p_im, b_a_re, b_a_im, COMPLEX)
        else:
            _store(p_y + p_at, i_x, b_y_re, b_y_im, mask, COMPLEX)
    p_out = i_range * width * pair
    _store(p_last + p_out, i_channel, b_h_re, b_h_im, there, COMPLEX)
    if SUMMARY:
        _store(p_y + p_out, i_channel, b_p_re, b_p_im, there, COMPLEX)


@_tuned
@triton.jit(do_not_specialize=["length", "a_batch", "size", "pieces", "sequences", "outer", "blocks"])
def _backward(
    p_dy, p_a, p_y, p_carry, p_state, p_dx, p_da, p_dstate, p_table, length, a_batch, size, pieces, sequences, a_row,
    a_outer, outer, inner, blocks, REVERSE: tl.constexpr, TABLE: tl.constexpr, A_TIME: tl.constexpr,
    A_INNER: tl.constexpr, COMPLEX: tl.constexpr, STEPS: tl.constexpr, CHANNELS: tl.constexpr,
    STAGES: tl.constexpr
):  # fmt: skip
    """Compute the gradient of the state, d_t = dy_t + conj(a_u) d_u, u the step after t, and from it dx and da.
    dx_t = d_t, da_t = d_t conj(h before t).
    """
    i_unit = tl.program_id(0)
    i_block, i_outer, i_range = i_unit % blocks, i_unit // blocks % outer, (i_unit // blocks // outer).to(tl.int64)
    begin, steps, a_begin, carry_before, carry_after = range_of(
        i_range, p_table, length, a_batch, size, pieces, sequences, A_TIME, TABLE
    )
    width = outer * inner
    dtype: tl.constexpr = p_carry.dtype.element_ty
    pair: tl.constexpr = 2 if COMPLEX else 1
    sign: tl.constexpr = 1 if REVERSE else -1
    first = begin if REVERSE else begin + steps - 1
    a_first = a_begin + steps - 1 if A_TIME and not REVERSE else a_begin
    start = (
        carry_after if REVERSE else carry_before
    )  # the carry before the scan's first step, which is processed last here

    i_row = tl.arange(0, STEPS)[:, None]
    there, i_channel, i_a, p_a = _columns(p_a, i_block, i_outer, inner, a_outer, A_INNER, COMPLEX, CHANNELS)
    if not A_TIME:
        b_constant_re, b_constant_im = _load(p_a + a_first * a_row * pair, i_a, i_a < inner, tl.float64, COMPLEX)
    zero = tl.zeros((1, 1), tl.int32)
    i_da = i_channel if A_INNER else i_outer * blocks + i_block + zero
    da_there = there if A_INNER else i_a == 0
    da_width = width if A_INNER else outer * blocks

    within, some = start + zero >= sequences, steps + zero > 0  # triton 3.9.0's interpreter needs blocks as masks
    b_state_re, b_state_im = _load(p_state + start * width * pair, i_channel, there & ~within, dtype, COMPLEX)
    b_c_re, b_c_im = _load(
        p_carry + (carry_before if REVERSE else carry_after) * width * pair, i_channel, there, dtype, COMPLEX
    )
    b_sum_re = tl.zeros((1, CHANNELS), dtype)
    b_sum_im = b_sum_re
    for i in tl.range(0, steps, STEPS, num_stages=STAGES):
        step = i + i_row
        live = step < steps
        mask = live & there
        i_x = sign * i_row * width + i_channel
        p_at = (first + sign * i) * width * pair
        b_dy_re, b_dy_im = _load(p_dy + p_at, i_x, mask, dtype, COMPLEX)
        to_come = mask & (within | (step + 1 < steps))
        b_h_re, b_h_im = _load(p_y + p_at + sign * width * pair, i_x, to_come, dtype, COMPLEX)
        b_h_re = tl.where(to_come, b_h_re, b_state_re)
        b_h_im = tl.where(to_come, b_h_im, b_state_im)
        decayed = live & (step > 0)  # the carry that enters a range has been decayed already
        if A_TIME:
            p_decay = p_a + (a_first + sign * (i - 1)) * a_row * pair
            b_a_re, b_a_im = _load(p_decay, sign * i_row * a_row + i_a, decayed & (i_a < inner), tl.float64, COMPLEX)
        else:
            b_a_re, b_a_im = b_constant_re, b_constant_im
        b_a_re = tl.where(decayed & there, b_a_re, 1.0)
        b_a_im = -tl.where(decayed & there, b_a_im, 0.0)
        b_a_re, b_a_im, b_d_re, b_d_im = _scan(b_a_re, b_a_im, b_dy_re, b_dy_im, b_c_re, b_c_im, COMPLEX)
        b_c_re, b_c_im = _last(b_d_re, b_d_im, i_row, STEPS, COMPLEX)
        _store(p_dx + p_at, i_x, b_d_re, b_d_im, mask, COMPLEX)
        b_da_re, b_da_im = _times(b_d_re, b_d_im, b_h_re, -b_h_im, COMPLEX)
        b_da_re = tl.where(mask, b_da_re, 0.0)
        b_da_im = tl.where(mask, b_da_im, 0.0)
        if A_TIME:
            b_da_re, b_da_im = _over_channels(b_da_re, b_da_im, A_INNER, COMPLEX)
            p_to = p_da + (first + sign * i) * da_width * pair
            _store(p_to, sign * i_row * da_width + i_da, b_da_re, b_da_im, live & da_there, COMPLEX)
        else:
            b_sum_re += tl.sum(b_da_re, 0, keep_dims=True)
            b_sum_im = b_sum_im + tl.sum(b_da_im, 0, keep_dims=True) if COMPLEX else b_sum_re
    if not A_TIME:
        b_sum_re, b_sum_im = _over_channels(b_sum_re, b_sum_im, A_INNER, COMPLEX)
        _store(p_da + i_range * da_width * pair, i_da, b_sum_re, b_sum_im, da_there, COMPLEX)
    if A_TIME:
        p_decay = p_a + (a_first + sign * (steps - 1)) * a_row * pair
        b_a_re, b_a_im = _load(p_decay, i_a, (i_a < inner) & some, dtype, COMPLEX)
    else:
        b_a_re, b_a_im = b_constant_re.to(dtype), b_constant_im.to(dtype)
    # A surplus range has no carry: what lies in memory there is not multiplied.
    b_d_re, b_d_im = _times(b_a_re, -b_a_im, tl.where(some, b_c_re, 0.0), tl.where(some, b_c_im, 0.0), COMPLEX)
    b_d_re = tl.where(some, b_d_re, b_c_re)
    b_d_im = tl.where(some, b_d_im, b_c_im)
    _store(p_dstate + i_range * width * pair, i_channel, b_d_re, b_d_im, there, COMPLEX)


class _Layout(NamedTuple):
    """The memory layout of the features of x and a."""

    a_features: tuple[int, ...]  # the features of a, expanded over as few axes as the kernels need
    split: int  # features from this axis on are the inner ones
    outer: int
    inner: int
    shared: bool  # one a for all inner channels
    a_row: int  # stride of a from step to step
    a_outer: int  # stride of a from group to group


@functools.lru_cache(512)
def _layout(features: tuple[int, ...], a_features: tuple[int, ...]) -> _Layout:
    wide = [i for i, size in enumerate(features) if size != 1]
    shared = bool(wide) and a_features[wide[-1]] == 1
    split = max((i + 1 for i in wide if (a_features[i] == 1) != shared), default=0)
    grouped = math.prod(a_features[:split]) > 1
    if grouped:
        a_features = features[:split] + a_features[split:]
    inner = math.prod(features[split:])
    a_outer = (1 if shared else inner) if grouped else 0
    return _Layout(a_features, split, math.prod(features[:split]), inner, shared, math.prod(a_features), a_outer)


class Ranges(NamedTuple):
    """The ranges of (B T) rows that programs process: whole sequences, or pieces of them."""

    count: int
    sequences: int
    size: int  # steps of a piece; all steps of whole sequences
    pieces: int = 1  # of each sequence, if there is no table
    table: Tensor | None = None  # of packed sequences, as `range_of` reads it
    cut: Tensor | None = None  # offsets of each packed sequence's pieces in the list of pieces

    @property
    def whole(self) -> bool:
        """Whether no sequence is cut."""
        return self.count == self.sequences

    @property
    def joined(self) -> tuple[int, int]:
        """B and T of a scan over the pieces of each sequence: packed by `cut`, if there is a table."""
        return (self.sequences, self.pieces) if self.table is None else (1, self.count)


def ranges_of(x: Tensor, a_time: bool, cu_seqlens: Tensor | None, size: int) -> Ranges:
    """Return pieces of `size` steps, or whole sequences if `size` is 0, without synchronising the GPU."""
    batch, length = x.shape[:2]
    if cu_seqlens is None:
        pieces = triton.cdiv(length, size) if size else 1
        return Ranges(batch * pieces, batch, size or length, pieces)
    offsets, n = cu_seqlens.long(), len(cu_seqlens) - 1
    count = length // size + n if size else n  # an upper bound; the surplus pieces are empty
    begin, end = offsets[:-1], offsets[1:]
    pieces = (end - begin + size - 1) // size if size else torch.ones_like(begin)
    cut = torch.cat([pieces.new_zeros(1), pieces.cumsum(0)])
    i = torch.arange(count, device=x.device)
    owner = torch.searchsorted(cut[1:], i, right=True).clamp(max=n - 1)
    first = begin[owner] + (i - cut[owner]) * size
    last = torch.minimum(first + size, end[owner]) if size else end[owner]
    carry_before = torch.where(i == cut[owner], owner, n + i - 1)
    carry_after = torch.where(i == cut[owner + 1] - 1, owner, n + i + 1).clamp(max=n + count - 1)
    a_first = first if a_time else torch.zeros_like(first)
    table = torch.stack([first, (last - first).clamp(min=0), a_first, carry_before, carry_after], 1)
    return Ranges(count, n, size, 1, table, cut if size else None)


class _Plan:
    """Launch parameters for operands of given sizes."""

    def __init__(self, x: Tensor, a: Tensor, state: Tensor, cu_seqlens: Tensor | None, *, uncut: bool = False):
        batch, length, *features = x.shape
        a_shape = (1,) * (x.ndim - a.ndim) + a.shape
        self.layout = _layout(tuple(features), a_shape[2:])
        self.a = a.expand(*a_shape[:2], *self.layout.a_features).contiguous()
        self.a_time = a_shape[1] != 1
        a_batch = a_shape[1] if a_shape[0] > 1 else 0
        outer, inner = self.layout.outer, self.layout.inner
        channels = min(WIDEST, triton.next_power_of_2(inner))
        while channels > NARROW and len(state) * outer * triton.cdiv(inner, channels) < PROGRAMS // 2:
            channels //= 2
        self.blocks = triton.cdiv(inner, channels)
        steps = max(TILE // (channels * state.itemsize), 4)
        while steps * outer * inner >= 2**30:  # offsets inside a tile have 32 bits
            steps //= 2
        size = max(triton.cdiv(batch * length * outer * self.blocks, PROGRAMS * steps), MIN_PIECE_TILES) * steps
        size = 0 if uncut or 4 * size > length else size
        self.ranges = ranges_of(x, self.a_time, cu_seqlens, size)
        ranges = (self.ranges.size, self.ranges.pieces, self.ranges.sequences)
        self.numbers = (length, a_batch, *ranges, self.layout.a_row, self.layout.a_outer, outer, inner, self.blocks)
        self.flags = {
            "TABLE": self.ranges.table is not None,
            "A_TIME": self.a_time,
            "A_INNER": not self.layout.shared,
            "COMPLEX": x.is_complex(),
            "STEPS": steps,
            "CHANNELS": channels,
            "enable_fp_fusion": True,
        }

    def launch(self, kernel: Any, *operands: Any, **flags: bool) -> None:
        pointers = [torch.view_as_real(p) if isinstance(p, Tensor) and p.is_complex() else p for p in operands]
        with torch.cuda.device_of(self.a):
            grid = (self.ranges.count * self.layout.outer * self.blocks,)
            kernel[grid](*pointers, **flags, **self.flags)

    def forward(self, x: Tensor, carry: Tensor, y: Tensor, last: Tensor, **flags: bool) -> None:
        self.launch(_forward, x, self.a, carry, y, last, self.ranges.table, *self.numbers, **flags)

    def enter(self, x: Tensor, carry: Tensor, *, reverse: bool, adjoint: bool = False) -> tuple[Tensor, Tensor]:
        """Return the carries before the sequences and after each piece, and the carries after each sequence."""
        ends = carry.new_empty(self.ranges.count, *carry.shape[1:])
        products = torch.empty_like(ends, dtype=torch.promote_types(ends.dtype, torch.float64))
        self.forward(x, carry, products, ends, REVERSE=reverse, SUMMARY=True, ADJOINT=adjoint)
        states, exit_state, joined = torch.empty_like(ends), torch.empty_like(carry), self.ranges.joined
        ends, products = (value.view(*joined, *carry.shape[1:]) for value in (ends, products))
        over = _Plan(ends, products, carry, self.ranges.cut, uncut=True)
        over.forward(ends, carry, states, exit_state, REVERSE=reverse, SUMMARY=False, ADJOINT=False)
        return torch.cat([carry, states]), exit_state


def forward(x, a, state, reverse, cu_seqlens):
    x, state = x.contiguous(), state.contiguous()
    y = torch.empty_like(x)
    if state.numel() == 0:
        return y, state.clone()
    plan = _Plan(x, a, state, cu_seqlens)
    last = state.new_empty(plan.ranges.count, *state.shape[1:])
    if plan.ranges.whole:
        plan.forward(x, state, y, last, REVERSE=reverse, SUMMARY=False, ADJOINT=False)
        return y, last
    carry, exit_state = plan.enter(x, state, reverse=reverse)
    plan.forward(x, carry, y, last, REVERSE=reverse, SUMMARY=False, ADJOINT=False)
    return y, exit_state


def backward(dy, dlast, a, y, state, reverse, cu_seqlens):
    dy, dlast, y, state = dy.contiguous(), dlast.contiguous(), y.contiguous(), state.contiguous()
    dx = torch.empty_like(dy)
    if state.numel() == 0:
        return [dx, torch.zeros_like(a), dlast.clone()]
    plan = _Plan(dy, a, state, cu_seqlens)
    (batch, length, *features), layout, count = dy.shape, plan.layout, plan.ranges.count
    rows = length if plan.a_time else count // batch
    da_shape = (batch, rows, layout.outer, plan.blocks if layout.shared else layout.inner)
    da = torch.empty(da_shape, dtype=dy.dtype if math.prod(da_shape) == a.numel() else state.dtype, device=dy.device)
    carry, dstate = dlast, state.new_empty(count, *state.shape[1:])
    exit_state = dstate
    if not plan.ranges.whole:
        carry, exit_state = plan.enter(dy, dlast, reverse=not reverse, adjoint=True)
    pointers = (dy, plan.a, y, carry, state, dx, da, dstate, plan.ranges.table)
    plan.launch(_backward, *pointers, *plan.numbers, REVERSE=reverse)
    if layout.shared:
        da = da.sum(-1)
    tail = [1 if layout.shared else size for size in features[layout.split :]]
    da = da.view(batch, rows, *features[: layout.split], *tail)
    da = da.sum_to_size((1,) * (da.ndim - a.ndim) + a.shape).view(a.shape)
    return [dx, da.to(a.dtype), exit_state]
