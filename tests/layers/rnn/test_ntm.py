"""NTM: its equation step by step, what only it knows, how it starts, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform, linear, shaken, sigmoid, softplus
from scanl.layers import NTM

pytestmark = pytest.mark.cells_by_loop


def weights_of(o, memory, last):
    """The paper's four steps, row by row."""
    rows, width = memory.shape
    k, (beta, gate, *shift, gamma) = o[:width], o[width : width + 6]
    beta, gate, gamma = softplus(beta), sigmoid(gate), 1 + softplus(gamma)
    shift = torch.exp(torch.stack(shift)) / torch.exp(torch.stack(shift)).sum()
    cosines = torch.stack([k @ row / torch.sqrt((k @ k) * (row @ row)) for row in memory])
    content = torch.exp(beta * cosines) / torch.exp(beta * cosines).sum()
    mixed = gate * content + (1 - gate) * last
    moved = torch.stack([sum(mixed[(n - j) % rows] * shift[1 - j] for j in (-1, 0, 1)) for n in range(rows)])
    return moved**gamma / (moved**gamma).sum()


def ntm(layer, xs):
    R, W, ys = layer.num_heads, layer.head_dim, []
    h, c, memory, recall = layer.h_0, layer.c_0, layer.memory_0, layer.recall_0
    reading, writing = torch.zeros(2, R, layer.num_slots).unbind()
    for x in xs:
        gates = linear(layer.input, x) + layer.recurrent @ h + layer.recalled @ recall.flatten()
        i, f, g, o = gates.chunk(4)
        c = sigmoid(f) * c + sigmoid(i) * torch.tanh(g)
        h = sigmoid(o) * torch.tanh(c)
        reads, writes = linear(layer.read, h).view(R, -1), linear(layer.write, h).view(R, -1)
        reading = [weights_of(reads[r], memory, reading[r]) for r in range(R)]
        writing = [weights_of(writes[r], memory, writing[r]) for r in range(R)]
        recall = torch.stack([w @ memory for w in reading])
        for r in range(R):
            memory = memory * (1 - torch.outer(writing[r], sigmoid(writes[r, W + 6 : 2 * W + 6])))
        for r in range(R):
            memory = memory + torch.outer(writing[r], writes[r, 2 * W + 6 :])
        ys.append(linear(layer.output, torch.cat([h, recall.flatten()])))
    return ys


EQUATIONS = {"ntm": (lambda: NTM(DIM, 5, 4, 3), ntm), "ntm_2": (lambda: NTM(DIM, 3, 5, 2, 2), ntm)}

WRONG = [
    ("ntm", {"num_slots": 0}, "num_slots is 0, expected at least 1"),
    ("ntm", {"num_heads": 0}, "num_heads is 0, expected at least 1"),
]


@pytest.mark.usefixtures("double")
def test_weights_are_shares_and_a_closed_gate_keeps_them():
    """With g = 0, no shift and γ = 1 a head stays where it is."""
    layer, x = shaken(NTM(DIM, 5, 4, 3)), torch.randn(2, 3, DIM)
    _, state = layer(x)
    torch.testing.assert_close(state.weights.sum(-1), torch.ones(2, 2))
    with torch.no_grad():
        layer.read.weight.zero_()
        layer.read.bias.copy_(torch.tensor([1, 1, 1, 0, -40, -40, 0, -40, -40]))
    _, after = layer(x, state)
    torch.testing.assert_close(after.weights[:, 0], state.weights[:, 0])


def test_how_it_starts():
    layer = NTM(200, 100)
    limit = 5 / math.sqrt(200 + 20 + 100)
    for weight in (layer.input.weight, layer.recurrent, layer.recalled):
        assert_uniform(weight, -limit, limit)
    assert not layer.input.bias.any()
    for linear_map, gain in ((layer.read, 1.4), (layer.write, 1.4), (layer.output, 1.0)):
        limit = gain * math.sqrt(6 / (linear_map.in_features + linear_map.out_features))
        assert_uniform(linear_map.weight, -limit, limit)
        assert_normal(linear_map.bias, 0.01)
    many = NTM(200, 100, num_heads=4)
    for linear_map in (many.read, many.write):
        for head in linear_map.weight.chunk(4):
            limit = 1.4 * math.sqrt(6 / (100 + len(head)))
            assert_uniform(head, -limit, limit)
    assert_uniform(layer.memory_0, -1 / math.sqrt(148), 1 / math.sqrt(148))
    assert_normal(layer.h_0, 0.05)
    state = layer.init_state(2)
    torch.testing.assert_close(state.memory, layer.memory_0.expand(2, -1, -1))
    assert not state.weights.any()
    assert NTM(12).width == 6
