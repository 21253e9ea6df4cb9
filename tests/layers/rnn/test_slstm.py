"""SLSTM: its equation step by step, how it starts, and what it refuses."""

import math

import torch

from by_hand import DIM, assert_uniform, channels, sigmoid
from scanl import layers
from scanl.layers import SLSTM
from scanl.models import Stack


def slstm(layer, xs):
    """Equations (8) to (14), without the stabiliser."""
    H, K = layer.num_heads, DIM // layer.num_heads
    inputs = xs
    if layer.conv1d is not None:
        weight, inputs = layer.conv1d.conv.weight[:, 0].flip(1), []
        for t in range(len(xs)):
            v = layer.conv1d.conv.bias + sum(weight[:, j] * xs[t - j] for j in range(min(t + 1, weight.shape[1])))
            inputs.append(v * sigmoid(v))
    kernel, bias = layer.slstm_cell._recurrent_kernel_.view(H, 4, K, K), layer.slstm_cell._bias_.view(4, H, K)
    h, c, n, ys = torch.zeros(H, K), torch.zeros(H, K), torch.zeros(H, K), []
    for x, u in zip(xs, inputs, strict=True):
        new_h, new_c, new_n = torch.zeros(H, K), torch.zeros(H, K), torch.zeros(H, K)
        for head in range(H):
            part = slice(head * K, (head + 1) * K)
            i, f, z, o = (
                gate.weight[head] @ seen[part] + kernel[head, slot] @ h[head] + bias[slot, head]
                for slot, (gate, seen) in enumerate(
                    [(layer.fgate, u), (layer.igate, u), (layer.zgate, x), (layer.ogate, x)]
                )
            )
            i, f = torch.exp(i), sigmoid(f) if layer.variant == "sigmoid" else torch.exp(f)
            new_c[head] = f * c[head] + i * torch.tanh(z)
            new_n[head] = f * n[head] + i
            new_h[head] = sigmoid(o) * new_c[head] / new_n[head]
        h, c, n = new_h, new_c, new_n
        normed = (h - h.mean(1, keepdim=True)) / torch.sqrt(h.var(1, keepdim=True, correction=0) + 1e-5)
        ys.append(normed.flatten() * (1 + layer.group_norm.weight))
    return ys


EQUATIONS = {"slstm": (lambda: SLSTM(DIM, 2), slstm), "slstm_without_conv": (lambda: SLSTM(DIM, 4, None, "exp"), slstm)}

REFUSED = [
    (lambda: layers.build("slstm", 8, num_heads=3), "slstm: num_heads is 3, expected a divisor of dim=8"),
    (lambda: SLSTM(8, 2, 0), "slstm: conv_size is 0, expected at least 1"),
    (lambda: SLSTM(8, 2, variant="sigmoi"), r"slstm: unknown variant 'sigmoi'; did you mean 'sigmoid'\?"),
]


def test_init_of_slstm():
    stack = Stack(64, 3, "slstm")
    for place, block in enumerate(stack.blocks):
        layer = block.mixer
        bias = layer.slstm_cell._bias_.view(4, 4, 16)
        expected = channels(lambda j, a=place / 2: 5 - 12 * (j / 15) ** (0.3 + 1.3 * a), 16)
        torch.testing.assert_close(bias[1], expected.expand(4, 16))
        assert not bias[[0, 2, 3]].any()
        assert not layer.slstm_cell._recurrent_kernel_.any()
        assert not layer.group_norm.weight.any()
        for gate in (layer.fgate, layer.igate, layer.zgate, layer.ogate):
            assert gate.weight.shape == (4, 16, 16)
            deviation = math.sqrt(2 / (5 * 64))
            assert abs(gate.weight.mean()) < 5 * deviation / 32
            assert abs(gate.weight.std() - deviation) < 5 * deviation / math.sqrt(2 * 1024)
        assert_uniform(layer.conv1d.conv.weight, -0.5, 0.5)
