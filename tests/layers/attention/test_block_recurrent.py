"""BlockRecurrent: its equation step by step, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, linear, sigmoid
from scanl import layers
from scanl.layers.attention.block_recurrent import distance_bias
from tests.layers.attention.test_rmt import rms_norm

NAME = "block_recurrent"


def projected(heads, vectors):
    """Queries among and across, keys and values, each a list of (H, K)."""
    lists = []
    for project in (heads.q_proj, heads.cross_proj, heads.k_proj, heads.v_proj):
        lists.append([(project.weight @ v).view(heads.num_heads, -1) for v in vectors])
    for several in lists[:3]:
        several[:] = [v / torch.sqrt((v**2).sum(1, keepdim=True) + 1e-6) for v in several]
    return lists


def attention(q, ks, vs, scale, biases=None):
    """Of one query (H, K)."""
    out = []
    for head in range(len(q)):
        scores = [q[head] @ k[head] + (0 if biases is None else biases[i][head]) for i, k in enumerate(ks)]
        weights = (scale.abs()[head] * torch.stack(scores)).exp()
        out.append(sum(w * v[head] for w, v in zip(weights / weights.sum(), vs, strict=True)))
    return torch.cat(out)


def gated(gate, s, a):
    z = linear(gate.out, a)
    z = torch.tanh(z) if gate.tanh else z
    if gate.gate is not None:
        g = sigmoid(gate.gate)
        return s * g + z * (1 - g)
    return s * sigmoid(linear(gate.forget, a) + 1) + z * sigmoid(linear(gate.input, a) - 1)


def bucket(distance):
    return distance if distance < 16 else min(31, 16 + int(math.log(distance / 16) / math.log(8) * 16))


def block_recurrent(layer, xs):
    W, ys, slots = layer.window, [], list(layer.slots)
    q, cross, k, v = projected(layer.tokens, xs)
    zeros = [torch.zeros_like(k[0])] * W
    k, v = zeros + k, zeros + v  # token t has the index W + t
    for first in range(0, len(xs), W):
        sq, scross, sk, sv = projected(
            layer.states, [rms_norm(layer.norm, s) + i for s, i in zip(slots, layer.ids, strict=True)]
        )
        for t in range(first, min(first + W, len(xs))):
            biases = [layer.bias[:, bucket(W - i)] for i in range(W)]
            among = attention(q[t], k[t : t + W], v[t : t + W], layer.tokens.scale, biases)
            ys.append(layer.o_proj.weight @ torch.cat([among, attention(cross[t], sk, sv, layer.tokens.cross_scale)]))
        after = []
        for n, s in enumerate(slots):
            both = k[first : first + 2 * W], v[first : first + 2 * W]
            a = torch.cat([
                attention(sq[n], sk, sv, layer.states.scale),
                attention(scross[n], *both, layer.states.cross_scale),
            ])  # fmt: skip
            if layer.gate is not None:
                s = gated(layer.gate, s, a)
                a = s if layer.hidden_norm is None else rms_norm(layer.hidden_norm, s)
            if layer.hidden is not None:
                s = gated(layer.hidden_gate, s, torch.relu(linear(layer.hidden, a)))
            after.append(s)
        slots = after
    return ys


def make(**more):
    return layers.build(NAME, DIM, **{"num_heads": 2, "window": 2, "num_slots": 3} | more)


EQUATIONS = {
    NAME: (make, block_recurrent),
    f"{NAME}_dual": (lambda: make(variant="dual", forget_gate="lstm", head_dim=3), block_recurrent),
    f"{NAME}_single": (lambda: make(variant="single", window=3, num_slots=2), block_recurrent),
    f"{NAME}_lstm": (lambda: make(forget_gate="lstm", window=2, num_slots=2), block_recurrent),
}

WRONG = [
    (NAME, {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8 without head_dim"),
    (NAME, {"num_slots": 0}, "num_slots is 0, expected at least 1"),
    (NAME, {"variant": "double"}, "unknown variant 'double'"),
    (NAME, {"forget_gate": "gru"}, "unknown forget_gate 'gru'"),
]


def test_initial_values():
    layer = layers.build(NAME, 64, num_slots=40, forget_gate="lstm")
    assert_normal(layer.slots, 0.1)
    assert_normal(layer.ids, 1.0)
    assert_normal(layer.gate.forget.bias, 0.1)
    assert layer.gate.input.weight.std() < 0.3 * layer.gate.out.weight.std() * 1.2


@pytest.mark.usefixtures("double")
def test_far_distances_share_a_bias():
    weight, distances = torch.randn(2, 32), torch.arange(1, 300)
    expected = torch.stack([weight[:, bucket(d)] for d in range(1, 300)], 1)
    torch.testing.assert_close(distance_bias(weight, distances), expected)


@pytest.mark.usefixtures("double")
def test_a_gate_that_keeps_everything_freezes_the_states():
    layer, x = make(), torch.randn(2, 9, DIM)
    layer.gate.gate.data.fill_(1000.0)
    torch.testing.assert_close(layer(x)[1].slots, layer.slots.expand(2, -1, -1))
