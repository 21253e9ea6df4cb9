"""The delta rule through the kernels of the scan with diagonal-plus-low-rank transitions, whose case it is."""

from scanl.ops._cpu.dplr_scan import run_backward, run_forward


def _unit(k, normalize_keys, eps):
    """Keys of unit length, and what they were divided by."""
    length = (k.square().sum(-1, keepdim=True) + eps).sqrt() if normalize_keys else k.new_ones(())
    return k / length if normalize_keys else k, length


def forward(q, k, v, beta, g, state, reverse, cu_seqlens, scale, normalize_keys, eps):
    k, _ = _unit(k, normalize_keys, eps)
    return run_forward(q, k, v, None, None, g, beta, state, reverse, cu_seqlens, scale)


def backward(dy, dlast, q, k, v, beta, g, state, reverse, cu_seqlens, scale, normalize_keys, eps):
    k, length = _unit(k, normalize_keys, eps)
    dq, dk, *rest = run_backward(dy, dlast, q, k, v, None, None, g, beta, state, reverse, cu_seqlens, scale)
    if normalize_keys:
        dk = (dk - k * (k * dk).sum(-1, keepdim=True)) / length
    return [dq, dk, *rest]
