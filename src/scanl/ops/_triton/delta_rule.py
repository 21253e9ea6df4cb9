"""GPU kernels of the delta rule: chunks, or one loop for few steps. A separate kernel normalises the keys first."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from scanl.ops._triton import _low_rank, _recurrent
from scanl.ops._triton import _matrix_memory as memory
from scanl.ops._triton._tuned import HAS_SMALL_TILES

TILE = 4096 if HAS_SMALL_TILES else 2048  # numbers that a program processes


@triton.jit(do_not_specialize=["count"])
def _unit(p_k, p_dy, p_out, count, eps, K: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr):
    """Write k / sqrt(|k|^2 + eps); if p_dy, the gradient of that, is given, write the gradient of k instead."""
    dtype: tl.constexpr = p_out.dtype.element_ty
    i_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    i_col = tl.arange(0, BK)[None, :]
    there, at = (i_row < count) & (i_col < K), i_row * K + i_col
    b_k = tl.load(p_k + at, mask=there, other=0.0).to(tl.float64 if dtype == tl.float64 else tl.float32)
    b_rate = 1 / tl.sqrt(tl.sum(b_k * b_k, 1, keep_dims=True) + eps)
    b_y = b_k * b_rate
    if p_dy is not None:
        b_dy = tl.load(p_dy + at, mask=there, other=0.0)
        b_y = b_rate * (b_dy - b_y * tl.sum(b_y * b_dy, 1, keep_dims=True))
    tl.store(p_out + at, b_y.to(dtype), mask=there)


def _unit_keys(k: Tensor, eps: float, dy: Tensor | None = None) -> Tensor:
    k, K = k.contiguous(), k.shape[-1]
    out, block = torch.empty_like(k), triton.next_power_of_2(K)
    rows, count = max(1, TILE // block), k.numel() // K
    with torch.cuda.device_of(k):
        _unit[(triton.cdiv(count, rows),)](k, dy, out, count, eps, K=K, ROWS=rows, BK=block, enable_fp_fusion=True)
    return out


def forward(q, k, v, beta, g, state, reverse, cu_seqlens, scale, normalize_keys, eps):
    if q.numel() == 0 or v.numel() == 0:
        return torch.zeros_like(v, memory_format=torch.contiguous_format), state.clone()
    if normalize_keys:
        k = _unit_keys(k, eps)
    if q.shape[1] <= _recurrent.STEPS:
        return _recurrent.forward(q, k, v, g, state, reverse, cu_seqlens, scale, beta=beta)
    pair = _low_rank.Pair(k, beta, k, None, v, g, reverse, cu_seqlens, keep=False)
    return memory.forward(q, None, None, g, state, reverse, cu_seqlens, scale, a=k, w=pair.w, z=pair.z)


def backward(dy, dlast, q, k, v, beta, g, state, reverse, cu_seqlens, scale, normalize_keys, eps):
    operands = {"q": q, "k": k, "v": v, "beta": beta, "g": g, "state": state}
    operands = {name: value for name, value in operands.items() if value is not None}
    if q.numel() == 0 or v.numel() == 0:
        return [dlast.clone() if name == "state" else torch.zeros_like(value) for name, value in operands.items()]
    keys = _unit_keys(k, eps) if normalize_keys else k
    pair = _low_rank.Pair(keys, beta, keys, None, v, g, reverse, cu_seqlens, keep=True)
    grads = memory.backward(dy, dlast, q, None, None, g, state, reverse, cu_seqlens, scale, a=keys, w=pair.w, z=pair.z)
    pair.backward(grads)
    grads["k"] = memory.of_operand(grads.pop("a"), k)
    if normalize_keys:
        grads["k"] = _unit_keys(k, eps, grads["k"])
    return [memory.of_operand(grads[name], value) for name, value in operands.items()]
