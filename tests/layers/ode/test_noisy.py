"""NoisyRNN: its equation step by step, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform, linear
from scanl import layers
from scanl.layers.ode.noisy import NoisyRNN
from tests.layers.ode.equations import part_skew

pytestmark = pytest.mark.cells_by_loop


def noisy(layer, xs):
    h, ys = torch.zeros(DIM), []
    of_a, of_w = layer.gamma
    a, w = part_skew(layer.B, layer.beta, of_a), part_skew(layer.C, layer.beta, of_w)
    for x in xs:
        h = h + layer.d * (layer.alpha * (h @ a) + torch.tanh(h @ w + linear(layer.E, x)))
        ys.append(h)
    return ys


TIMED = ["cornn", "lem", "unicornn", "lipschitz", "antisym", "noisy", "nwm"]


EQUATIONS = {"noisy": (lambda: NoisyRNN(DIM, 0.3, 0.6, (0.2, 0.1), 0.7), noisy)}

REFUSED = [
    (lambda: NoisyRNN(8, mult_noise=2), "noisy: mult_noise is 2, expected 0 to 1"),
    (lambda: NoisyRNN(8, add_noise=-2), "noisy: add_noise is -2, expected at least 0"),
]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", TIMED)
def test_timespans_are_lengths_of_steps(name):
    """A layer with steps twice as long is the layer with timespans of 2; and each step has its own length."""
    layer, x, spans = layers.build(name, DIM), torch.randn(2, 4, DIM), 0.5 + torch.rand(2, 4)
    once, doubled = layer(x, timespans=torch.full((2, 4), 2.0))[0], layers.build(name, DIM)
    doubled.load_state_dict(layer.state_dict())
    if name == "noisy":
        torch.nn.init.constant_(doubled.d, 0.2)
    else:
        option = "dt" if hasattr(layer, "dt") else "eps"
        setattr(doubled, option, 2 * getattr(layer, option))
    torch.testing.assert_close(doubled(x)[0], once)
    whole, state = layer(x, timespans=spans)[0], None
    for t in range(4):
        y, state = layer(x[:, t : t + 1], state, timespans=spans[:, t : t + 1])
        torch.testing.assert_close(y[:, 0], whole[:, t])


@pytest.mark.usefixtures("double")
def test_noise_is_drawn_in_training_alone():
    quiet, x = NoisyRNN(DIM), torch.randn(2, 30, DIM)
    expected = quiet(x)[0]
    for levels in ({"add_noise": 0.3}, {"mult_noise": 0.5}):
        layer = NoisyRNN(DIM, **levels)
        layer.load_state_dict(quiet.state_dict())
        first, second = layer(x)[0], layer(x)[0]
        assert not torch.equal(first, second)
        assert (first - expected).abs().max() > 0.01
        torch.manual_seed(3)
        first = layer(x)[0]
        torch.manual_seed(3)
        assert torch.equal(layer(x)[0], first)
        layer.eval()
        assert torch.equal(layer(x)[0], expected)


@pytest.mark.usefixtures("double")
def test_noise_has_its_declared_distribution():
    layer, x = NoisyRNN(64, add_noise=0.3, mult_noise=0.4), torch.zeros(8, 50, 64)
    _, step, *_, noise = layer.operands(x, torch.ones(8, 50, 1))
    assert_normal(noise, 0.3)
    assert_uniform(step / 0.1, 0.6, 1.0)
    torch.nn.init.zeros_(layer.d)  # a state that does not move sums the noise
    torch.manual_seed(0)
    y, _ = layer(x)
    torch.manual_seed(0)
    torch.testing.assert_close(y, layer.operands(x, torch.ones(8, 50, 1))[-1].cumsum(1))
