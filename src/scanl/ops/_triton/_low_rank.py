r"""The low-rank term inside a chunk: solve a triangular system, forwards and backwards.

A step reads what earlier steps wrote: r_t = c_t + S_{t-1}ᵀ b_t, S_t = Diag(e^{g_t}) S_{t-1} + k_t v_tᵀ + a_t r_tᵀ.
In a chunk that begins at S_0, let L = A_ba and M = A_bk be the pairs of its steps (`_chunks`), both strictly lower.
Then r, which `_matrix_memory` takes as w and z, solves

.. math:: (I - L)\, r = (c + M v) + (b \odot e^{lead})\, S_0, \quad r = z + w S_0.

For dplr c is zero, and b reads before the decay of its step. For the delta rule b = -β k, which reads after the decay,
c = β v, a = k, and there is no term k vᵀ. T, the inverse of I - L, is computed in float32: by substitution in diagonal
blocks of 16 steps, which are then merged in pairs. w = T (b e^lead) and z = T (c + M v) are products in the operands'
dtype. Backwards, the gradients of b e^lead and c + M v are Tᵀ dw and Tᵀ dz; dL is Tᵀ (dw wᵀ + dz zᵀ).

A program does one chunk of one head. In bfloat16 with K = V = 128 and C = 64, for each step of a head dplr reads a, b,
k, v and writes w, z (1.5 KB), with 2 C (3 K + 2 V) operations, and 3,000 in float32 for T. The delta rule moves k, v,
w, z (1 KB), with 2 C (2 K + V) operations. The backward pass repeats this and stores T and M in the operands' dtype.
Its first kernel overwrites dw with the gradient of b e^lead, and T and M with the gradients of L and M. Its second
kernel computes the gradients through the pairs. For dplr each moves 2.5 KB; for the delta rule they move 2 and 1.2 KB.
Together they do 2 C (6 K + 4 V + 2 C) operations for dplr, 2 C (4 K + 2 V + C) for the delta rule. With decays, g is
also read and its gradient written. If each channel has its own decay, each product of pairs is done at log2(C) levels
(`_chunks`).

Legend: as in `_chunks`. b_ is a block in registers, p_ a pointer. B heads of b, A of a, G of k, H of all others.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scanl.ops._frame.declaration import FLOATING
from scanl.ops._triton import _tuned
from scanl.ops._triton._chunks import (
    CHUNK,
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
    pairs,
    pairs_backward,
    spoilt,
    store,
    units,
    units_of,
)
from scanl.ops._triton._tuned import Tile, cut, of_memory

MIN_WIDTH: tl.constexpr = tl.constexpr(_tuned.MIN_WIDTH)
# Tiles of the three kernels, by (wider than half precision, one decay per channel). A tile is key channels, value
# channels, warps, stages. The first one should need the fewest spilled registers, see `_matrix_memory`.
FORWARD = {
    (False, False): (Tile(64, 64, 8, 3), Tile(64, 64, 4, 3), Tile(64, 128, 8, 2), Tile(32, 64, 4, 3)),
    (False, True): (Tile(32, 64, 8, 3), Tile(32, 64, 4, 3), Tile(64, 64, 8, 2)),
    (True, False): (Tile(16, 16, 8, 3), Tile(32, 32, 8, 2)),
    (True, True): (Tile(16, 16, 8, 3), Tile(16, 32, 4, 2)),
}
SOLVE = {
    False: (Tile(64, 64, 8, 3), Tile(64, 64, 4, 3), Tile(64, 64, 8, 2)),
    True: (Tile(32, 16, 8, 3), Tile(16, 16, 8, 2)),
}
PAIRS = {
    (False, False): (Tile(64, 64, 4, 3), Tile(64, 64, 8, 3), Tile(32, 64, 4, 3)),
    (False, True): (Tile(16, 64, 4, 3), Tile(32, 64, 4, 3), Tile(16, 64, 8, 3)),
    (True, False): (Tile(32, 16, 8, 3), Tile(16, 16, 8, 3)),
    (True, True): (Tile(16, 16, 8, 3), Tile(16, 16, 4, 3)),
}


@triton.jit
def _cut(b_l, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Extract the diagonal blocks of matrices (C, C): (COUNT, SIZE, SIZE)."""
    N: tl.constexpr = C // SIZE
    i, j = tl.arange(0, N)[None, :, None, None, None], tl.arange(0, N)[None, None, None, :, None]
    b_l = tl.reshape(b_l, (COUNT // N, N, SIZE, N, SIZE))
    return tl.reshape(tl.sum(tl.where(i == j, b_l, 0.0), 3), (COUNT, SIZE, SIZE))


@triton.jit
def _beside(b_left, b_right, COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.reshape(tl.permute(tl.join(b_left, b_right), (0, 1, 3, 2)), (COUNT, ROWS, 2 * COLUMNS))


@triton.jit
def _doubled(b_t, b_l, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Merge pairs of inverses of diagonal blocks, T and T', into COUNT inverses of twice the size.

    Each is [[T, 0], [X, T']] with X = T' L T, where L is the block of b_l below the diagonal.
    """
    b_t, b_other = tl.split(tl.permute(tl.reshape(b_t, (COUNT, 2, SIZE, SIZE)), (0, 2, 3, 1)))
    b_l = tl.permute(tl.reshape(_cut(b_l, COUNT, 2 * SIZE), (COUNT, 2, SIZE, 2, SIZE)), (0, 2, 4, 1, 3))
    b_l, _ = tl.split(b_l)
    _, b_l = tl.split(b_l)
    b_x = tl.dot(b_other, tl.dot(b_l, b_t, input_precision="ieee"), input_precision="ieee")
    b_left = _beside(tl.trans(b_t), tl.trans(b_x), COUNT, SIZE, SIZE)
    b_right = _beside(tl.zeros_like(b_t), tl.trans(b_other), COUNT, SIZE, SIZE)
    return _beside(tl.trans(b_left), tl.trans(b_right), COUNT, 2 * SIZE, SIZE)


@triton.jit
def inverse(b_l, UNITS: tl.constexpr):
    """Return (I - L)^-1 for strictly lower L (C, C)."""
    COUNT: tl.constexpr = UNITS * (C // MIN_WIDTH)
    i_row, i_col = tl.arange(0, MIN_WIDTH)[None, :, None], tl.arange(0, MIN_WIDTH)[None, None, :]
    b_block = _cut(b_l, COUNT, MIN_WIDTH)
    b_t = tl.where(i_row == i_col, 1.0, tl.zeros_like(b_block))
    for i in range(MIN_WIDTH - 1):
        b_column = tl.sum(tl.where(i_col == i, b_block, 0.0), 2, keep_dims=True)
        b_t += b_column * tl.sum(tl.where(i_row == i, b_t, 0.0), 1, keep_dims=True)
    if C >= 2 * MIN_WIDTH:
        b_t = _doubled(b_t, b_l, COUNT // 2, MIN_WIDTH)
    if C >= 4 * MIN_WIDTH:
        b_t = _doubled(b_t, b_l, COUNT // 4, 2 * MIN_WIDTH)
    return tl.reshape(b_t, b_l.shape)


@triton.jit
def _reads(p_b, p_beta, first, rows, i_head, i_k, H: tl.constexpr, B: tl.constexpr, K: tl.constexpr,
           REVERSE: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Load b, or compute it as -beta k."""
    b_b = load(p_b, first, rows, i_head // (H // B), i_k, B, K, REVERSE, BK)
    if p_beta is None:
        return b_b
    else:
        return (-load(p_beta, first, rows, i_head, 0, H, 1, REVERSE, 1) * b_b).to(b_b.dtype)


@triton.jit(do_not_specialize=["length", "per_seq"])
def _forward(
    p_b, p_beta, p_a, p_k, p_v, p_g, p_w, p_z, p_t, p_m, p_chunks, length, per_seq, B: tl.constexpr, A: tl.constexpr,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, EXCLUSIVE: tl.constexpr,
    REVERSE: tl.constexpr, TABLE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """Write w and z. For the backward pass, also write T, and M if k is given.

    A step that is not finite is left out of the products; all four results are then NaN from that step on.
    """
    i_unit = units(UNITS)
    i_head, i_chunk = i_unit % H, (i_unit // H).to(tl.int64)
    first, rows = chunk(i_chunk, p_chunks, length, per_seq, REVERSE, TABLE)
    dtype: tl.constexpr = p_w.dtype.element_ty
    wide: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32

    b_l = tl.zeros((C, C), wide)
    b_m = tl.zeros((C, C), wide)
    b_fault = tl.zeros((C, 1), tl.float32)
    for i_k in range(0, K, BK):
        b_b = _reads(p_b, p_beta, first, rows, i_head, i_k, H, B, K, REVERSE, BK)
        b_a = load(p_a, first, rows, i_head // (H // A), i_k, A, K, REVERSE, BK)
        b_g = load_decays(p_g, first, rows, i_head, i_k, H, K, REVERSE, DECAY, BK)
        b_fault += fault(b_b) + fault(b_a) + fault_of_decays(b_g, DECAY)
        b_b, b_a, b_g = finite(b_b), finite(b_a), finite(b_g)
        b_l = pairs(b_l, b_b, b_a, b_g, DECAY, EXCLUSIVE)
        if p_k is not None:
            b_k = load(p_k, first, rows, i_head // (H // G), i_k, G, K, REVERSE, BK)
            b_fault += fault(b_k)
            b_k = finite(b_k)
            b_m = pairs(b_m, b_b, b_k, b_g, DECAY, EXCLUSIVE)
    i_fault = first_fault(b_fault)
    b_g = finite(load_decays(p_g, first, rows, i_head, 0, H, K, REVERSE, DECAY, BK))
    b_t = inverse(decayed(b_l, b_g, DECAY, EXCLUSIVE), UNITS).to(dtype)
    if p_t is not None:
        store(p_t, spoilt(b_t, i_fault).to(dtype), first, rows, i_head, 0, H, C, REVERSE, C)
    if p_k is not None:
        b_m = decayed(b_m, b_g, DECAY, EXCLUSIVE).to(dtype)
        if p_m is not None:
            store(p_m, spoilt(b_m, i_fault).to(dtype), first, rows, i_head, 0, H, C, REVERSE, C)
    for i_k in range(0, K, BK):
        b_b = finite(_reads(p_b, p_beta, first, rows, i_head, i_k, H, B, K, REVERSE, BK))
        b_g = finite(load_decays(p_g, first, rows, i_head, i_k, H, K, REVERSE, DECAY, BK))
        b_w = spoilt(dot(b_t, b_b * leading(b_g, DECAY, EXCLUSIVE), dtype), i_fault)
        store(p_w, b_w.to(dtype), first, rows, i_head, i_k, H, K, REVERSE, BK)
    for i_v in range(0, V, BV):
        b_v = load(p_v, first, rows, i_head, i_v, H, V, REVERSE, BV)
        i_faults = tl.minimum(i_fault, first_fault(b_v * 0.0))
        b_v = finite(b_v)
        if p_k is not None:
            b_v = dot(b_m, b_v, dtype)
        else:
            b_v = finite(load(p_beta, first, rows, i_head, 0, H, 1, REVERSE, 1)).to(wide) * b_v
        b_z = spoilt(dot(b_t, b_v, dtype), i_faults)
        store(p_z, b_z.to(dtype), first, rows, i_head, i_v, H, V, REVERSE, BV)


@triton.jit(do_not_specialize=["length", "per_seq"])
def _backward_solve(
    p_b, p_beta, p_a, p_k, p_v, p_g, p_w, p_z, p_t, p_m, p_dw, p_dz, p_dv, p_dbeta, p_chunks, length, per_seq,
    B: tl.constexpr, A: tl.constexpr, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    DECAY: tl.constexpr, EXCLUSIVE: tl.constexpr, REVERSE: tl.constexpr, TABLE: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """Write the gradients of v and beta. Overwrite dw, T and M with the gradients of b e^lead, L and M."""
    i_unit = units(UNITS)
    i_head, i_chunk = i_unit % H, (i_unit // H).to(tl.int64)
    first, rows = chunk(i_chunk, p_chunks, length, per_seq, REVERSE, TABLE)
    dtype: tl.constexpr = p_w.dtype.element_ty
    wide: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32

    b_t = tl.trans(load(p_t, first, rows, i_head, 0, H, C, REVERSE, C))
    b_dl = tl.zeros((C, C), wide)
    b_dm = tl.zeros((C, C), wide)
    if p_k is not None:
        b_m = tl.trans(load(p_m, first, rows, i_head, 0, H, C, REVERSE, C))
    else:
        b_beta = load(p_beta, first, rows, i_head, 0, H, 1, REVERSE, 1).to(wide)
        b_dbeta = tl.zeros((C, 1), wide)
    for i_v in range(0, V, BV):
        b_v = load(p_v, first, rows, i_head, i_v, H, V, REVERSE, BV)
        b_dz = load(p_dz, first, rows, i_head, i_v, H, V, REVERSE, BV)
        b_d = dot(b_t, b_dz, dtype)
        b_dl += dot(b_d, tl.trans(load(p_z, first, rows, i_head, i_v, H, V, REVERSE, BV)), dtype)
        if p_k is not None:
            b_dm += dot(b_dz, tl.trans(b_v), dtype)
            b_dv = load(p_dv, first, rows, i_head, i_v, H, V, REVERSE, BV) + dot(b_m, b_d, dtype)
        else:
            b_dbeta += tl.sum(b_d * b_v, -1, keep_dims=True)
            b_dv = b_beta * b_d
        store(p_dv, b_dv.to(dtype), first, rows, i_head, i_v, H, V, REVERSE, BV)
    for i_k in range(0, K, BK):
        b_d = dot(b_t, load(p_dw, first, rows, i_head, i_k, H, K, REVERSE, BK), dtype)
        b_dl += dot(b_d, tl.trans(load(p_w, first, rows, i_head, i_k, H, K, REVERSE, BK)), dtype)
        store(p_dw, b_d.to(dtype), first, rows, i_head, i_k, H, K, REVERSE, BK)
    b_g = load_decays(p_g, first, rows, i_head, 0, H, K, REVERSE, DECAY, BK)
    b_dl = decayed(b_dl, b_g, DECAY, EXCLUSIVE)
    store(p_t, b_dl.to(dtype), first, rows, i_head, 0, H, C, REVERSE, C)
    if p_k is not None:
        b_dm = decayed(dot(b_t, b_dm, dtype), b_g, DECAY, EXCLUSIVE)
        store(p_m, b_dm.to(dtype), first, rows, i_head, 0, H, C, REVERSE, C)
    else:
        store(p_dbeta, b_dbeta, first, rows, i_head, 0, H, 1, REVERSE, 1)


@triton.jit(do_not_specialize=["length", "per_seq"])
def _backward_pairs(
    p_b, p_beta, p_a, p_k, p_v, p_g, p_w, p_z, p_t, p_m, p_dw, p_db, p_dbeta, p_da, p_dk, p_dg, p_chunks, length,
    per_seq, B: tl.constexpr, A: tl.constexpr, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    DECAY: tl.constexpr, EXCLUSIVE: tl.constexpr, REVERSE: tl.constexpr, TABLE: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """Write the gradient of b; add the parts from L, M and b e^lead to the gradients of beta, a, k and g."""
    i_unit = units(UNITS)
    i_head, i_chunk = i_unit % H, (i_unit // H).to(tl.int64)
    first, rows = chunk(i_chunk, p_chunks, length, per_seq, REVERSE, TABLE)
    dtype: tl.constexpr = p_w.dtype.element_ty
    wide: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32

    b_dl = load(p_t, first, rows, i_head, 0, H, C, REVERSE, C)
    if p_k is not None:
        b_dm = load(p_m, first, rows, i_head, 0, H, C, REVERSE, C)
    else:
        b_beta = load(p_beta, first, rows, i_head, 0, H, 1, REVERSE, 1).to(wide)
        b_dbeta = load(p_dbeta, first, rows, i_head, 0, H, 1, REVERSE, 1)
    b_dg = tl.zeros((C, BK) if DECAY == 2 else (1, C), wide)
    for i_k in tl.range(0, K, BK, num_stages=1, disable_licm=True):
        b_b = _reads(p_b, p_beta, first, rows, i_head, i_k, H, B, K, REVERSE, BK)
        b_a = load(p_a, first, rows, i_head // (H // A), i_k, A, K, REVERSE, BK)
        b_g = load_decays(p_g, first, rows, i_head, i_k, H, K, REVERSE, DECAY, BK)
        b_db = load(p_dw, first, rows, i_head, i_k, H, K, REVERSE, BK) * leading(b_g, DECAY, EXCLUSIVE).to(wide)
        b_da = load(p_da, first, rows, i_head, i_k, H, K, REVERSE, BK).to(wide)
        if DECAY == 2:
            b_dg = load(p_dg, first, rows, i_head, i_k, H, K, REVERSE, BK).to(wide)
        if DECAY > 0:
            b_dg += decay_gradient(b_b * b_db, None, dtype, DECAY, EXCLUSIVE)
        b_db, b_da, b_dg = pairs_backward(b_dl, b_b, b_a, b_g, DECAY, EXCLUSIVE, b_db, b_da, b_dg)
        if p_k is not None:
            b_k = load(p_k, first, rows, i_head // (H // G), i_k, G, K, REVERSE, BK)
            b_dk = load(p_dk, first, rows, i_head, i_k, H, K, REVERSE, BK).to(wide)
            b_db, b_dk, b_dg = pairs_backward(b_dm, b_b, b_k, b_g, DECAY, EXCLUSIVE, b_db, b_dk, b_dg)
            store(p_dk, b_dk.to(p_dk.dtype.element_ty), first, rows, i_head, i_k, H, K, REVERSE, BK)
        if DECAY == 2:
            store(p_dg, b_dg.to(p_dg.dtype.element_ty), first, rows, i_head, i_k, H, K, REVERSE, BK)
        if p_k is not None:
            store(p_db, b_db.to(dtype), first, rows, i_head, i_k, H, K, REVERSE, BK)
        else:
            b_dbeta -= tl.sum(b_db * b_a, -1, keep_dims=True)
            b_da -= b_beta * b_db
        store(p_da, b_da.to(p_da.dtype.element_ty), first, rows, i_head, i_k, H, K, REVERSE, BK)
    if p_k is None:
        store(p_dbeta, b_dbeta, first, rows, i_head, 0, H, 1, REVERSE, 1)
    if DECAY == 1:
        i_col = tl.arange(0, C)[None, :]
        p, there = p_dg + first * H + i_head + (-i_col if REVERSE else i_col) * H, i_col < rows + 0 * i_head
        tl.store(p, tl.load(p, mask=there, other=0.0) + b_dg, mask=there)


class Pair:
    """w and z of the low-rank term, and their backward pass. With `beta`, the delta rule's: b is a and k is None."""

    def __init__(self, b, beta, a, k, v, g, reverse: bool, cu_seqlens: Tensor | None, *, keep: bool):
        batch, length, heads, V = v.shape
        K = b.shape[3]
        if g is not None and g.ndim == 1:
            g = g.expand(batch, length, heads)
        self.b, self.beta, self.a, self.k, self.v, self.g = (
            None if value is None else value.contiguous() for value in (b, beta, a, k, v, g)
        )
        self.chunks = chunks(batch, length, reverse, cu_seqlens)
        self.flags = {"B": b.shape[2], "A": a.shape[2], "G": 0 if k is None else k.shape[2], "H": heads, "K": K, "V": V}
        self.flags |= {"DECAY": 0 if g is None else g.ndim - 2, "EXCLUSIVE": beta is None, **self.chunks.flags}
        self.kind = (v.dtype in FLOATING, self.flags["DECAY"] == 2)
        self.w, self.z = v.new_empty(batch, length, heads, K), v.new_empty(v.shape)
        self.t = v.new_empty(batch, length, heads, CHUNK) if keep else None
        self.m = v.new_empty(batch, length, heads, CHUNK) if keep and k is not None else None
        self.launch(_forward, FORWARD[self.kind])

    def launch(
        self, kernel: Any, tiles: tuple[Tile, ...], *gradients: Tensor | None, restored: tuple[str, ...] = ()
    ) -> None:
        p_chunks, _, length, per_seq = self.chunks.numbers
        operands = (self.b, self.beta, self.a, self.k, self.v, self.g, self.w, self.z, self.t, self.m)
        count = self.chunks.count * self.flags["H"]
        together = units_of(count)
        with torch.cuda.device_of(self.w):
            of_memory(kernel, cut(tiles, self.flags["K"], self.flags["V"]), restored)[(count // together,)](
                *operands,
                *gradients,
                p_chunks,
                length,
                per_seq,
                **self.flags,
                UNITS=together,
                enable_fp_fusion=True,
            )

    def backward(self, grads: dict[str, Tensor]) -> None:
        """Add the gradients through w and z to the gradients of `_matrix_memory`, and create b's or beta's."""
        if self.beta is None:
            grads["b"] = torch.empty_like(self.w)
        else:
            wide = torch.promote_types(self.v.dtype, torch.float32)
            grads["beta"], grads["v"] = torch.empty_like(self.beta, dtype=wide), torch.empty_like(self.v)
        dw, dz, dv, db, dbeta, da, dk, dg = (grads.get(name) for name in ("w", "z", "v", "b", "beta", "a", "k", "g"))
        # The first kernel overwrites dw, T and M for the second kernel. If k is given, it adds to dv.
        changed = ("p_dw", "p_t", "p_m", "p_dv")
        self.launch(_backward_solve, SOLVE[self.kind[0]], dw, dz, dv, dbeta, restored=changed)
        changed = ("p_da", "p_dk", "p_dg", "p_dbeta")
        self.launch(_backward_pairs, PAIRS[self.kind], dw, db, dbeta, da, dk, dg, restored=changed)
