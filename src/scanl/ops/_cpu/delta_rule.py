"""CPU kernels of the delta rule: the kernels that all matrix memories share."""

from scanl.ops._cpu._matrix_memory import run_backward, run_forward


def _unit(k, normalize_keys, eps):
    """Return keys of unit length, and the numbers that they were divided by."""
    length = (k.square().sum(-1, keepdim=True) + eps).sqrt() if normalize_keys else k.new_ones(())
    return k / length if normalize_keys else k, length


def forward(q, k, v, beta, g, state, reverse, cu_seqlens, scale, normalize_keys, eps):
    k, _ = _unit(k, normalize_keys, eps)
    return run_forward(q, k, v, state, reverse, cu_seqlens, scale, g=g, beta=beta)


def backward(dy, dlast, q, k, v, beta, g, state, reverse, cu_seqlens, scale, normalize_keys, eps):
    k, length = _unit(k, normalize_keys, eps)
    grads = run_backward(dy, dlast, q, k, v, state, reverse, cu_seqlens, scale, g=g, beta=beta)
    if normalize_keys:
        dk = grads["k"]
        grads["k"] = (dk - k * (k * dk).sum(-1, keepdim=True)) / length
    return [grads[name] for name in ("q", "k", "v", "beta", *(["g"] if g is not None else []), "state")]
