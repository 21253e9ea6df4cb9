"""CPU kernels of linear attention: the kernels that all matrix memories share."""

from scanl.ops._cpu._matrix_memory import run_backward, run_forward


def forward(q, k, v, g, gv, u, state, reverse, cu_seqlens, scale):
    return run_forward(q, k, v, state, reverse, cu_seqlens, scale, g=g, gv=gv, u=u)


def backward(dy, dlast, q, k, v, g, gv, u, state, reverse, cu_seqlens, scale):
    grads = run_backward(dy, dlast, q, k, v, state, reverse, cu_seqlens, scale, g=g, gv=gv, u=u)
    operands = {"q": q, "k": k, "v": v, "g": g, "gv": gv, "u": u, "state": state}
    return [grads[name] for name, value in operands.items() if value is not None]
