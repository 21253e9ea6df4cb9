"""RecurrentMemoryTransformer: its equation step by step, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, silu
from scanl import layers


def rms_norm(norm, v):
    return v / torch.sqrt((v**2).mean() + norm.eps) * norm.weight


def turned(v, position, base):
    """Rotate each head of v (H, K)."""
    half = v.shape[1] // 2
    angles = position * base ** (-torch.arange(half) / half)
    a, b = v[:, :half], v[:, half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], 1)


def block_over(block, hs, sees):
    """One block over a list of vectors; sees(i): the indices that vector i attends to."""
    H, normed = block.num_heads, [rms_norm(block.norm, h) for h in hs]
    qs, ks, vs = (
        [(project.weight @ h).view(H, -1) for h in normed] for project in (block.q_proj, block.k_proj, block.v_proj)
    )
    qs, ks = ([turned(v, i, block.rope_base) for i, v in enumerate(several)] for several in (qs, ks))
    out = []
    for i, h in enumerate(hs):
        attended = []
        for head in range(H):
            scores = torch.stack([qs[i][head] @ ks[j][head] for j in sees(i)]) / math.sqrt(qs[i].shape[1])
            weights = scores.exp() / scores.exp().sum()
            attended.append(sum(w * vs[j][head] for w, j in zip(weights, sees(i), strict=True)))
        h = h + block.o_proj.weight @ torch.cat(attended)
        z, mlp = rms_norm(block.mlp_norm, h), block.mlp
        out.append(h + mlp.down.weight @ (silu(mlp.gate.weight @ z) * (mlp.up.weight @ z)))
    return out


def rmt(layer, xs):
    """Each segment whole, between its two memories."""
    M, S, memory, ys = layer.num_slots, layer.chunk_size, list(layer.memory), []
    for first in range(0, len(xs), S):
        segment = xs[first : first + S]
        last = M + len(segment)  # the index of the first token of the memory behind

        def sees(i, last=last):
            if layer.variant == "bidirectional" and (i < M or i >= last):
                return range(M if i < M else last + M)
            return range(i + 1)

        hs = [*memory, *segment, *memory]
        for block in layer.blocks:
            hs = block_over(block, hs, sees)
        hs = [rms_norm(layer.norm, h) for h in hs]
        ys, memory = ys + hs[M:last], hs[last:]
    return ys


def make(**more):
    return layers.build("rmt", DIM, **{"num_heads": 2, "num_slots": 2, "chunk_size": 3, "expand": 1.5} | more)


EQUATIONS = {
    "rmt": (make, rmt),
    "rmt_causal": (lambda: make(variant="causal", depth=2, num_slots=1, rope_base=100.0, chunk_size=2), rmt),
}

WRONG = [
    ("rmt", {"num_heads": 8}, "num_heads is 8, expected a divisor of dim/2=4"),
    ("rmt", {"num_slots": 0}, "num_slots is 0, expected at least 1"),
    ("rmt", {"variant": "open"}, "unknown variant 'open'"),
]


def test_initial_values():
    layer = layers.build("rmt", 64, num_heads=4, depth=2, num_slots=50)
    assert_normal(layer.memory, 1.0)
    assert_normal(layer.blocks[1].q_proj.weight, 1 / 8)
    assert_normal(layer.blocks[1].o_proj.weight, 1 / 16)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("horizon", "reaches"), [(1, [0, 0, 0, 1]), (2, [0, 0, 1, 1]), (3, [0, 0, 0, 1]), (None, [1] * 4)]
)
def test_gradients_stop_behind_the_horizon(horizon, reaches):
    """Of an output of the fourth segment, and the same in pieces."""
    layer, x = make(horizon=horizon), torch.randn(1, 12, DIM, requires_grad=True)
    y, _ = layer(x)
    (grad,) = torch.autograd.grad(y[:, -1].sum(), x)
    assert grad[0].unflatten(0, (4, 3)).flatten(1).any(1).tolist() == [bool(reach) for reach in reaches]
    _, state = layer(x[:, :7])
    (parts,) = torch.autograd.grad(layer(x[:, 7:], state)[0][:, -1].sum(), x)
    torch.testing.assert_close(parts, grad)
