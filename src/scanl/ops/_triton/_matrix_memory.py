r"""Matrix memories in chunks on a GPU: the kernels of `linear_attention`, `delta_rule` and `dplr_scan`.

.. math:: S_t = \mathrm{Diag}(e^{g_t}) S_{t-1} + k_t v_t^\top + a_t r_t^\top, \quad o_t = S_t^\top (c\, q_t)

with r_t = z_t + S_0ᵀ w_t in a chunk that begins at the state S_0. `_low_rank` computes w and z by solving the low-rank
term inside the chunk. Linear attention has only k vᵀ, the delta rule has only a rᵀ, dplr has both.

    forward(q, k, v, g, state, reverse, cu_seqlens, scale, *, u=None, a=None, w=None, z=None) -> o, last
    backward(do, dlast, q, k, v, g, state, reverse, cu_seqlens, scale, *, u=None, a=None, w=None, z=None) -> dict

q, k: (B, T, G, K), v: (B, T, H, V); k and v are None if there is only a rᵀ. u: bonus (H, K), not together with a.
a: (B, T, G or H, K), w: (B, T, H, K), z: (B, T, H, V), all in q's dtype. g: None, (H,), (B, T, H) or (B, T, H, K).
The dict has the gradients "q" "k" "v" "u" "a" "w" "z" of the operands that are not None, and "state" and "g". The first
two and "a" have H heads; "g" has every step, (B, T, H) or (B, T, H, K). A gradient that must still be summed is float32
or wider. The caller may add to them; then `of_operand` gives each the shape and dtype of its operand.

There are three kernels. `_states` goes along time, for a block of S, and writes the state before each chunk; backwards
it does the same in reverse time with the gradient of S. `_apply` computes the outputs of a chunk from its state, and
the gradients of its values. `_keys` computes the gradients of its keys and decays, for a block of channels. Pairs of
steps are computed where they are needed and never stored; the backward pass recomputes the states. There are no atomic
additions, so results are deterministic. The states between chunks are stored in the operands' dtype, because they are
only used as factors of products.

Costs per step and head, in bfloat16 with K = V = 128 and C = 64: the kernels move 3 KB forwards and 7.3 KB backwards
with one decay per channel, 2.5 and 6 KB otherwise (512 bytes for each read or write of S or its gradient, 256 for each
vector). They do 98 thousand operations forwards and 310 thousand backwards; with one decay per channel 330 and 990
thousand, of which pairs at six levels take 197 thousand forwards and 390 thousand backwards.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scanl.ops._frame.declaration import FLOATING
from scanl.ops._matrix_memory import scale_of
from scanl.ops._triton._chunks import (
    C,
    chunk,
    chunks,
    decay_gradient,
    decayed,
    dot,
    fault,
    fault_of_decays,
    finite,
    first_fault,
    leading,
    load,
    load_decays,
    load_state,
    pairs,
    pairs_backward,
    sequence,
    spoilt,
    store,
    store_state,
    trailing,
    units,
    units_of,
    whole,
)
from scanl.ops._triton._tuned import MIN_WIDTH, Tile, block, cut, of_memory

PROGRAMS = 128  # as many as a GPU has multiprocessors
STATES, WIDE_STATES = 4096, 2048  # elements of S in registers
# Tiles by (wider than half precision, one decay per channel). A tile is key channels, value channels, warps, stages.
# The first one should spill the fewest registers. With one decay per channel, the result of a product is a factor of
# the next. Four warps then divide all its rows, and eight would compute them twice.
APPLY = {
    (False, False): (Tile(64, 128, 4, 3), Tile(64, 64, 4, 3), Tile(64, 128, 8, 3), Tile(64, 128, 4, 2)),
    (False, True): (Tile(32, 128, 4, 3), Tile(32, 64, 4, 3), Tile(32, 128, 4, 2), Tile(32, 128, 8, 3)),
    (True, False): (Tile(32, 64, 8, 3), Tile(16, 64, 8, 3), Tile(32, 64, 8, 2)),
    (True, True): (Tile(16, 32, 8, 3), Tile(16, 64, 8, 2)),
}
KEYS = {
    (False, False): (Tile(64, 32, 8, 3), Tile(64, 64, 8, 3), Tile(64, 32, 8, 2), Tile(32, 32, 4, 3)),
    (False, True): (Tile(32, 64, 4, 3), Tile(32, 32, 4, 3), Tile(32, 64, 4, 2), Tile(16, 64, 4, 3)),
    (True, False): (Tile(16, 32, 8, 3), Tile(32, 32, 8, 2)),
    (True, True): (Tile(16, 32, 8, 3), Tile(16, 16, 8, 2)),
}


@triton.jit(do_not_specialize=["length", "per_seq"])
def _states(
    p_x, p_y, p_g, p_a, p_w, p_z, p_state, p_S, p_r, p_last, p_chunks, p_sequences, length, per_seq,
    SCALE: tl.constexpr, G: tl.constexpr, H: tl.constexpr, A: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    DECAY: tl.constexpr, EXCLUSIVE: tl.constexpr, ADJOINT: tl.constexpr, REVERSE: tl.constexpr, TABLE: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """Write the state before each chunk, S <- e^{g_sum} S + (k e^trail)ᵀ v + (a e^trail)ᵀ r, r = z + w S, and the last.

    The adjoint goes from the last chunk to the first and writes the gradient of the state after each. It uses c q
    e^lead and do for k and v; r is dr = dz + (a e^trail) dS, and the term added is wᵀ dr.
    """
    blocks_k: tl.constexpr = (K + BK - 1) // BK
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    i_unit = units(UNITS)
    i_v, i_k = i_unit % blocks_v * BV, i_unit // blocks_v % blocks_k * BK
    i_head = i_unit // (blocks_v * blocks_k) % H
    i_n = (tl.program_id(0) * UNITS if TABLE else i_unit) // (blocks_v * blocks_k * H)  # scalar, so `steps` is too
    begin, steps, i_first = sequence(i_n, p_sequences, length, per_seq, REVERSE, TABLE)
    dtype: tl.constexpr = p_S.dtype.element_ty
    sign: tl.constexpr = -1 if REVERSE else 1
    at_state = (i_n.to(tl.int64) * H + i_head) * (K * V)
    i_last = (steps + C - 1) // C - 1

    b_S = load_state(p_state + at_state, 1, i_k, i_v, K, V, BK, BV)
    for i in range(i_last + 1):
        i_chunk = i_last - i if ADJOINT else i
        first, rows = begin + sign * i_chunk * C, tl.minimum(steps - i_chunk * C, C)
        store_state(p_S + ((i_first + i_chunk) * H + i_head) * (K * V), b_S.to(dtype), i_k, i_v, K, V, BK, BV)
        b_g = load_decays(p_g, first, rows, i_head, i_k, H, K, REVERSE, DECAY, BK)
        b_next = b_S * tl.trans(whole(b_g, DECAY))
        if p_a is not None:
            b_a = load(p_a, first, rows, i_head // (H // A), i_k, A, K, REVERSE, BK) * trailing(b_g, DECAY)
            b_w = load(p_w, first, rows, i_head, i_k, H, K, REVERSE, BK)
            b_r = load(p_z, first, rows, i_head, i_v, H, V, REVERSE, BV) + dot(b_a if ADJOINT else b_w, b_S, dtype)
            store(p_r, b_r.to(dtype), first, rows, i_head, i_v, H, V, REVERSE, BV)
            b_next += dot(tl.trans(b_w if ADJOINT else b_a), b_r, dtype)
        if p_x is not None:
            b_x = load(p_x, first, rows, i_head // (H // G), i_k, G, K, REVERSE, BK)
            b_y = load(p_y, first, rows, i_head, i_v, H, V, REVERSE, BV)
            b_x = b_x * leading(b_g, DECAY, EXCLUSIVE) * SCALE if ADJOINT else b_x * trailing(b_g, DECAY)
            b_next += dot(tl.trans(b_x), b_y, dtype)
        b_S = b_next
    store_state(p_last + at_state, b_S, i_k, i_v, K, V, BK, BV)


@triton.jit(do_not_specialize=["length", "per_seq"])
def _apply(
    p_q, p_k, p_y, p_g, p_u, p_a, p_r, p_S, p_o, p_chunks, length, per_seq, SCALE: tl.constexpr, G: tl.constexpr,
    KEYS: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, ADJOINT: tl.constexpr,
    REVERSE: tl.constexpr, TABLE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """Write the outputs o = c ((q e^lead) S + A v + A' r), with A the pairs of q and k, A' the pairs of q and a.

    A is masked by zeros. A step that is not finite is left out, and the chunk's outputs are NaN from there on. Later
    chunks get the NaN from S.

    The adjoint writes the gradient of v, dv = c Aᵀ do + (k e^trail) dS. For z it writes the first term only, since dS
    is not known yet.
    """
    blocks: tl.constexpr = (V + BV - 1) // BV
    i_unit = units(UNITS)
    i_v, i_head, i_chunk = i_unit % blocks * BV, i_unit // blocks % H, (i_unit // (blocks * H)).to(tl.int64)
    first, rows = chunk(i_chunk, p_chunks, length, per_seq, REVERSE, TABLE)
    exclusive: tl.constexpr = p_u is not None
    dtype: tl.constexpr = p_o.dtype.element_ty
    wide: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32

    b_A = tl.zeros((C, C), wide)
    b_second = tl.zeros((C, C), wide)
    b_same = tl.zeros((C, 1), wide)
    b_same_second = tl.zeros((C, 1), wide)
    b_o = tl.zeros((C, BV), wide)
    b_fault = tl.zeros((C, 1), tl.float32)
    for i_k in range(0, K, BK):
        b_q = load(p_q, first, rows, i_head // (H // G), i_k, G, K, REVERSE, BK)
        b_k = load(p_k, first, rows, i_head // (H // KEYS), i_k, KEYS, K, REVERSE, BK)
        b_g = load_decays(p_g, first, rows, i_head, i_k, H, K, REVERSE, DECAY, BK)
        if not ADJOINT:
            b_fault += fault(b_k) + fault_of_decays(b_g, DECAY)
            b_k, b_g = finite(b_k), finite(b_g)
        if p_S is not None:
            b_S = load_state(p_S + (i_chunk * H + i_head) * (K * V), tl.minimum(rows, 1), i_k, i_v, K, V, BK, BV)
            b_x = b_k * trailing(b_g, DECAY) if ADJOINT else b_q * leading(b_g, DECAY, exclusive)
            b_o += dot(b_x, b_S, dtype)
        b_A = pairs(b_A, b_q, b_k, b_g, DECAY, exclusive)
        b_same += tl.sum(_weighed(b_q, p_u, i_head, i_k, K, BK, wide) * b_k, -1, keep_dims=True)
        if p_a is not None:
            b_a = load(p_a, first, rows, i_head, i_k, H, K, REVERSE, BK)
            if not ADJOINT:
                b_fault += fault(b_a)
                b_a = finite(b_a)
            b_second = pairs(b_second, b_q, b_a, b_g, DECAY, exclusive)
            b_same_second += tl.sum(b_q.to(wide) * b_a, -1, keep_dims=True)
    i_row, i_col = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    b_g = load_decays(p_g, first, rows, i_head, 0, H, K, REVERSE, DECAY, BK)
    b_y = load(p_y, first, rows, i_head, i_v, H, V, REVERSE, BV)
    if not ADJOINT:
        b_g = finite(b_g)
    b_A = tl.where(i_row == i_col, b_same, decayed(b_A, b_g, DECAY, exclusive))
    if ADJOINT:
        b_o += dot(tl.trans(b_A), b_y, dtype) * SCALE
    else:
        i_fault = first_fault(b_fault + (b_y * 0.0).to(tl.float32))
        b_o += dot(b_A, finite(b_y), dtype)
        if p_a is not None:
            b_r = load(p_r, first, rows, i_head, i_v, H, V, REVERSE, BV)
            i_fault = tl.minimum(i_fault, first_fault(b_r * 0.0))
            b_second = tl.where(i_row == i_col, b_same_second, decayed(b_second, b_g, DECAY, exclusive))
            b_o += dot(b_second, finite(b_r), dtype)
        b_o = spoilt(b_o * SCALE, i_fault)
    store(p_o, b_o.to(dtype), first, rows, i_head, i_v, H, V, REVERSE, BV)


@triton.jit
def _weighed(b, p_u, i_head, i_k, K: tl.constexpr, BK: tl.constexpr, wide: tl.constexpr):
    """Multiply q or k by the bonus if there is one, for the pair of a step with itself, which is not decayed."""
    if p_u is None:
        return b.to(wide)
    else:
        at = i_head * K + i_k + tl.arange(0, BK)[None, :]
        return b * tl.load(p_u + at, mask=at < i_head * K + K, other=0.0).to(wide)


@triton.jit(do_not_specialize=["length", "per_seq", "total"])
def _keys(
    p_q, p_k, p_v, p_g, p_u, p_a, p_r, p_do, p_dr, p_S, p_dS, p_dq, p_dk, p_da, p_dw, p_dg, p_du, p_chunks, length,
    per_seq, total, SCALE: tl.constexpr, G: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, DECAY: tl.constexpr, REVERSE: tl.constexpr, TABLE: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """Write the gradients of q, k, a, w, u and g, for a block of key channels."""
    blocks: tl.constexpr = (K + BK - 1) // BK
    i_unit = units(UNITS)
    i_block, i_head, i_chunk = i_unit % blocks, i_unit // blocks % H, (i_unit // (blocks * H)).to(tl.int64)
    i_k = i_block * BK
    first, rows = chunk(i_chunk, p_chunks, length, per_seq, REVERSE, TABLE)
    exclusive: tl.constexpr = p_u is not None
    dtype: tl.constexpr = p_q.dtype.element_ty
    wide: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    at_state = (i_chunk * H + i_head) * (K * V)

    b_dA = tl.zeros((C, C), wide)
    b_second = tl.zeros((C, C), wide)
    b_dq = tl.zeros((C, BK), wide)
    b_dk = tl.zeros((C, BK), wide)
    b_da = tl.zeros((C, BK), wide)
    b_dw = tl.zeros((C, BK), wide)
    b_whole = tl.zeros((BK, 1), wide)
    for i_v in range(0, V, BV):
        b_do = load(p_do, first, rows, i_head, i_v, H, V, REVERSE, BV)
        b_v = load(p_v, first, rows, i_head, i_v, H, V, REVERSE, BV)
        b_S = load_state(p_S + at_state, tl.minimum(rows, 1), i_k, i_v, K, V, BK, BV)
        b_dS = load_state(p_dS + at_state, tl.minimum(rows, 1), i_k, i_v, K, V, BK, BV)
        b_dA += dot(b_do, tl.trans(b_v), dtype)
        b_dq += dot(b_do, tl.trans(b_S), dtype)
        b_dk += dot(b_v, tl.trans(b_dS), dtype)
        if DECAY > 0:
            b_whole += tl.sum(b_S.to(wide) * b_dS, -1, keep_dims=True)
        if p_dr is not None:
            b_dw += dot(load(p_dr, first, rows, i_head, i_v, H, V, REVERSE, BV), tl.trans(b_S), dtype)
        if p_a is not None:
            b_r = load(p_r, first, rows, i_head, i_v, H, V, REVERSE, BV)
            b_second += dot(b_do, tl.trans(b_r), dtype)
            b_da += dot(b_r, tl.trans(b_dS), dtype)
    if p_dr is not None:
        store(p_dw, b_dw.to(dtype), first, rows, i_head, i_k, H, K, REVERSE, BK)

    i_row, i_col = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    b_q = load(p_q, first, rows, i_head // (H // G), i_k, G, K, REVERSE, BK)
    b_k = load(p_k, first, rows, i_head // (H // KEYS), i_k, KEYS, K, REVERSE, BK)
    b_g = load_decays(p_g, first, rows, i_head, i_k, H, K, REVERSE, DECAY, BK)
    b_trail = trailing(b_g, DECAY)
    b_dq = b_dq * leading(b_g, DECAY, exclusive) * SCALE
    b_dk *= b_trail
    b_end = b_k * b_dk
    if p_a is not None:
        b_a = load(p_a, first, rows, i_head, i_k, H, K, REVERSE, BK)
        b_da *= b_trail
        b_end += b_a * b_da
    b_dg = tl.zeros((1, 1), wide)
    if DECAY > 0:
        b_dg = tl.trans(b_whole) * whole(b_g, DECAY)
        b_dg = b_dg if DECAY == 2 else tl.sum(b_dg, -1, keep_dims=True)
        b_dg += decay_gradient(b_q * b_dq, b_end, dtype, DECAY, exclusive)
    b_dA *= SCALE
    b_same = tl.sum(tl.where(i_row == i_col, b_dA, 0.0), -1, keep_dims=True)
    b_dq += b_same * _weighed(b_k, p_u, i_head, i_k, K, BK, wide)
    b_dk += b_same * _weighed(b_q, p_u, i_head, i_k, K, BK, wide)
    if p_u is not None:
        i_channel = i_k + tl.arange(0, BK)[None, :]
        b_du = tl.sum(b_same * b_q * b_k, -2, keep_dims=True)
        tl.store(p_du + (i_chunk * H + i_head) * K + i_channel, b_du, mask=i_channel < K)
    b_dA = decayed(b_dA, b_g, DECAY, exclusive)
    b_dq, b_dk, b_dg = pairs_backward(b_dA, b_q, b_k, b_g, DECAY, exclusive, b_dq, b_dk, b_dg)
    store(p_dk, b_dk.to(p_dk.dtype.element_ty), first, rows, i_head, i_k, H, K, REVERSE, BK)
    if p_a is not None:
        b_second *= SCALE
        b_same = tl.sum(tl.where(i_row == i_col, b_second, 0.0), -1, keep_dims=True)
        b_dq += b_same * b_a
        b_da += b_same * b_q
        b_second = decayed(b_second, b_g, DECAY, exclusive)
        b_dq, b_da, b_dg = pairs_backward(b_second, b_q, b_a, b_g, DECAY, exclusive, b_dq, b_da, b_dg)
        store(p_da, b_da.to(dtype), first, rows, i_head, i_k, H, K, REVERSE, BK)
    store(p_dq, b_dq.to(p_dq.dtype.element_ty), first, rows, i_head, i_k, H, K, REVERSE, BK)
    if DECAY == 2:
        store(p_dg, b_dg.to(p_dg.dtype.element_ty), first, rows, i_head, i_k, H, K, REVERSE, BK)
    elif DECAY == 1:
        p = p_dg + (i_block * total + first) * H + i_head + (-i_col if REVERSE else i_col) * H
        tl.store(p, b_dg, mask=i_col < rows)


class _Plan:
    """Launch parameters for operands of given sizes."""

    def __init__(self, q, k, v, g, state, reverse, cu_seqlens, scale, u, a, w, z):
        batch, length, shared, self.K = q.shape
        self.H, self.V = state.shape[1], state.shape[3]
        self.chunks = chunks(batch, length, reverse, cu_seqlens)
        if g is not None and g.ndim == 1:
            g = g.expand(batch, length, self.H)
        self.decay = 0 if g is None else g.ndim - 2
        operands = (q, k, v, g, state, u, a, w, z)
        self.q, self.k, self.v, self.g, self.state, self.u, self.a, self.w, self.z = (
            None if value is None else value.contiguous() for value in operands
        )
        self.rows = batch * length
        self.wide = q.dtype in FLOATING
        self.flags = {
            "SCALE": scale_of(q, scale),
            "G": shared,
            "H": self.H,
            "K": self.K,
            "V": self.V,
            "DECAY": self.decay,
        }
        self.flags |= self.chunks.flags

    def launch(
        self, kernel: Any, parts: int, units: Callable[[Mapping[str, int]], int], *arguments: Any, apart: bool = False,
        **flags: Any
    ) -> None:  # fmt: skip
        """Launch `units(tile)` units for each part. If `apart`, a program's units all belong to one part."""
        apiece = units(kernel.configs[0].kwargs)
        n = units_of(apiece if apart else parts * apiece)

        def grid(tile: Mapping[str, int]) -> tuple[int]:
            return (parts * units(tile) // n,)

        with torch.cuda.device_of(self.q):
            kernel[grid](*arguments, UNITS=n, enable_fp_fusion=True, **self.flags, **flags)

    def states(self, start: Tensor, y: Tensor | None, z: Tensor | None, *, adjoint: bool) -> tuple[Tensor, ...]:
        """Return the state before each chunk (after it, for the adjoint), r, and the last state."""
        p_chunks, p_sequences, length, per_seq = self.chunks.numbers
        x = self.q if adjoint else self.k
        S = self.q.new_empty(self.chunks.count, *self.state.shape[1:])
        r, last = None if z is None else torch.empty_like(z), torch.empty_like(start)
        keys = block(self.K, 64) if z is None else max(MIN_WIDTH, triton.next_power_of_2(self.K))  # r: whole columns
        values = block(self.V, max(MIN_WIDTH, (WIDE_STATES if self.wide else STATES) // keys))
        heads = self.H * triton.cdiv(self.K, keys)
        while values > MIN_WIDTH and self.chunks.sequences * heads * triton.cdiv(self.V, values) < PROGRAMS:
            values //= 2
        half = max(MIN_WIDTH, values // 2)
        tiles = [Tile(keys, values, 4, 2), Tile(keys, values, 4, 1), Tile(keys, values, 8, 1), Tile(keys, half, 4, 2)]
        if z is not None and self.wide:  # products without tensor cores need more registers
            tiles = [Tile(keys, values, 8, 1), Tile(keys, values, 16, 1), Tile(keys, values, 4, 2)]
        self.launch(
            of_memory(_states, tuple(dict.fromkeys(tiles))), self.chunks.sequences,
            lambda tile: heads * triton.cdiv(self.V, tile["BV"]), x, y, self.g, self.a, self.w, z, start, S, r, last,
            p_chunks, p_sequences, length, per_seq, A=0 if self.a is None else self.a.shape[2],
            EXCLUSIVE=self.u is not None, ADJOINT=adjoint, apart=bool(self.flags["TABLE"]),
        )  # fmt: skip
        return S, r, last

    def apply(self, k, y, S, *, a=None, r=None, adjoint: bool) -> Tensor:
        p_chunks, _, length, per_seq = self.chunks.numbers
        o = self.q.new_empty(y.shape)
        kernel = of_memory(_apply, cut(APPLY[self.wide, self.decay == 2], self.K, self.V))
        self.launch(
            kernel, self.chunks.count, lambda tile: self.H * triton.cdiv(self.V, tile["BV"]), self.q, k, y,
            self.g, self.u, a, r, S, o, p_chunks, length, per_seq, KEYS=k.shape[2], ADJOINT=adjoint,
        )  # fmt: skip
        return o

    def keys(self, do, k, v, dr, S, dS, *, a=None, r=None) -> dict[str, Tensor]:
        p_chunks, _, length, per_seq = self.chunks.numbers
        wide = self.state.dtype
        full = (*do.shape[:3], self.K)

        def gradient(of: Tensor) -> Tensor:
            """Allocate a gradient with H heads; widen it if it must still be summed over heads."""
            return self.q.new_empty(full, dtype=of.dtype if of.shape == full else wide)

        grads = {"q": gradient(self.q), "k": gradient(k)}
        if a is not None:
            grads["a"] = torch.empty_like(a)
        if dr is not None:
            grads["w"] = self.q.new_empty(full)
        # dg has a part for each block. Wider blocks write fewer parts, so restore dg after each measurement.
        kernel = of_memory(_keys, cut(KEYS[self.wide, self.decay == 2], self.K, self.V), ("p_dg",))
        dg = du = None
        if self.decay == 2:
            dg = self.q.new_empty(full, dtype=self.q.dtype if dr is None else wide)
        elif self.decay == 1:
            narrowest = min(config.kwargs["BK"] for config in kernel.configs)
            dg = self.q.new_zeros((triton.cdiv(self.K, narrowest), *full[:3]), dtype=wide)
        if self.u is not None:
            du = self.q.new_empty((self.chunks.count, self.H, self.K), dtype=wide)
        self.launch(
            kernel, self.chunks.count, lambda tile: self.H * triton.cdiv(self.K, tile["BK"]), self.q, k, v,
            self.g, self.u, a, r, do, dr, S, dS, grads["q"], grads["k"], grads.get("a"), grads.get("w"), dg, du,
            p_chunks, length, per_seq, self.rows, KEYS=k.shape[2],
        )  # fmt: skip
        if dg is not None:
            grads["g"] = dg if self.decay == 2 else dg.sum(0)
        if du is not None:
            assert self.u is not None
            grads["u"] = du.sum(0).to(self.u.dtype)
        return grads


def forward(q, k, v, g, state, reverse, cu_seqlens, scale, *, u=None, a=None, w=None, z=None):
    plan = _Plan(q, k, v, g, state, reverse, cu_seqlens, scale, u, a, w, z)
    S, r, last = plan.states(plan.state, plan.v, plan.z, adjoint=False)
    if k is None:
        return plan.apply(plan.a, r, S, adjoint=False), last
    return plan.apply(plan.k, plan.v, S, a=plan.a, r=r, adjoint=False), last


def backward(do, dlast, q, k, v, g, state, reverse, cu_seqlens, scale, *, u=None, a=None, w=None, z=None):
    plan = _Plan(q, k, v, g, state, reverse, cu_seqlens, scale, u, a, w, z)
    do, dlast = do.contiguous(), dlast.contiguous()
    S, r, _ = plan.states(plan.state, plan.v, plan.z, adjoint=False)
    dr = None if a is None else plan.apply(plan.a, do, None, adjoint=True)
    dS, dr, dstate = plan.states(dlast, do, dr, adjoint=True)
    grads: dict[str, Tensor] = {"state": dstate}
    if k is None:
        grads |= plan.keys(do, plan.a, r, dr, S, dS)
        grads["a"] = grads.pop("k")
    else:
        grads |= plan.keys(do, plan.k, plan.v, dr, S, dS, a=plan.a, r=r)
        grads["v"] = plan.apply(plan.k, do, dS, adjoint=True)
    if dr is not None:
        grads["z"] = dr
    return grads


def of_operand(grad: Tensor, value: Tensor) -> Tensor:
    """Sum the gradient for each step and head to the shape of its operand; cast it to the operand's dtype."""
    if grad.ndim > value.ndim:
        grad = grad.sum((0, 1))
    elif grad.shape != value.shape:
        grad = grad.unflatten(2, (value.shape[2], -1)).sum(3)
    return grad.to(value.dtype)
