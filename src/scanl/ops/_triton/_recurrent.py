"""Forward kernel of matrix memories for few steps on a GPU: a loop over time with the state in registers.

It is for decoding, and for sequences of at most STEPS steps, for which chunks would be mostly empty. One loop serves
`linear_attention` (with its bonus u), `delta_rule` (with beta) and `dplr_scan` (with a and b), in one launch. A program
does one sequence, one head and BLOCK value channels, since the columns of S are independent. It reads and writes S
once, 8 K V bytes per head in float32. A step's operands are small beside that: 2 (2 K + 2 V) bytes in bfloat16. They
are prefetched through shared memory, from which a warp can read them along either axis. Arithmetic is in the state's
dtype, float32 or float64. The backward pass uses the kernels for chunks.

Legend: S is (K, V); B or N sequences; H heads; G heads of q and k, each used by H/G heads. p_ is a pointer, i_ an
index, b_ a block. b_S is (heads, K, columns). Other blocks have three axes too, with size 1 where they are constant.
"""

import torch
import triton
import triton.language as tl

from scanl.ops._matrix_memory import scale_of
from scanl.ops._triton._tuned import HAS_SMALL_TILES

STEPS = 16  # use this kernel for at most this number of steps
BLOCK = 16  # columns of a program: two sectors of a row of S, and enough programs for one sequence to fill a GPU
STAGES = 3  # steps whose operands are being loaded
SHARE = 1024  # elements of S per warp, 32 registers per thread
MAX_HEADS = 8 if HAS_SMALL_TILES else 1  # heads of a program: the interpreter is faster with few programs


@triton.jit(do_not_specialize=["length"])
def _forward(
    p_q, p_k, p_v, p_g, p_u, p_beta, p_a, p_b, p_state, p_o, p_last, p_offsets, length, SCALE: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, REVERSE: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Run all steps. DECAY: the number of axes of g, 0 without g. The terms of operands that are None are left out."""
    dtype: tl.constexpr = p_last.dtype.element_ty
    blocks: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    groups: tl.constexpr = (H + HEADS - 1) // HEADS
    i_unit = tl.program_id(0)
    i_block, i_group, i_n = i_unit % blocks, i_unit // blocks % groups, (i_unit // blocks // groups).to(tl.int64)
    if p_offsets is not None:
        begin = tl.load(p_offsets + i_n).to(tl.int64)
        steps = (tl.load(p_offsets + i_n + 1) - begin).to(tl.int32)
    else:
        begin, steps = i_n * length, length
    i_h = i_group * HEADS + tl.arange(0, HEADS)[:, None, None]
    i_k = tl.arange(0, ROWS)[None, :, None]
    i_v = i_block * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    there = i_h < H
    there_k, there_v = there & (i_k < K), there & (i_v < V)
    i_S = ((i_n * H + i_h) * K + i_k) * V + i_v
    b_S = tl.load(p_state + i_S, mask=there_k & there_v, other=0.0)
    if DECAY == 1:
        b_decay = tl.exp(tl.load(p_g + i_h, mask=there, other=0.0).to(dtype))
    if p_u is not None:
        b_u = tl.load(p_u + i_h * K + i_k, mask=there_k, other=0.0).to(dtype)
    for i in tl.range(steps, num_stages=STAGES):
        i_row = begin + (steps - 1 - i if REVERSE else i)
        i_value_head, shared = i_row * H + i_h, (i_row * G + i_h // (H // G)) * K + i_k
        b_q = tl.load(p_q + shared, mask=there_k, other=0.0).to(dtype) * SCALE
        b_k = tl.load(p_k + shared, mask=there_k, other=0.0).to(dtype)
        b_v = tl.load(p_v + i_value_head * V + i_v, mask=there_v, other=0.0).to(dtype)
        if DECAY == 3:
            b_decay = tl.exp(tl.load(p_g + i_value_head, mask=there, other=0.0).to(dtype))
        elif DECAY == 4:
            b_decay = tl.exp(tl.load(p_g + i_value_head * K + i_k, mask=there_k, other=0.0).to(dtype))
        if p_u is not None:
            b_o = tl.sum(b_q * b_S, 1, keep_dims=True) + tl.sum(b_q * b_u * b_k, 1, keep_dims=True) * b_v
        if p_b is not None:
            b_read = tl.load(p_b + i_value_head * K + i_k, mask=there_k, other=0.0).to(dtype)
            b_read = tl.sum(b_read * b_S, 1, keep_dims=True)
        if DECAY > 0:
            b_S *= b_decay
        if p_beta is not None:
            b_beta = tl.load(p_beta + i_value_head, mask=there, other=0.0).to(dtype)
            b_v = b_beta * (b_v - tl.sum(b_k * b_S, 1, keep_dims=True))
        b_S += b_k * b_v
        if p_a is not None:
            b_S += tl.load(p_a + i_value_head * K + i_k, mask=there_k, other=0.0).to(dtype) * b_read
        if p_u is None:
            b_o = tl.sum(b_q * b_S, 1, keep_dims=True)
        tl.store(p_o + i_value_head * V + i_v, b_o, mask=there_v)
    tl.store(p_last + i_S, b_S, mask=there_k & there_v)


def forward(q, k, v, g, state, reverse, cu_seqlens, scale, *, u=None, beta=None, a=None, b=None):
    """Return o and the last state. With `beta` it is the delta rule; with `a` and `b` it has a low-rank term."""
    o, last = torch.empty(v.shape, dtype=v.dtype, device=v.device), state.new_empty(state.shape)
    if state.numel() == 0 or o.numel() == 0:
        return o.zero_(), state.clone()
    H, K, V = state.shape[1:]
    heads, rows, columns = (
        min(MAX_HEADS, triton.next_power_of_2(H)),
        triton.next_power_of_2(K),
        triton.next_power_of_2(V),
    )
    columns = min(BLOCK, columns)
    operands = [None if x is None else x.contiguous() for x in (q, k, v, g, u, beta, a, b, state)]
    with torch.cuda.device_of(state):
        _forward[(len(state) * triton.cdiv(H, heads) * triton.cdiv(V, columns),)](
            *operands,
            o,
            last,
            cu_seqlens,
            q.shape[1],
            SCALE=scale_of(q, scale),
            H=H,
            G=q.shape[2],
            K=K,
            V=V,
            DECAY=0 if g is None else g.ndim,
            REVERSE=reverse,
            HEADS=heads,
            ROWS=rows,
            COLUMNS=columns,
            STAGES=STAGES,
            num_warps=max(1, rows * columns // SHARE),
            enable_fp_fusion=True,
        )
    return o, last
