"""Short convolutions on a GPU: a thread does ROWS consecutive steps of a few neighbouring channels.

It reads the rows that these steps need once, all before it writes any, and holds them in registers. A token is read
1 + (W-1) / ROWS times, the second time from the first-level cache, and written once. Costs per token and channel: the
forward pass reads x, writes y and does W multiply-adds. The backward pass reads x and dy, writes dx and does 3 W
multiply-adds and one SiLU; a fraction (W-1) / ROWS of that work is done twice. dw and dbias are summed over a tile in
the kernel, and over tiles by torch: 4 (W+1) bytes per channel for every TILES * ROWS steps.

Steps count from a sequence's first input; the W-1 steps before it are the rows of its state. The kernels process these
too. So the gradient of the state is computed like the input's, and the last state is the last W-1 inputs, even if
a sequence is shorter than that.

Legend: p_ is a pointer, i_ an index, b_ a block. W taps; the state has the last W-1 = KEPT inputs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scanl.ops._triton._rows import rows, sigmoid
from scanl.ops._triton._tuned import HAS_SMALL_TILES

# ROWS: steps of a thread. TILES: pieces of ROWS steps of a program. CHANNELS: channels of a program.
ROWS, TILES, CHANNELS = (2, 8, 4) if HAS_SMALL_TILES else (8, 8, 128)
WARPS = 8  # four channels per thread


@triton.jit
def _place(p_table, length, tiles, width, KEPT: tl.constexpr, TABLE: tl.constexpr, ROWS: tl.constexpr,
           TILES: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """Return a program's sequence, its first row and number of steps, and the program's first step and channels."""
    blocks = tl.cdiv(width, CHANNELS)
    i_tile, i_block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    i_channel = i_block * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    i_step = tl.arange(0, TILES)[:, None] * ROWS - KEPT
    if TABLE:
        p = p_table + 4 * i_tile
        steps, i = tl.load(p + 2).to(tl.int32), tl.load(p + 3).to(tl.int32)
        return tl.load(p), tl.load(p + 1), steps, i_step + i * (TILES * ROWS), i_channel
    else:
        n = (i_tile // tiles).to(tl.int64)
        return n, n * length, length.to(tl.int32), i_step + i_tile % tiles * (TILES * ROWS), i_channel


@triton.jit
def _weights(p_w, p_bias, i_channel, there, WINDOW: tl.constexpr, dtype: tl.constexpr):
    """Return the weights of each tap, the oldest first, and the bias."""
    ws = ()
    for j in tl.static_range(WINDOW):
        ws += (tl.load(p_w + i_channel * WINDOW + j, mask=there, other=0.0).to(dtype),)
    b_bias = tl.zeros_like(ws[0])
    if p_bias is not None:
        b_bias += tl.load(p_bias + i_channel, mask=there, other=0.0).to(dtype)
    return ws, b_bias


@triton.jit
def _inputs(p_x, p_state, i_step, steps, x_row, width, i_channel, there, SIGN: tl.constexpr, KEPT: tl.constexpr,
            COUNT: tl.constexpr):  # fmt: skip
    """Load COUNT steps, from i_step - KEPT on; steps before the sequence come from its state."""
    xs = ()
    for r in tl.static_range(COUNT):
        i = i_step + (r - KEPT)
        p = p_x + SIGN * i.to(tl.int64) * x_row + i_channel
        b_x = tl.load(p, mask=there & (i >= 0) & (i < steps), other=0.0).to(p_state.dtype.element_ty)
        if KEPT:
            mask = there & (i < 0) & (i >= -KEPT)
            b_x += tl.load(p_state + (i + KEPT) * width + i_channel, mask=mask, other=0.0)
        xs += (b_x,)
    return xs


@triton.jit(do_not_specialize=["length", "tiles"])
def _forward(
    p_x, p_w, p_bias, p_state, p_y, p_last, p_table, length, tiles, x_row, width, WINDOW: tl.constexpr,
    SILU: tl.constexpr, REVERSE: tl.constexpr, TABLE: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    CHANNELS: tl.constexpr
):  # fmt: skip
    KEPT: tl.constexpr = WINDOW - 1
    SIGN: tl.constexpr = -1 if REVERSE else 1
    n, begin, steps, i_step, i_channel = _place(p_table, length, tiles, width, KEPT, TABLE, ROWS, TILES, CHANNELS)
    there = i_channel < width
    first = begin + steps - 1 if REVERSE else begin
    ws, b_bias = _weights(p_w, p_bias, i_channel, there, WINDOW, p_state.dtype.element_ty)
    p_state += n * KEPT * width
    xs = _inputs(p_x + first * x_row, p_state, i_step, steps, x_row, width, i_channel, there, SIGN, KEPT, KEPT + ROWS)
    for r in tl.static_range(ROWS):
        i = i_step + r
        mask = there & (i < steps)
        b_y = b_bias
        for j in tl.static_range(WINDOW):
            b_y += ws[j] * xs[r + j]
        if SILU:
            b_y *= sigmoid(b_y)
        tl.store(p_y + (first + SIGN * i.to(tl.int64)) * width + i_channel, b_y, mask=mask & (i >= 0))
        if KEPT:
            i_last = i - steps + KEPT
            tl.store(p_last + (n * KEPT + i_last) * width + i_channel, xs[r + KEPT], mask=mask & (i_last >= 0))


@triton.jit(do_not_specialize=["length", "tiles"])
def _backward(
    p_dy, p_dlast, p_x, p_w, p_bias, p_state, p_dx, p_dw, p_dbias, p_dstate, p_table, length, tiles, dy_row, x_row,
    width, WINDOW: tl.constexpr, SILU: tl.constexpr, REVERSE: tl.constexpr, TABLE: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """Compute dx_t = Σ_j w_{W-1-j} ds_{t+j}, ds = dy SiLU'(s), with s, the value before SiLU, recomputed."""
    KEPT: tl.constexpr = WINDOW - 1
    SIGN: tl.constexpr = -1 if REVERSE else 1
    COUNT: tl.constexpr = (2 * KEPT if SILU else KEPT) + ROWS
    n, begin, steps, i_step, i_channel = _place(p_table, length, tiles, width, KEPT, TABLE, ROWS, TILES, CHANNELS)
    there = i_channel < width
    first = begin + steps - 1 if REVERSE else begin
    dtype: tl.constexpr = p_state.dtype.element_ty
    ws, b_bias = _weights(p_w, p_bias, i_channel, there, WINDOW, dtype)
    p_state += n * KEPT * width
    xs = _inputs(p_x + first * x_row, p_state, i_step, steps, x_row, width, i_channel, there, SIGN, KEPT, COUNT)
    ds = ()
    for r in tl.static_range(KEPT + ROWS):
        i = i_step + r
        p = p_dy + (first + SIGN * i.to(tl.int64)) * dy_row + i_channel
        ds += (tl.load(p, mask=there & (i >= 0) & (i < steps), other=0.0).to(dtype),)
    if SILU:
        dys, ds = ds, ()
        for r in tl.static_range(KEPT + ROWS):
            b_s = b_bias
            for j in tl.static_range(WINDOW):
                b_s += ws[j] * xs[r + j]
            b_gate = sigmoid(b_s)
            ds += (dys[r] * b_gate * (1 + b_s * (1 - b_gate)),)
    i_sum = tl.program_id(0) // tl.cdiv(width, CHANNELS)
    for j in tl.static_range(WINDOW):
        b_dw = ds[0] * xs[j]
        for r in tl.static_range(1, ROWS):
            b_dw += ds[r] * xs[r + j]
        tl.store(p_dw + (i_sum * WINDOW + j) * width + i_channel, tl.sum(b_dw, 0, keep_dims=True), mask=there)
    if p_bias is not None:
        b_dbias = ds[0]
        for r in tl.static_range(1, ROWS):
            b_dbias += ds[r]
        tl.store(p_dbias + i_sum * width + i_channel, tl.sum(b_dbias, 0, keep_dims=True), mask=there)
    for r in tl.static_range(ROWS):
        i = i_step + r
        mask = there & (i < steps)
        b_dx = ws[KEPT] * ds[r]
        for j in tl.static_range(1, WINDOW):
            b_dx += ws[KEPT - j] * ds[r + j]
        if KEPT:
            i_last = i - steps + KEPT
            p = p_dlast + (n * KEPT + i_last) * width + i_channel
            b_dx += tl.load(p, mask=mask & (i_last >= 0), other=0.0)
            tl.store(p_dstate + (n * KEPT + KEPT + i) * width + i_channel, b_dx, mask=mask & (i < 0))
        tl.store(p_dx + (first + SIGN * i.to(tl.int64)) * width + i_channel, b_dx, mask=mask & (i >= 0))


class _Plan:
    """Launch parameters for operands of given sizes."""

    def __init__(self, x: Tensor, w: Tensor, state: Tensor, cu_seqlens: Tensor | None, *, reverse: bool, silu: bool):
        batch, length, width = x.shape
        history, size = w.shape[1] - 1, TILES * ROWS
        tiles = triton.cdiv(length + history, size)
        self.table, self.count = None, batch * tiles
        if cu_seqlens is not None:
            sequences = len(cu_seqlens) - 1
            self.count = (
                length + history * sequences
            ) // size + sequences  # upper bound; surplus ones are past the end
            offsets = cu_seqlens.long()
            steps = offsets.diff()
            tile_counts = (steps + (history + size - 1)) // size
            end = tile_counts.cumsum(0)
            i = torch.arange(self.count, device=x.device)
            n = torch.searchsorted(end, i, right=True).clamp(max=sequences - 1)
            self.table = torch.stack([n, offsets[n], steps[n], i - (end - tile_counts)[n]], 1)
        self.numbers = (self.table, length, tiles)
        channels = min(CHANNELS, triton.next_power_of_2(width))
        self.grid = (self.count * triton.cdiv(width, channels),)
        self.flags = {
            "WINDOW": w.shape[1],
            "SILU": silu,
            "REVERSE": reverse,
            "TABLE": self.table is not None,
            "ROWS": ROWS,
            "TILES": TILES,
            "CHANNELS": channels,
            "num_warps": WARPS,
            "enable_fp_fusion": True,
        }

    def launch(self, kernel: Any, *arguments: Any) -> None:
        with torch.cuda.device_of(arguments[0]):
            kernel[self.grid](*arguments, **self.flags)


def forward(x, w, bias, state, reverse, cu_seqlens, silu):
    y, last = (torch.empty_like(v, memory_format=torch.contiguous_format) for v in (x, state))
    if x.numel() == 0:
        return y, last.copy_(state)
    plan = _Plan(x, w, state, cu_seqlens, reverse=reverse, silu=silu)
    (x, x_row), bias = rows(x), None if bias is None else bias.contiguous()
    plan.launch(_forward, x, w.contiguous(), bias, state.contiguous(), y, last, *plan.numbers, x_row, x.shape[2])
    return y, last


def backward(dy, dlast, x, w, bias, state, reverse, cu_seqlens, silu):
    if x.numel() == 0:
        return [*[torch.zeros_like(value) for value in (x, w, bias) if value is not None], dlast.clone()]
    plan = _Plan(x, w, state, cu_seqlens, reverse=reverse, silu=silu)
    width, window = w.shape
    dx, dstate = (torch.empty_like(v, memory_format=torch.contiguous_format) for v in (x, state))
    dw, dbias = state.new_empty(plan.count, window, width), state.new_empty(plan.count, width)
    (dy, dy_row), (x, x_row), bias = rows(dy), rows(x), None if bias is None else bias.contiguous()
    operands = (dy, dlast.contiguous(), x, w.contiguous(), bias, state.contiguous())
    plan.launch(_backward, *operands, dx, dw, dbias, dstate, *plan.numbers, dy_row, x_row, width)
    gradients = [dx, dw.sum(0).mT.contiguous().to(w.dtype)]
    return [*gradients, *([] if bias is None else [dbias.sum(0).to(bias.dtype)]), dstate]
