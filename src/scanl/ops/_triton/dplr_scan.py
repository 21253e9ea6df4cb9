"""GPU kernels of the scan with diagonal-plus-low-rank transitions: chunks, or one loop for few steps."""

import torch

from scanl.ops._triton import _low_rank, _recurrent
from scanl.ops._triton import _matrix_memory as memory


def forward(q, k, v, a, b, g, state, reverse, cu_seqlens, scale):
    if q.numel() == 0 or v.numel() == 0:
        return torch.zeros_like(v, memory_format=torch.contiguous_format), state.clone()
    if q.shape[1] <= _recurrent.STEPS:
        return _recurrent.forward(q, k, v, g, state, reverse, cu_seqlens, scale, a=a, b=b)
    pair = _low_rank.Pair(b, None, a, k, v, g, reverse, cu_seqlens, keep=False)
    return memory.forward(q, k, v, g, state, reverse, cu_seqlens, scale, a=a, w=pair.w, z=pair.z)


def backward(dy, dlast, q, k, v, a, b, g, state, reverse, cu_seqlens, scale):
    operands = {"q": q, "k": k, "v": v, "a": a, "b": b, "g": g, "state": state}
    operands = {name: value for name, value in operands.items() if value is not None}
    if q.numel() == 0 or v.numel() == 0:
        return [dlast.clone() if name == "state" else torch.zeros_like(value) for name, value in operands.items()]
    pair = _low_rank.Pair(b, None, a, k, v, g, reverse, cu_seqlens, keep=True)
    grads = memory.backward(dy, dlast, q, k, v, g, state, reverse, cu_seqlens, scale, a=a, w=pair.w, z=pair.z)
    pair.backward(grads)
    return [memory.of_operand(grads[name], value) for name, value in operands.items()]
