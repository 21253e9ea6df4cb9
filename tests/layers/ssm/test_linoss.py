"""LinOSS: its equation step by step, how it starts, and what only it knows."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform, gelu_tanh, linear, sigmoid
from scanl import layers
from scanl.errors import ConfigError
from scanl.layers import LinOSS, LinOSSIMEX

pytestmark = pytest.mark.cells_by_loop("name")


def linoss(layer, xs, spans=None):
    """Each oscillator as a complex pair (z, y), moved by solving its 2 x 2 system."""
    A, B, C = layer.A_diag.clamp(min=0), torch.complex(*layer.B.unbind(-1)), torch.complex(*layer.C.unbind(-1))
    one, none, spans = torch.ones_like(A), torch.zeros_like(A), torch.ones(len(xs)) if spans is None else spans
    s, ys = torch.zeros(len(A), 2, dtype=B.dtype), []
    for x, span in zip(xs, spans, strict=True):
        step = span * sigmoid(layer.steps)
        right = torch.stack([s[:, 0] + step * (B @ x.to(B.dtype)), s[:, 1]], 1)
        spring = none if layer.discretization == "IMEX" else step * A
        if layer.discretization == "IMEX":
            right = right - torch.stack([step * A * s[:, 1], none], 1)
        left = torch.stack([torch.stack([one, spring], 1), torch.stack([-step, one], 1)], 1)
        s = torch.linalg.solve(left.to(B.dtype), right[..., None])[..., 0]
        g = gelu_tanh((C @ s[:, 1]).real + layer.D * x)
        ys.append(linear(layer.w1, g) * sigmoid(linear(layer.w2, g)))
    return ys


def at_rest(layer):
    """Some oscillators without a spring, whose two eigenvalues are equal."""
    with torch.no_grad():
        layer.A_diag[::2] = -0.5
    return layer


EQUATIONS = {
    "linoss": (lambda: LinOSS(DIM, 5), linoss),
    "linoss_without_springs": (lambda: at_rest(LinOSS(DIM)), linoss),
    "linoss_imex": (lambda: LinOSSIMEX(DIM, 3), linoss),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", EQUATIONS)
def test_oscillators_follow_the_time_between_steps(name):
    layer, x, spans = EQUATIONS[name][0](), torch.randn(2, 6, DIM), 2 * torch.rand(2, 6) + 0.1
    y, _ = layer(x, timespans=spans)
    for row in range(2):
        torch.testing.assert_close(y[row], torch.stack(linoss(layer, list(x[row]), spans[row])))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("discretization", ["IM", "IMEX"])
def test_the_energy_of_oscillators_without_input(discretization):
    """IMEX keeps z² + A y² - Δ A z y over a thousand steps; of IM, |state| falls by sqrt(1 / (1 + Δ² A)) a step."""
    layer = LinOSS(DIM, 6, discretization)
    state = torch.randn(1, 2, 12)
    _, last = layer(torch.zeros(1, 1000, DIM), state)
    A, step = layer.A_diag.repeat(2), sigmoid(layer.steps).repeat(2)

    def energy(state):
        z, y = state[0]
        return z**2 + A * y**2 - (step * A * z * y if discretization == "IMEX" else 0)

    falls = 1.0 if discretization == "IMEX" else (1 + step**2 * A) ** -1000
    torch.testing.assert_close(energy(last), energy(state) * falls, rtol=1e-10, atol=1e-300)


@pytest.mark.usefixtures("double")
def test_init_of_linoss():
    layer = LinOSS(300, 500)
    assert_uniform(layer.A_diag, 0, 1)
    assert_uniform(layer.steps, 0, 1)
    assert_uniform(layer.B, -1 / math.sqrt(300), 1 / math.sqrt(300))
    assert_uniform(layer.C, -1 / math.sqrt(500), 1 / math.sqrt(500))
    assert_normal(layer.D, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_dim": 0}, "linoss: state_dim is 0, expected at least 1"),
        ({"discretization": "IMX"}, "linoss: unknown discretization 'IMX'; did you mean 'IM"),
    ],
)
def test_wrong_options_of_linoss_are_refused(options, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        layers.build("linoss", DIM, **options)
