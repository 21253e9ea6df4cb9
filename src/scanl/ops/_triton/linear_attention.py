"""GPU kernels of linear attention: chunks, or one loop for few steps."""

import torch

from scanl.ops._triton import _matrix_memory as memory
from scanl.ops._triton import _recurrent


def forward(q, k, v, g, gv, u, state, reverse, cu_seqlens, scale):
    if q.numel() == 0 or v.numel() == 0:
        return torch.zeros_like(v, memory_format=torch.contiguous_format), state.clone()
    if q.shape[1] <= _recurrent.STEPS:
        return _recurrent.forward(q, k, v, g, state, reverse, cu_seqlens, scale, u=u)
    return memory.forward(q, k, v, g, state, reverse, cu_seqlens, scale, u=u)


def backward(dy, dlast, q, k, v, g, gv, u, state, reverse, cu_seqlens, scale):
    operands = {"q": q, "k": k, "v": v, "g": g, "u": u, "state": state}
    operands = {name: value for name, value in operands.items() if value is not None}
    if q.numel() == 0 or v.numel() == 0:
        return [dlast.clone() if name == "state" else torch.zeros_like(value) for name, value in operands.items()]
    grads = memory.backward(dy, dlast, q, k, v, g, state, reverse, cu_seqlens, scale, u=u)
    return [memory.of_operand(grads[name], value) for name, value in operands.items()]
