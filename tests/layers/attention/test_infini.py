"""InfiniAttention: its equation step by step, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, sigmoid
from scanl import layers
from tests.layers.attention.test_rmt import turned

NAME = "infini_attention"


def phi(v):
    return torch.where(v > 0, v + 1, torch.exp(v))


def infini_attention(layer, xs):
    """Head by head, with the memory as a matrix that whole segments are written into."""
    H, K, S = layer.num_heads, layer.head_dim, layer.chunk_size
    qs, ks, vs = ([(p.weight @ x).view(H, K) for x in xs] for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    M, z, ys = torch.zeros(H, K, K), torch.zeros(H, K), []

    def read(v, head):
        return phi(v) @ M[head] / (phi(v) @ z[head]) if z[head].any() else torch.zeros(K)

    for t in range(len(xs)):
        first, out = t - t % S, []
        for head in range(H):
            scores = [
                turned(qs[t], t - first, layer.rope_base)[head]
                @ turned(ks[j], j - first, layer.rope_base)[head]
                / math.sqrt(K)
                for j in range(first, t + 1)
            ]
            weights = torch.stack(scores).exp() / torch.stack(scores).exp().sum()
            local = sum(w * vs[j][head] for w, j in zip(weights, range(first, t + 1), strict=True))
            gate = sigmoid(layer.beta[head])
            out.append(gate * read(qs[t][head], head) + (1 - gate) * local)
        ys.append(layer.o_proj.weight @ torch.cat(out))
        if t - first == S - 1:
            writes = []
            for head in range(H):
                old = [read(ks[j][head], head) if layer.variant == "delta" else 0 for j in range(first, t + 1)]
                writes.append(
                    sum(
                        torch.outer(phi(ks[j][head]), vs[j][head] - o)
                        for j, o in zip(range(first, t + 1), old, strict=True)
                    )
                )
            M = M + torch.stack(writes)
            z = z + sum(phi(ks[j]) for j in range(first, t + 1))
    return ys


def make(**more):
    return layers.build(NAME, DIM, **{"num_heads": 2, "chunk_size": 2} | more)


EQUATIONS = {
    NAME: (make, infini_attention),
    f"{NAME}_linear": (lambda: make(variant="linear", head_dim=2, rope_base=100.0), infini_attention),
    f"{NAME}_steps": (lambda: make(chunk_size=1), infini_attention),
}

WRONG = [
    (NAME, {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8 without head_dim"),
    (NAME, {"head_dim": 3}, "head_dim is 3, expected an even number because of the rotary positions"),
    (NAME, {"num_heads": 8}, "head_dim is 1, expected an even number"),
    (NAME, {"variant": "sum"}, "unknown variant 'sum'"),
]


def test_initial_values():
    layer = layers.build(NAME, 64)
    assert_normal(layer.k_proj.weight, 1 / 8)
    assert not layer.beta.any()


@pytest.mark.usefixtures("double")
def test_the_linear_memory_is_that_of_linear_attention():
    """After whole segments it is the sum over all steps; with the gate at the memory a step reads the past alone."""
    layer, x = make(variant="linear"), torch.randn(2, 6, DIM)
    _, state = layer(x)
    k, v = (p(x).unflatten(-1, (2, 4)) for p in (layer.k_proj, layer.v_proj))
    torch.testing.assert_close(state.memory, torch.einsum("bthk,bthv->bhkv", phi(k), v))
    torch.testing.assert_close(state.norm, phi(k).sum(1))
    layer.beta.data.fill_(-1000.0)  # the softmax of each segment alone
    alone = [layer(piece)[0] for piece in x.split(2, 1)]
    torch.testing.assert_close(layer(x)[0], torch.cat(alone, 1))
