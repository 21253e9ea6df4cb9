"""LMU: its equation step by step, how it starts, and what only it knows."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform
from scanl import layers
from scanl.errors import ConfigError
from scanl.layers import LMU
from tests.layers.ssm.equations import window

pytestmark = pytest.mark.cells_by_loop("name")


def lmu(layer, xs, spans=None):
    h, m, ys = torch.zeros(layer.dim), torch.zeros(layer.state_dim), []
    for i, x in enumerate(xs):
        a, b = window(layer, spans, i)
        u = layer.e_x @ x + layer.e_h @ h + layer.e_m @ m
        m = a @ m + b * u
        h = torch.tanh(layer.W_x @ x + layer.W_h @ h + layer.W_m @ m)
        ys.append(h)
    return ys


EQUATIONS = {"lmu": (lambda: LMU(DIM, 5, 7.0), lmu), "lmu_of_one_polynomial": (lambda: LMU(DIM, 1, 3.5), lmu)}


@pytest.mark.usefixtures("double")
def test_the_memory_of_lmu_is_its_system_held_over_a_step():
    """By its entries in the paper, with the exponential as a sum of powers."""
    size, theta = 4, 9.0
    layer = LMU(DIM, size, theta)
    A = torch.tensor([
        [(2 * n + 1) / theta * (-1 if n < k else (-1) ** (n - k + 1)) for k in range(size)] for n in range(size)
    ])  # fmt: skip
    B = torch.tensor([[(2 * n + 1) / theta * (-1) ** n] for n in range(size)])
    power, exponential, integral = torch.eye(size), torch.zeros(size, size), torch.zeros(size, size)
    for k in range(40):
        exponential = exponential + power / float(math.factorial(k))
        integral = integral + power / float(math.factorial(k + 1))
        power = power @ A
    torch.testing.assert_close(layer.A, exponential)
    torch.testing.assert_close(layer.B, integral @ B)


@pytest.mark.usefixtures("double")
def test_the_memory_of_lmu_is_its_window():
    """Σ m_n P_n(2a - 1) is the input a·θ steps ago, of a slow wave to 1 %."""
    theta, size = 100.0, 12
    layer = LMU(1, size, theta)
    wave = torch.sin(torch.arange(300.0) / 20)
    m = torch.zeros(size)
    for u in wave:
        m = layer.A @ m + layer.B[:, 0] * u
    for steps in (0, 25, 60, 90):
        y = 2 * steps / theta - 1
        values = [1.0, y]
        for n in range(1, size - 1):
            values.append(((2 * n + 1) * y * values[n] - n * values[n - 1]) / (n + 1))
        # The input is held over a step, so it lags by half a step.
        expected = math.sin((299.5 - steps) / 20)
        assert abs((m * torch.tensor(values)).sum() - expected) < 1e-2


@pytest.mark.usefixtures("double")
def test_init_of_lmu():
    layer = LMU(600, 100)
    for vector in (layer.e_x, layer.e_h):
        assert_uniform(vector, -math.sqrt(3 / 600), math.sqrt(3 / 600))
    assert not layer.e_m.any()
    for weight, width in ((layer.W_x, 600), (layer.W_h, 600), (layer.W_m, 100)):
        assert_normal(weight, math.sqrt(2 / (600 + width)))


@pytest.mark.parametrize("name", ["lmu", "lmu_parallel"])
@pytest.mark.parametrize(
    ("options", "message"),
    [({"state_dim": 0}, "state_dim is 0, expected at least 1"), ({"theta": 0.0}, "theta is 0.0, expected more")],
)
def test_wrong_options_of_lmu_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=f"^{name}: {message}"):
        layers.build(name, DIM, **options)
