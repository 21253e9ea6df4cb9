"""The weighted average on a GPU: a thread goes along time for one channel of a sequence, with p, z and m in float64.

Weights are computed in the operands' dtype, with one exponential per step and one more with a bonus. The past's weight
a is stored as 1 - a. So a sum of a million terms, or a decay of 1e-6 per step, is as exact as its terms. This is a
reason not to use an associative scan, which would also need two exponentials per join and four numbers per step. All
rows of a tile are loaded before the first is used; a step is then a chain of a dozen operations.

The forward pass reads k, v (and the decay, if it varies with time) and writes o. The backward pass reads them to
compute the states between tiles, writing and reading 48 / ROWS bytes per channel and token. Then, from the last tile to
the first, it recomputes the tile's states, reads do, k, v and writes dk, dv. P and Z, the gradients of p and z at fixed
m, and M, the gradient of m, are propagated by the equations in `_cpu/weighted_average.py`.

Legend: p_ is a pointer, i_ an index, b_ a block. A lane is a channel of a sequence. Masked steps have weight 0 and
decay 1, which leave the state unchanged.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scanl.ops._triton._rows import rows
from scanl.ops._triton._tuned import HAS_SMALL_TILES

# Lanes of a program; steps of a backward tile (forward tiles: twice that).
LANES, ROWS = (16, 4) if HAS_SMALL_TILES else (32, 8)
LOWEST_LOG = tl.constexpr(-1e308)  # replaces -inf, so that no difference is NaN


@triton.jit
def _begin(p_w, p_u, p_state, p_cu, length, sequences, width, TIMED: tl.constexpr, REVERSE: tl.constexpr,
           LANES: tl.constexpr):  # fmt: skip
    """Return, for each lane: sequence, channel, a mask, the first row in the order of the scan, the number of steps;
    the index of its state, p, z and m; the constant decay and the bonus.
    """
    i_lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    n, i_channel = i_lane // width, i_lane % width
    there = n < sequences
    if p_cu is None:
        begin, steps = n * length, tl.where(there, length, 0)
    else:
        begin = tl.load(p_cu + n, mask=there, other=0).to(tl.int64)
        steps = tl.load(p_cu + n + 1, mask=there, other=0).to(tl.int64) - begin
    i_state = n * (3 * width) + i_channel
    b_p = tl.load(p_state + i_state, mask=there, other=0.0).to(tl.float64)
    b_z = tl.load(p_state + i_state + width, mask=there, other=0.0).to(tl.float64)
    b_m = tl.load(p_state + i_state + 2 * width, mask=there, other=0.0).to(tl.float64)
    b_m = tl.where(b_m < LOWEST_LOG, LOWEST_LOG, b_m)
    b_w, b_u = tl.full((LANES,), 0.0, tl.float64), tl.full((LANES,), 0.0, tl.float64)
    if p_w is not None and not TIMED:
        b_w += tl.load(p_w + i_channel, mask=there, other=0.0).to(tl.float64)
    if p_u is not None:
        b_u += tl.load(p_u + i_channel, mask=there, other=0.0).to(tl.float64)
    return n, i_channel, there, begin + (steps - 1 if REVERSE else 0), steps, i_state, b_p, b_z, b_m, b_w, b_u


@triton.jit
def _read(p_k, p_v, p_w, first, begin, steps, k_row, v_row, w_row, i_channel, b_w, SIGN: tl.constexpr,
          TIMED: tl.constexpr, ROWS: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """Load the rows of a tile, k, v and decay, all before the first is used."""
    ks, vs, ws = (), (), ()
    for r in tl.static_range(ROWS):
        live = begin + r < steps
        row = first + SIGN * (begin + r)
        ks += (tl.load(p_k + row * k_row + i_channel, mask=live, other=-float("inf")).to(tl.float64),)
        vs += (tl.load(p_v + row * v_row + i_channel, mask=live, other=0.0).to(dtype),)
        if TIMED:
            ws += (tl.load(p_w + row * w_row + i_channel, mask=live, other=0.0).to(tl.float64),)
        else:
            ws += (b_w,)
    return ks, vs, ws


@triton.jit
def _weigh(k, w, m, live, dtype: tl.constexpr):
    """Return 1 minus the weight of the past, the weight of the current step, and the new m. NaN or +inf gives NaN."""
    old = m + w
    old = tl.where(old < LOWEST_LOG, LOWEST_LOG, old)
    gap = k - old
    good = (k < float("inf")) & (old < float("inf"))
    far = tl.minimum(tl.abs(gap), 1e4).to(dtype)
    small = tl.exp(-far)
    lost = 1.0 - small
    if dtype == tl.float32:
        series = far * (1.0 - 0.5 * far * (1.0 - far / 3.0 * (1.0 - 0.25 * far * (1.0 - 0.2 * far))))
        lost = tl.where(far < 0.0625, series, lost)
    above = gap > 0
    lost = tl.where(above, lost, 0.0)
    lost = tl.where((old > LOWEST_LOG) | (live == 0), lost, 1.0)
    new = tl.where(good, tl.where(above, 1.0, small), float("nan"))
    return lost, new, tl.where(good, tl.where(above, k, old), float("nan"))


@triton.jit
def _weigh_bonus(k, u, m, dtype: tl.constexpr):
    """Return the weights of the past and the current step in the output with a bonus, which reads before it writes."""
    now = k + u
    gap = now - m
    good = (now < float("inf")) & (m < float("inf"))
    small = tl.exp(-tl.minimum(tl.abs(gap), 1e4).to(dtype))
    above = gap > 0
    present = tl.where(good, tl.where(above, 1.0, small), float("nan"))
    return tl.where(m > LOWEST_LOG, tl.where(above, small, 1.0), 0.0), present


@triton.jit(do_not_specialize=["length", "sequences"])
def _forward(
    p_k, p_v, p_w, p_u, p_state, p_o, p_last, p_cu, length, sequences, k_row, v_row, w_row, width, TIMED: tl.constexpr,
    REVERSE: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    _n, i_channel, there, first, steps, i_state, b_p, b_z, b_m, b_w, b_u = _begin(
        p_w, p_u, p_state, p_cu, length, sequences, width, TIMED, REVERSE, LANES
    )
    dtype: tl.constexpr = p_state.dtype.element_ty
    SIGN: tl.constexpr = -1 if REVERSE else 1
    for i in tl.range(0, tl.max(steps), ROWS):
        ks, vs, ws = _read(
            p_k, p_v, p_w, first, i, steps, k_row, v_row, w_row, i_channel, b_w, SIGN, TIMED, ROWS, dtype
        )
        for r in tl.static_range(ROWS):
            live = i + r < steps
            b_v = vs[r].to(tl.float64)
            if p_u is not None:
                past, present = _weigh_bonus(ks[r], b_u, b_m, dtype)
                b_o, b_below = past * b_p + present * b_v, past * b_z + present
            lost, new, b_m_next = _weigh(ks[r], tl.where(live, ws[r], 0.0), b_m, live, dtype)
            old = 1.0 - lost.to(tl.float64)
            b_p, b_z = old * b_p + new * b_v, old * b_z + new
            b_m = b_m_next
            if p_u is None:
                b_o, b_below = b_p, b_z
            b_o = b_o.to(dtype) / tl.where(b_below == 0, 1.0, b_below).to(dtype)
            tl.store(p_o + (first + SIGN * (i + r)) * width + i_channel, b_o, mask=live)
    _keep(p_last + i_state, width, b_p, b_z, b_m, there)


@triton.jit
def _keep(p, width, b_p, b_z, b_m, there):
    """Write a state in the operands' dtype; scale p and z by m as rounded to that dtype."""
    m = b_m.to(p.dtype.element_ty)
    factor = tl.where(b_m > LOWEST_LOG, tl.exp((b_m - m).to(p.dtype.element_ty)), 1.0)
    tl.store(p, b_p * factor, mask=there)
    tl.store(p + width, b_z * factor, mask=there)
    tl.store(p + 2 * width, tl.where(b_m <= LOWEST_LOG, -float("inf"), m), mask=there)


@triton.jit(do_not_specialize=["length", "sequences"])
def _backward(
    p_do, p_dlast, p_k, p_v, p_w, p_u, p_state, p_border, p_dk, p_dv, p_dw, p_du, p_dstate, p_cu, length, sequences,
    do_row, k_row, v_row, w_row, width, TIMED: tl.constexpr, REVERSE: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr
):  # fmt: skip
    n, i_channel, there, first, steps, i_state, b_p, b_z, b_m, b_w, b_u = _begin(
        p_w, p_u, p_state, p_cu, length, sequences, width, TIMED, REVERSE, LANES
    )
    dtype: tl.constexpr = p_state.dtype.element_ty
    SIGN: tl.constexpr = -1 if REVERSE else 1
    # the states between a sequence's tiles are stored after the states of earlier sequences
    low = first - (steps - 1) if REVERSE else first
    p_border += (low // ROWS + n) * (3 * width) + i_channel
    longest = tl.max(steps)
    for i in tl.range(0, longest, ROWS):
        p = p_border + i // ROWS * (3 * width)
        tl.store(p, b_p, mask=i < steps)
        tl.store(p + width, b_z, mask=i < steps)
        tl.store(p + 2 * width, b_m, mask=i < steps)
        ks, vs, ws = _read(
            p_k, p_v, p_w, first, i, steps, k_row, v_row, w_row, i_channel, b_w, SIGN, TIMED, ROWS, dtype
        )
        for r in tl.static_range(ROWS):
            live = i + r < steps
            lost, new, b_m = _weigh(ks[r], tl.where(live, ws[r], 0.0), b_m, live, dtype)
            old = 1.0 - lost.to(tl.float64)
            b_p, b_z = old * b_p + new * vs[r].to(tl.float64), old * b_z + new
    tl.debug_barrier()
    b_dp = tl.load(p_dlast + i_state, mask=there, other=0.0).to(tl.float64)
    b_dz = tl.load(p_dlast + i_state + width, mask=there, other=0.0).to(tl.float64)
    b_dm = tl.load(p_dlast + i_state + 2 * width, mask=there, other=0.0).to(tl.float64)
    b_dm -= b_dp * b_p + b_dz * b_z
    b_dw, b_du = tl.full((LANES,), 0.0, tl.float64), tl.full((LANES,), 0.0, tl.float64)
    tiles = tl.cdiv(longest, ROWS)
    for back in tl.range(0, tiles):
        i = (tiles - 1 - back) * ROWS
        p = p_border + i // ROWS * (3 * width)
        b_p = tl.load(p, mask=i < steps, other=0.0)
        b_z = tl.load(p + width, mask=i < steps, other=0.0)
        b_m = tl.load(p + 2 * width, mask=i < steps, other=0.0)
        ks, vs, ws = _read(
            p_k, p_v, p_w, first, i, steps, k_row, v_row, w_row, i_channel, b_w, SIGN, TIMED, ROWS, dtype
        )
        dos, ps, zs, losts, news, pasts, presents = (), (), (), (), (), (), ()
        for r in tl.static_range(ROWS):
            row = first + SIGN * (i + r)
            dos += (tl.load(p_do + row * do_row + i_channel, mask=i + r < steps, other=0.0).to(dtype),)
        for r in tl.static_range(ROWS):
            live = i + r < steps
            ps += (b_p,)
            zs += (b_z,)
            if p_u is not None:
                past, present = _weigh_bonus(ks[r], b_u, b_m, dtype)
                pasts += (past,)
                presents += (present,)
            lost, new, b_m = _weigh(ks[r], tl.where(live, ws[r], 0.0), b_m, live, dtype)
            losts += (lost,)
            news += (new,)
            old = 1.0 - lost.to(tl.float64)
            b_p, b_z = old * b_p + new * vs[r].to(tl.float64), old * b_z + new
        for r in tl.static_range(ROWS - 1, -1, -1):
            live = i + r < steps
            b_v = vs[r].to(tl.float64)
            a, b = 1.0 - losts[r].to(tl.float64), news[r].to(tl.float64)
            if p_u is None:
                read_a, read_b = a, b
            else:
                read_a, read_b = pasts[r].to(tl.float64), presents[r].to(tl.float64)
            below = read_a * zs[r] + read_b
            inverse = 1.0 / tl.where(below == 0, 1.0, below).to(dtype)
            g = (dos[r] * inverse).to(tl.float64)
            b_o = (read_a * ps[r] + read_b * b_v) * inverse
            b_dk, b_dv = read_b * g * (b_v - b_o), read_b * g
            b_du += b_dk
            key = tl.where(b > a, 1.0, tl.where(b == a, 0.5, 0.0))
            stay = (1.0 - key) * b_dm
            b_to_w = a * (b_dp * ps[r] + b_dz * zs[r]) + stay
            if p_u is None:
                b_to_w += a * g * (ps[r] - b_o * zs[r])
            b_dk += b * (b_dp * b_v + b_dz) + key * b_dm
            b_dv += b * b_dp
            b_dp = a * b_dp + read_a * g
            b_dz = a * b_dz - read_a * g * b_o
            b_dm = stay
            at = (first + SIGN * (i + r)) * width + i_channel
            tl.store(p_dk + at, b_dk, mask=live)
            tl.store(p_dv + at, b_dv, mask=live)
            if TIMED:
                tl.store(p_dw + at, b_to_w, mask=live)
            elif p_w is not None:
                b_dw += tl.where(live, b_to_w, 0.0)
    b_p = tl.load(p_state + i_state, mask=there, other=0.0)
    b_z = tl.load(p_state + i_state + width, mask=there, other=0.0)
    tl.store(p_dstate + i_state, b_dp, mask=there)
    tl.store(p_dstate + i_state + width, b_dz, mask=there)
    tl.store(p_dstate + i_state + 2 * width, b_dm + b_dp * b_p + b_dz * b_z, mask=there)
    if p_w is not None and not TIMED:
        tl.store(p_dw + n * width + i_channel, b_dw, mask=there)
    if p_u is not None:
        tl.store(p_du + n * width + i_channel, b_du, mask=there)


def _launch(kernel: Any, sequences: int, width: int, *arguments: Any, **flags: Any) -> None:
    with torch.cuda.device_of(arguments[0]):
        grid = (triton.cdiv(sequences * width, LANES),)
        kernel[grid](*arguments, width, LANES=LANES, num_warps=1, enable_fp_fusion=True, **flags)


def _operands(k: Tensor, v: Tensor, decay: Tensor | None, bonus: Tensor | None, state: Tensor):
    """Return the operands as the kernels take them: tensors, and the row strides of k, v and a time-varying decay."""
    timed = decay is not None and decay.ndim == 3
    (k, k_row), (v, v_row) = rows(k), rows(v)
    w_row = 0
    if decay is not None:
        decay, w_row = rows(decay) if timed else (decay.contiguous(), 0)
    bonus = bonus if bonus is None else bonus.contiguous()
    return (k, v, decay, bonus, state.contiguous()), (k_row, v_row, w_row), timed


def forward(k, v, decay, bonus, state, reverse, cu_seqlens):
    o, last = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, state))
    if k.numel() == 0 or state.numel() == 0:
        return o, last.copy_(state)
    operands, strides, timed = _operands(k, v, decay, bonus, state)
    sequences, length, width = len(state), k.shape[1], k.shape[2]
    arguments = (*operands, o, last, cu_seqlens, length, sequences, *strides)
    _launch(_forward, sequences, width, *arguments, TIMED=timed, REVERSE=reverse, ROWS=2 * ROWS)
    return o, last


def backward(do, dlast, k, v, decay, bonus, state, reverse, cu_seqlens):
    if k.numel() == 0 or state.numel() == 0:
        return [*[torch.zeros_like(x) for x in (k, v, decay, bonus) if x is not None], dlast.clone()]
    operands, strides, timed = _operands(k, v, decay, bonus, state)
    sequences, (batch, length, width) = len(state), k.shape
    dk, dv, dstate = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v, state))
    dw = torch.empty_like(dk) if timed else state.new_empty(sequences, width)
    du = state.new_empty(sequences, width)
    border = state.new_empty(batch * length // ROWS + sequences, 3, width, dtype=torch.float64)
    do, do_row = rows(do)
    arguments = (do, dlast.contiguous(), *operands, border, dk, dv, dw, du, dstate, cu_seqlens, length, sequences)
    _launch(_backward, sequences, width, *arguments, do_row, *strides, TIMED=timed, REVERSE=reverse, ROWS=ROWS)
    gradients = [dk, dv]
    if decay is not None:
        gradients.append(dw if timed else dw.sum(0).to(decay.dtype))
    return [*gradients, *([] if bonus is None else [du.sum(0).to(bonus.dtype)]), dstate]
