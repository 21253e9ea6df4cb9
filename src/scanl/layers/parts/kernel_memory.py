"""Linear attention whose kernel is cheaper than its features: scores within blocks, features between them."""

import torch
from torch import Tensor

from scanl.layers.parts.feature_map import FeatureMap
from scanl.ops._frame.nonfinite import replaced, suspected
from scanl.ops._matrix_memory import spoilt

CHUNK = 64  # steps; scores after the present step are made within a chunk only


def attend_by_kernel(
    features: FeatureMap, q: Tensor, k: Tensor, v: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return o_t = S_t^T φ(q_t) and the last S, with S_t = S_{t-1} + φ(k_t) v_tᵀ.

    A step reads the steps of its block by κ(q_t, k_j) = φ(q_t)·φ(k_j), which is a function of q_t·k_j. Of earlier
    blocks it reads S. With blocks of 2 K' steps this takes about as many multiplications as features at every step,
    and without a state the first block has no features of queries.

    features: φ, with a kernel.   q, k: (B, T, H, K).   v: (B, T, H, V), all float32 or wider.   state: (B, H, K', V),
    or None for zeros.
    """
    spoil = None
    if suspected(k, v):  # scores after the present step are zeros, and zero times NaN is NaN
        spoil = spoilt([k], None, [v], None)
        k, v = replaced(k), replaced(v)
    size, ys = CHUNK * -(-2 * features.width // CHUNK), []
    for start in range(0, q.shape[1], size):
        queries, keys, values = (tensor[:, start : start + size].transpose(1, 2).contiguous() for tensor in (q, k, v))
        y = _block(features, queries, keys, values)
        if state is not None:
            y = y + features(queries, None) @ state
        written = features(keys, None).mT @ values
        state = written if state is None else state + written
        ys.append(y.transpose(1, 2))
    assert state is not None
    y = torch.cat(ys, 1)
    return (y, state) if spoil is None else (y * spoil, state * spoil[:, -1].unsqueeze(-2))


def _block(features: FeatureMap, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Let each step read the steps up to itself: chunk by chunk, those before the chunk and those in it.

    q, k: (B, H, steps, K).   v: (B, H, steps, V).
    """
    ys = []
    for n, (queries, keys, values) in enumerate(zip(*(tensor.split(CHUNK, 2) for tensor in (q, k, v)), strict=True)):
        y = features.kernel(queries, keys).tril() @ values
        if n:
            y = y + features.kernel(queries, k[:, :, : n * CHUNK]) @ v[:, :, : n * CHUNK]
        ys.append(y)
    return torch.cat(ys, 2)
