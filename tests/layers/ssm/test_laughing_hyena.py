"""LaughingHyena: its equation step by step, how it starts, and what only it knows."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform, convolve, linear
from scanl.errors import ConfigError
from scanl.layers import Hyena, LaughingHyena
from scanl.layers.ssm.laughing_hyena import distil, fit_modes


def laughing_hyena(layer, xs):
    first, *others, v = zip(*(u.split(layer.dim) for u in convolve([linear(layer.in_proj, x) for x in xs],
                                                                   layer.short_filter)), strict=True)  # fmt: skip
    roots = torch.polar(torch.exp(-torch.exp(layer.log_decay)), layer.angle)
    residue = torch.complex(*layer.residue.unbind(-1))
    for n, gate in enumerate(reversed(others)):
        s, ys = torch.zeros_like(roots[n]), []
        for x, g in zip(v, gate, strict=True):
            s = roots[n] * s + (x * g)[:, None]
            ys.append((residue[n] * s).real.sum(1) + layer.bias[n] * x * g)
        v = ys
    return [linear(layer.out_proj, y * x) for y, x in zip(v, first, strict=True)]


EQUATIONS = {
    "laughing_hyena": (lambda: LaughingHyena(DIM, 3), laughing_hyena),
    "laughing_hyena_of_order_three": (lambda: LaughingHyena(DIM, 2, 3, 2), laughing_hyena),
}


@pytest.mark.usefixtures("double")
def test_filters_of_few_modes_are_found_exactly():
    """Of order 5: two conjugate pairs and a real mode. And one of order 1, which takes no more."""
    t = torch.arange(60.0)
    one = 0.9**t * torch.cos(0.5 * t) + 0.8**t * torch.sin(1.5 * t + 1) + 0.5 * 0.95**t
    fit = fit_modes(torch.stack([one, 3 * 0.7**t]), tolerance=1e-9)
    assert fit.order.tolist() == [5, 1]
    assert fit.error.max() < 1e-10
    found = fit.modes[0].abs().sort().values
    torch.testing.assert_close(found, torch.tensor([0.8, 0.9, 0.95]), rtol=1e-8, atol=0)
    powers = fit.modes[..., None] ** t
    made = (fit.residue[..., None] * powers).real.sum(1)
    made[:, 0] += fit.bias
    torch.testing.assert_close(made, torch.stack([one, 3 * 0.7**t]))
    square = torch.stack([one[i + 1 : i + 31] for i in range(30)])
    expected = torch.linalg.svdvals(square)
    torch.testing.assert_close(fit.singular[0, :5], expected[:5] / expected[0])


@pytest.mark.usefixtures("double")
def test_a_looser_tolerance_takes_fewer_modes_and_says_its_error():
    torch.manual_seed(0)
    filters = Hyena(3, max_length=200).filter_fn()
    close, loose = fit_modes(filters, tolerance=1e-6), fit_modes(filters, tolerance=1e-2)
    assert (loose.order < close.order).all()
    assert (close.error < 1e-4).all()
    assert (close.error < loose.error).all()
    assert fit_modes(filters, tolerance=1e-6, largest=2).order.max() == 2


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("order", [2, 3])
def test_a_distilled_hyena_is_its_teacher(order):
    torch.manual_seed(0)
    teacher = Hyena(4, max_length=64, order=order)
    layer, fit = distil(teacher, tolerance=1e-6)
    x = torch.randn(2, 64, 4)
    expected, found = teacher(x)[0], layer(x)[0]
    assert fit.error.max() < 1e-4
    assert (found - expected).norm() < 1e-3 * expected.norm()
    state, ys = layer.init_state(2), []
    for each in x.unbind(1):
        y, state = layer.step(each, state)
        ys.append(y)
    torch.testing.assert_close(torch.stack(ys, 1), found)


def test_init():
    layer = LaughingHyena(500, 8)
    assert_uniform(layer.log_decay, math.log(1e-3), 0.0)
    assert_uniform(layer.angle, 0.0, math.pi)
    assert_normal(layer.residue, (0.5 / 8) ** 0.5)
    assert_normal(layer.bias, 1.0)


def test_wrong_options():
    with pytest.raises(ConfigError, match="laughing_hyena: order is 1, expected at least 2"):
        LaughingHyena(4, order=1)
    with pytest.raises(ConfigError, match="laughing_hyena: state_dim is 0, expected at least 1"):
        LaughingHyena(4, 0)
    with pytest.raises(ConfigError, match=r"distil: tolerance, largest are 0, 64, expected in \(0, 1\)"):
        fit_modes(torch.ones(1, 9), tolerance=0)
    with pytest.raises(ConfigError, match="distil: a filter has 2 lags, expected at least 3"):
        fit_modes(torch.ones(1, 2))
