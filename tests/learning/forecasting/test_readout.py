"""Ridge regression of readouts: against its formula, in pieces, and on a reservoir that predicts a chaotic series."""

import numpy as np
import pytest
import torch
from torch import nn

from scanl.errors import ConfigError, ShapeError
from scanl.layers.rnn.esn import ESN
from scanl.learning.forecasting.readout import Ridge, fit_readout


def data(rows=60, features=5, targets=2):
    generator = torch.Generator().manual_seed(0)
    s, y = (torch.randn(rows, width, generator=generator, dtype=torch.float64) for width in (features, targets))
    return s + 3, y - 7


def test_ridge_is_its_formula():
    s, y = data()
    weight, bias = Ridge(0.7).add(s, y).solve()
    centred = s - s.mean(0)
    expected = torch.linalg.solve(centred.T @ centred + 0.7 * torch.eye(5).double(), centred.T @ (y - y.mean(0))).T
    torch.testing.assert_close(weight, expected)
    torch.testing.assert_close(bias, y.mean(0) - expected @ s.mean(0))
    weight, bias = Ridge().add(s, y).solve()
    least, *_ = np.linalg.lstsq(np.column_stack([s, np.ones(60)]), y.numpy(), rcond=None)
    torch.testing.assert_close(torch.cat([weight, bias[:, None]], 1), torch.from_numpy(least).T)


def test_pieces_are_the_whole():
    s, y = data()
    whole, parts = Ridge(0.1).add(s, y), Ridge(0.1)
    for start, end in ((0, 1), (1, 1), (1, 20), (20, 60)):
        parts.add(s[start:end], y[start:end])
    for found, expected in zip(parts.solve(), whole.solve(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    batched = Ridge(0.1).add(s.view(3, 4, 5, 5), y.view(3, 4, 5, 2))
    torch.testing.assert_close(batched.solve(), whole.solve())


def test_a_large_constant_costs_no_precision():
    s, y = data()
    weight, _ = Ridge().add(s, y).solve()
    far = Ridge()
    for start in range(0, 60, 7):
        far.add(s[start : start + 7] + 1e6, y[start : start + 7])
    torch.testing.assert_close(far.solve()[0], weight, rtol=1e-7, atol=0)


def test_features_that_repeat_get_the_solution_of_least_norm():
    s, y = data()
    weight, _ = Ridge().add(torch.cat([s, s], 1), y).solve()
    torch.testing.assert_close(weight, torch.cat([Ridge().add(s, y).solve()[0] / 2] * 2, 1))


def mackey_glass(steps, delay=17, fine=10):
    """dx/dt = 0.2 x(t - 17) / (1 + x(t - 17)^10) - 0.1 x, by Euler's method with a step of 0.1."""
    x = [1.2] * (delay * fine)
    for _ in range(steps * fine):
        late = x[-delay * fine]
        x.append(x[-1] + (0.2 * late / (1 + late**10) - 0.1 * x[-1]) / fine)
    return torch.tensor(x[delay * fine :: fine], dtype=torch.float64)


def test_a_reservoir_predicts_mackey_glass():
    """One step ahead, on steps that it was not fitted to: far better than the last value repeated."""
    torch.manual_seed(0)
    series = mackey_glass(1200)[:, None] - 0.9
    layer = ESN(1, width=100, spectral_radius=1.1, leak=0.5, input_connectivity=1.0).double()
    reservoir = layer.W.clone()
    fit = fit_readout(layer, layer.readout, [(series[None, :800], series[None, 1:801])], penalty=1e-8, washout=100)
    assert fit.rows == 700
    y, _ = layer(series[None, :-1])

    def error(guess):
        target = series[801:]
        return ((guess - target).square().mean() / target.var()).sqrt()

    assert error(y[0, 800:]) < 0.05 * error(series[800:-1])
    assert torch.equal(layer.W, reservoir)


def test_batches_are_fitted_together_and_the_hook_goes():
    torch.manual_seed(0)
    layer, x = ESN(3, width=12, connectivity=0.5).double(), torch.randn(4, 30, 3).double()
    target = x.cumsum(1)
    fit_readout(layer, layer.readout, [(x, target)], washout=5)
    once = layer.readout.weight.clone()
    fit_readout(layer, layer.readout, [(x[:1], target[:1]), (x[1:], target[1:])], washout=5)
    torch.testing.assert_close(layer.readout.weight, once)
    assert not layer.readout._forward_pre_hooks
    assert layer.readout.weight.requires_grad


def test_wrong_input_is_refused():
    s, y = data()
    with pytest.raises(ConfigError, match="Ridge: penalty is -1, expected at least 0"):
        Ridge(-1)
    with pytest.raises(ConfigError, match="Ridge: no data were added"):
        Ridge().solve()
    with pytest.raises(
        ShapeError, match=r"Ridge: targets has shape \(59, 2\), expected \(60, 'O'\) because of features"
    ):
        Ridge().add(s, y[1:])
    with pytest.raises(ShapeError, match="Ridge: features and targets have 4 and 2 channels, expected 5 and 2 because"):
        Ridge().add(s, y).add(s[:, 1:], y)
    layer, x = ESN(3), torch.zeros(1, 2, 3)
    with pytest.raises(ConfigError, match="fit_readout: washout is -1, expected at least 0"):
        fit_readout(layer, layer.readout, [(x, x)], washout=-1)
    with pytest.raises(ConfigError, match="fit_readout: the model called the readout 0 times, expected once"):
        fit_readout(layer, nn.Linear(3, 3), [(x, x)])
    with pytest.raises(ConfigError, match="fit_readout: the readout has no bias, expected one because the data are"):
        fit_readout(bare := nn.Linear(3, 3, bias=False), bare, [(x, x)])
