"""CPU kernels of the scan with diagonal-plus-low-rank transitions: the kernels that all matrix memories share."""

from scanl.ops._cpu._matrix_memory import run_backward, run_forward


def forward(q, k, v, a, b, g, state, reverse, cu_seqlens, scale):
    return run_forward(q, k, v, state, reverse, cu_seqlens, scale, a=a, b=b, g=g)


def backward(dy, dlast, q, k, v, a, b, g, state, reverse, cu_seqlens, scale):
    grads = run_backward(dy, dlast, q, k, v, state, reverse, cu_seqlens, scale, a=a, b=b, g=g)
    return [grads[name] for name in ("q", "k", "v", "a", "b", *(["g"] if g is not None else []), "state")]
