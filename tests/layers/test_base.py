"""The body that layers share, and layers made of other layers: against their equations, and as a user writes them."""

import math

import pytest
import torch
from torch.nn import functional as F

from by_hand import DIM, T, assert_uniform, convolve, layer_norm, sigmoid, silu
from scanl.layers import Bidirectional, LinearRNN, MultiScaleRNN, ShortConvolution
from tests.layers.ssm.test_lru import lru

COVERS = ["layers/bidirectional", "layers/linear_rnn", "layers/multi_scale"]


def linear_rnn(layer, xs):
    mixed = [layer.in_proj.weight @ x + layer.in_proj.bias for x in xs]
    branch = [silu(v) for v in convolve([v[: layer.hidden_dim] for v in mixed], layer.conv)]
    s, ys = torch.zeros(layer.hidden_dim), []
    for u, v in zip(branch, mixed, strict=True):
        s = sigmoid(layer.decay) * s + u
        y = layer_norm(s, layer.norm) * silu(v[layer.hidden_dim :])
        ys.append(layer.out_proj.weight @ y + layer.out_proj.bias)
    return ys


def multi_scale(layer, xs):
    mixed = [layer.in_proj.weight @ x + layer.in_proj.bias for x in xs]
    branch = [silu(v) for v in convolve([v[: layer.hidden_dim] for v in mixed], layer.conv)]
    states, ys = [torch.zeros(layer.hidden_dim) for _ in layer.decay], []
    for u, v in zip(branch, mixed, strict=True):
        states = [sigmoid(decay) * s + u for decay, s in zip(layer.decay, states, strict=True)]
        y = layer_norm(sum(states) / len(states), layer.norm) * silu(v[layer.hidden_dim :])
        ys.append(layer.out_proj.weight @ y + layer.out_proj.bias)
    return ys


EQUATIONS = {
    "linear_rnn": (lambda: LinearRNN(DIM), linear_rnn),
    "short_convolution": (lambda: ShortConvolution(DIM), lambda layer, xs: convolve(xs, layer.conv)),
    "bidirectional": (
        lambda: Bidirectional(DIM, "lru"),
        lambda layer, xs: [
            a + b for a, b in zip(lru(layer.forward_layer, xs), lru(layer.backward_layer, xs[::-1])[::-1], strict=True)
        ],
    ),
    "multi_scale": (lambda: MultiScaleRNN(DIM, num_scales=3), multi_scale),
}


def test_centred_convolution_is_torch_s():
    layer, x = ShortConvolution(DIM, 3, causal=False), torch.randn(2, T, DIM)
    expected = F.conv1d(x.mT, layer.conv.weight, layer.conv.bias, padding=1, groups=DIM).mT
    torch.testing.assert_close(layer(x)[0], expected)


def test_multi_scale_impulse_response_is_a_mean_of_exponentials():
    layer = MultiScaleRNN(1, 1, 4)
    impulse = torch.zeros(1, T, 1)
    impulse[0, 0] = 1
    response, last = layer.recurrent_forward(impulse, None)
    expected = torch.linspace(0.1, 0.9, 4)[:, None] ** torch.arange(T)
    torch.testing.assert_close(response[0, :, 0], expected.mean(0))
    torch.testing.assert_close(last[0, :, 0], expected[:, -1])
    assert 390_000 < sum(parameter.numel() for parameter in MultiScaleRNN(256).parameters()) < 410_000  # one body


@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_weights_of_the_base_block_load_by_name(norm_before_gate):
    """The names and shapes of the base block as its document has it; the norm before or after the gate."""
    width = 2 * DIM
    weights = {
        "in_proj.weight": torch.randn(2 * width, DIM), "in_proj.bias": torch.randn(2 * width),
        "conv.weight": torch.randn(width, 1, 4), "conv.bias": torch.randn(width),
        "norm.weight": torch.randn(width), "norm.bias": torch.randn(width),
        "out_proj.weight": torch.randn(DIM, width), "out_proj.bias": torch.randn(DIM), "decay": torch.randn(width),
    }  # fmt: skip
    layer = LinearRNN(DIM, norm_before_gate=norm_before_gate)
    layer.load_state_dict(weights)
    u = torch.randn(2, T, DIM)
    x, z = F.linear(u, weights["in_proj.weight"], weights["in_proj.bias"]).chunk(2, -1)
    x = F.conv1d(x.mT, weights["conv.weight"], weights["conv.bias"], padding=3, groups=width)[..., :T].mT
    h, steps = torch.zeros(2, width), []
    for step in F.silu(x).unbind(1):
        h = weights["decay"].sigmoid() * h + step
        steps.append(h)
    y = torch.stack(steps, 1)
    norm = lambda part: F.layer_norm(part, (width,), weights["norm.weight"], weights["norm.bias"])  # noqa: E731
    y = norm(y) * F.silu(z) if norm_before_gate else norm(y * F.silu(z))
    torch.testing.assert_close(layer(u)[0], F.linear(y, weights["out_proj.weight"], weights["out_proj.bias"]))
    short = ShortConvolution(width)
    short.load_state_dict({name: weights[name] for name in ("conv.weight", "conv.bias")})


def test_init_of_linear_rnn():
    layer = LinearRNN(64)
    limit = math.sqrt(6 / (64 + 256))
    assert_uniform(layer.in_proj.weight, -limit, limit)
    limit = math.sqrt(6 / 128)
    assert_uniform(layer.out_proj.weight, -limit, limit)
    torch.testing.assert_close(layer.decay.sigmoid(), torch.full((128,), 0.9))
    assert not any(bias.any() for bias in (layer.in_proj.bias, layer.out_proj.bias, layer.conv.bias))
