import hashlib

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from scanl.errors import ConfigError, ShapeError
from scanl.models import pretrained_forecaster
from scanl.models.forecasting.pretrained import DIGEST, WEIGHTS
from scanl.ops import exact


@pytest.fixture
def series():
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 150, 2, generator=draw, dtype=torch.float64)
    y = noise.cumsum(1) + 4 * torch.sin(torch.arange(150) * torch.pi / 6)[None, :, None]
    y[0, 40:60, 0] = torch.nan
    return y


def test_stream_is_whole(series):
    whole, _ = pretrained_forecaster().predict(series, horizon=70, season=(12, 36))
    state = None
    for begin, end in ((0, 1), (1, 90), (90, 149), (149, 150)):
        pieces, state = pretrained_forecaster().predict(series[:, begin:end], state, horizon=70, season=(12, 36))
    assert_close(pieces, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cuts", [(1, 2, 40), range(1, 81)])
def test_bits_of_a_stream_are_those_of_the_whole(cuts):
    """In float64, over two seasons that begin, missing values, and rows beyond those of a block."""
    model, season, levels = pretrained_forecaster(), (4, 12), (0.1, 0.5, 0.9)
    y = np.random.default_rng(0).normal(size=(2, 80)).cumsum(1)
    y[0, 30:34] = y[1, :3] = np.nan
    with exact():
        whole, last = model.each(y, model.init_state(2, season=season), np.arange(80), horizon=3, levels=levels)
        state, begin = model.init_state(1, season=season), 0
        for end in (*cuts, 80):
            if end > begin:
                piece = y[1:, begin:end].copy()
                answers, state = model.each(piece, state, np.arange(end - begin), horizon=3, levels=levels)
                np.testing.assert_array_equal(answers, whole[1:, begin:end])
                begin = end
    assert torch.equal(state.simple.errors, last.simple.errors[1:])


def test_missing_values_in_front_are_not_read(series):
    alone, _ = pretrained_forecaster().predict(series[1:, 70:], horizon=3, season=12)
    padded = series.clone()
    padded[1, :70] = torch.nan
    both, _ = pretrained_forecaster().predict(padded, horizon=3, season=12)
    assert_close(both.quantiles[1:], alone.quantiles, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("scale", "shift"), [(1e-9, 0), (1e9, 0), (1, 1e9), (3.7, -50)])
def test_scale_and_shift(series, scale, shift):
    usual = pretrained_forecaster().predict(series, horizon=70, season=12)[0].quantiles
    moved = pretrained_forecaster().predict(scale * series + shift, horizon=70, season=12)[0].quantiles
    assert_close((moved - shift) / scale, usual, rtol=1e-6, atol=1e-6)


def test_edges():
    def median(*values, **how):
        x = torch.tensor(values, dtype=torch.float64)[None, :, None]
        quantiles = pretrained_forecaster().predict(x, horizon=2, **how)[0].quantiles[0, :, 0]
        assert (quantiles.diff(dim=-1) >= 0).all() or quantiles.isnan().all()
        return quantiles[:, 5].tolist()

    assert median(5.0) == median(*[5.0] * 9, season=4) == [5.0, 5.0]
    assert all(0 < value < 4 for value in median(1.0, 2.0))
    assert all(value != value for value in median(torch.nan, torch.nan))
    assert median(*[0.0] * 30, 1.0, *[0.0] * 30) == pytest.approx([0.0, 0.0], abs=0.05)
    for wrong, message in (
        (torch.zeros(1, 0, 1), "T at least 1"),
        (torch.zeros(1, 3, 1).long(), "expected real numbers"),
        (torch.full((1, 3, 1), torch.inf), "x has an infinite number"),
    ):
        with pytest.raises(ShapeError, match=message):
            pretrained_forecaster().predict(wrong, horizon=1)
    with pytest.raises(ConfigError, match="expected the longer one last"):
        median(1.0, 2.0, season=(24, 12))
    with pytest.raises(ConfigError, match="horizon is 0"):
        pretrained_forecaster().predict(torch.zeros(1, 3, 1), horizon=0)
    _, state = pretrained_forecaster().predict(torch.zeros(1, 3, 1), horizon=1)
    with pytest.raises(ShapeError, match="state has 1 series, expected 2"):
        pretrained_forecaster().predict(torch.zeros(2, 3, 1), state, horizon=1)


@pytest.mark.parametrize("missing", [0, 60])
def test_season_and_trend_are_forecast(missing):
    """With half of the rows missing in the middle too."""
    steps = torch.arange(140, dtype=torch.float64)
    y = 100 + steps + 20 * torch.sin(steps * torch.pi / 6)
    read = y[None, :120, None].clone()
    read[:, 30 : 30 + missing] = torch.nan
    forecast, _ = pretrained_forecaster().predict(read, horizon=20, season=12)
    assert (forecast.mean[0, :, 0] - y[120:]).abs().max() < (10 if missing else 5)


@pytest.mark.parametrize("missing", [0, 15, 50])
def test_intervals_of_short_walks(missing):
    """They cover as often as they say, where a series has few values and no season, and none at the end."""
    draw, last = torch.Generator().manual_seed(0), 20 + 2 * missing
    drift = torch.randn(300, 1, 1, generator=draw, dtype=torch.float64) / 2 * (missing == 0)
    y = (torch.randn(300, last + 6, 1, generator=draw, dtype=torch.float64) + drift).cumsum(1)
    read = y[:, :last].clone()
    read[:, last - missing :] = torch.nan
    forecast, _ = pretrained_forecaster().predict(read, horizon=6, levels=(0.1, 0.9))
    low, high = forecast.quantiles.unbind(-1)
    inside = ((y[:, last:] > low) & (y[:, last:] < high)).double().mean()
    assert (0.65 if missing else 0.72) < inside < 0.88


def test_what_is_packaged():
    file = WEIGHTS / "model.safetensors"
    assert file.stat().st_size < 2**20
    assert hashlib.sha256(file.read_bytes()).hexdigest() == DIGEST
    assert 100_000 < sum(one.numel() for one in pretrained_forecaster().parameters()) < 500_000
