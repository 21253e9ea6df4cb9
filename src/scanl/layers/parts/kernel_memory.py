"""Linear attention whose kernel is cheaper than its features: scores within blocks, features between them."""

import torch
from torch import Tensor

from scanl.layers.parts.feature_map import FeatureMap
from scanl.ops._chunks import chunks, joined
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
        queries, keys, values = (part[:, start : start + size] for part in (q, k, v))
        y = _block(features, queries, keys, values)
        if state is not None:
            y = y + torch.einsum("bthk,bhkv->bthv", features(queries, None), state)
        written = torch.einsum("bthk,bthv->bhkv", features(keys, None), values)
        state = written if state is None else state + written
        ys.append(y)
    assert state is not None
    y = torch.cat(ys, 1)
    return (y, state) if spoil is None else (y * spoil, state * spoil[:, -1].unsqueeze(-2))


def _block(features: FeatureMap, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Let each step read the steps up to itself: chunk by chunk, those before the chunk and those in it."""
    steps = q.shape[1]
    qs, ks, vs = (chunks(part, CHUNK, part.shape[2]).squeeze(2) for part in (q, k, v))  # (B, H, chunks, steps, ·)
    inside = features.kernel(qs, ks).tril() @ vs
    keys, values = (part.transpose(1, 2).contiguous() for part in (k, v))
    ys = [inside[:, :, :1]]
    for n in range(1, qs.shape[2]):
        before = features.kernel(qs[:, :, n], keys[:, :, : n * CHUNK]) @ values[:, :, : n * CHUNK]
        ys.append((inside[:, :, n] + before).unsqueeze(2))
    return joined(torch.cat(ys, 2).unsqueeze(2), steps)
