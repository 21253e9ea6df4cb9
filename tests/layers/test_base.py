"""The body that layers share, and layers made of other layers: against their equations, and as a user writes them."""

import math

import pytest
import torch
from torch.nn import functional as F

from by_hand import DIM, T, assert_uniform, convolve, layer_norm, sigmoid, silu
from scanl.layers import Bidirectional, LinearRNN, MultiScale
from scanl.layers.parts.short_convolution import ShortConvolution
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
    "multi_scale": (lambda: MultiScale(DIM, 3), multi_scale),
}


def test_centred_convolution_is_torch_s():
    layer, x = ShortConvolution(DIM, 3, causal=False), torch.randn(2, T, DIM)
    expected = F.conv1d(x.mT, layer.conv.weight, layer.conv.bias, padding=1, groups=DIM).mT
    torch.testing.assert_close(layer(x)[0], expected)
    assert layer(x)[1] == ()


def test_multi_scale_impulse_response_is_a_mean_of_exponentials():
    layer = MultiScale(1, 4, expand=1)
    impulse = torch.zeros(1, T, 1)
    impulse[0, 0] = 1
    response, last = layer.recurrent_forward(impulse, None)
    expected = torch.linspace(0.1, 0.9, 4)[:, None] ** torch.arange(T)
    torch.testing.assert_close(response[0, :, 0], expected.mean(0))
    torch.testing.assert_close(last[0, :, 0], expected[:, -1])
    assert 390_000 < sum(parameter.numel() for parameter in MultiScale(256).parameters()) < 410_000  # one body


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


# --- the four examples of the component document, as a user writes them


def test_example_1_trains_and_decodes():
    model = LinearRNN(dim=512, expand=2, conv_size=4)
    output, state = model(torch.randn(2, 100, 512))
    assert output.shape == (2, 100, 512)
    assert state.shape == (2, 1024)
    state = model.init_state(batch_size=1, device="cpu")
    for _ in range(100):
        output, state = model(torch.randn(1, 1, 512), state)
        assert output.shape == (1, 1, 512)


def test_example_2_a_custom_recurrence_trains_and_streams():
    class MyCustomRNN(LinearRNN):
        def __init__(self, dim, expand=2):
            super().__init__(dim, expand)
            self.W_state = torch.nn.Linear(self.hidden_dim, self.hidden_dim, bias=False)
            self.decay = torch.nn.Parameter(torch.randn(self.hidden_dim))

        def recurrent_forward(self, x, state):
            batch_size, seq_len, hidden_dim = x.shape
            if state is None:
                state = torch.zeros(batch_size, hidden_dim, device=x.device)
            outputs = []
            for t in range(seq_len):
                state = torch.sigmoid(self.decay) * state + self.W_state(x[:, t])
                outputs.append(state)
            return torch.stack(outputs, dim=1), state

    model = MyCustomRNN(dim=16)
    x = torch.randn(2, 20, 16)
    target = x.roll(2, 1)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        loss = F.mse_loss(model(x)[0], target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    whole, last = model(x)
    state, ys = model.init_state(2), []
    for t in range(20):
        y, state = model(x[:, t : t + 1], state)
        ys.append(y)
    torch.testing.assert_close(torch.cat(ys, 1), whole)
    assert state.shape == last.shape == (2, 32)


def test_example_3_a_short_convolution_in_both_modes():
    conv = ShortConvolution(dim=512, conv_size=4, causal=True)
    x = torch.randn(2, 100, 512)
    y, cache = conv(x)
    assert y.shape == (2, 100, 512)
    cache, ys = None, []
    for t in range(10):
        y_t, cache = conv(x[:, t : t + 1], cache)
        assert y_t.shape == (2, 1, 512)
        assert cache.shape == (2, 3, 512)
        ys.append(y_t)
    torch.testing.assert_close(torch.cat(ys, 1), y[:, :10])


def test_example_4_a_matrix_state():
    class ExponentialDecayRNN(LinearRNN):
        def __init__(self, dim, expand=2, num_heads=8):
            super().__init__(dim, expand)
            self.num_heads = num_heads
            self.head_dim = self.hidden_dim // num_heads
            self.decay = torch.nn.Parameter(torch.randn(num_heads, self.head_dim))
            self.k_proj = torch.nn.Linear(self.hidden_dim, self.hidden_dim, bias=False)
            self.v_proj = torch.nn.Linear(self.hidden_dim, self.hidden_dim, bias=False)

        def recurrent_forward(self, x, state):
            batch, seq_len, _ = x.shape
            if state is None:
                state = torch.zeros(batch, self.num_heads, self.head_dim, self.head_dim, dtype=x.dtype)
            k = self.k_proj(x).view(batch, seq_len, self.num_heads, self.head_dim)
            v = self.v_proj(x).view(batch, seq_len, self.num_heads, self.head_dim)
            outputs = []
            decay_factor = torch.sigmoid(self.decay)
            for t in range(seq_len):
                state = state * decay_factor.unsqueeze(0).unsqueeze(-1)
                state = state + torch.einsum("bhd,bhe->bhde", k[:, t], v[:, t])
                outputs.append(torch.einsum("bhde,bhe->bhd", state, v[:, t]))
            return torch.stack(outputs, dim=1).reshape(batch, seq_len, self.hidden_dim), state

    rnn = ExponentialDecayRNN(dim=512, num_heads=8)
    x = torch.randn(2, 10, 512)
    output, state = rnn(x)
    assert output.shape == (2, 10, 512)
    assert state.shape == (2, 8, 128, 128)
    left, state = rnn(x[:, :4])
    right, _ = rnn(x[:, 4:], state)
    torch.testing.assert_close(torch.cat([left, right], 1), output)
