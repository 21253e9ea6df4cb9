import copy

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch.testing import assert_close

from scanl.layers import state as states
from scanl.models import TunedForecaster, pretrained_forecaster
from scanl.models.forecasting import pretrained
from scanl.models.forecasting.pretrained_step import PretrainedStep, stepped

LEVELS, NOW = (0.1, 0.5, 0.9), np.array([0])


@pytest.fixture
def series():
    draw = np.random.default_rng(0)
    y = draw.normal(size=(2, 40)).cumsum(1) + 3 * np.sin(2 * np.pi * np.arange(40) / 5)
    y[0, 20:26] = y[1, :5] = np.nan
    return y


def test_a_step_is_a_step_of_the_whole(series):
    """Both seasons begin, and the first one is set twice."""
    model, season = pretrained_forecaster(), (5, 15)
    step = PretrainedStep(model, 6, season, LEVELS)
    state = step.init_state(2)
    expected = model.init_state(2, season=season)
    with torch.no_grad():
        for t in range(series.shape[1]):
            answer, expected = model.each(series[:, t : t + 1].copy(), expected, NOW, horizon=6, levels=LEVELS)
            quantiles, state = step(torch.from_numpy(series[:, t : t + 1, None]), state)
            assert_allclose(quantiles.numpy(), answer, rtol=1e-11, atol=1e-11)
    for (name, one), (_, other) in zip(states.leaves(state), states.leaves(expected), strict=True):
        assert_close(one, other, rtol=1e-10, atol=1e-10, msg=name)


def test_a_tuned_forecaster_has_a_step(series):
    model = TunedForecaster(6, copy.deepcopy(pretrained_forecaster()), season=5, second=15)
    step, state = stepped(model), model.init_state(2)
    right, _ = model.predict(torch.from_numpy(series[:, :1, None]), state)
    assert_close(step(torch.from_numpy(series[:, :1, None]), state)[0][:, 0], right.quantiles[:, :, 0], equal_nan=True)
    assert stepped(model.stack) is model.stack


def test_rows_that_come_alone_have_a_kernel(series, monkeypatch):
    """It reads what the whole reads."""
    model = copy.deepcopy(pretrained_forecaster())
    whole, _ = model.each(series, model.init_state(2, season=(5, 15)), np.array([39]), horizon=6, levels=LEVELS)

    monkeypatch.setattr(pretrained, "MIN_SINGLE_STEPS", 10)
    state = model.init_state(2, season=(5, 15))
    for t in range(series.shape[1]):
        answer, state = model.each(series[:, t : t + 1].copy(), state, NOW, horizon=6, levels=LEVELS)
    assert_allclose(answer, whole, rtol=1e-9, atol=1e-9)
    assert len(model._row_kernels._kernels) == 1
