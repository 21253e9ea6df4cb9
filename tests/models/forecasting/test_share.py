import pytest
import torch
from torch.testing import assert_close

from scanl.errors import CheckpointError, ShapeError
from scanl.layers import state as states
from scanl.models import Channels, Forecaster, Normalization, PretrainedShare, Stack, pretrained_forecaster

LEVELS = (0.1, 0.5, 0.9)


def forecaster(share):
    torch.manual_seed(0)
    form = Normalization(beside=share)
    return Forecaster(5, Stack(8, 1, "gru"), Channels(2), distribution="quantiles", normalization=form).double().eval()


@pytest.fixture
def series():
    draw = torch.Generator().manual_seed(0)
    y = torch.randn(3, 80, 2, generator=draw, dtype=torch.float64).cumsum(1)
    y[0, :, 1] = torch.nan
    return y


def test_a_forecast_is_the_mean_by_the_share(series):
    ours, _ = forecaster(None).predict(series, levels=LEVELS)
    theirs, _ = pretrained_forecaster().predict(series, horizon=5, season=(7, 28), levels=LEVELS)
    both, _ = forecaster(PretrainedShare(0.25, 7, 28)).predict(series, levels=LEVELS)
    expected = 0.75 * ours.quantiles + 0.25 * theirs.quantiles
    assert_close(both.quantiles, torch.where(expected.isnan(), ours.quantiles, expected))
    assert not both.mean.isnan().any()


def test_stream_is_whole_and_rows_are_alone(series):
    model = forecaster(PretrainedShare(0.5, 7))
    whole, _ = model.predict(series)
    _, state = model.predict(series[:, :50], model.init_state(3))
    state = states.index(state, torch.tensor([2, 0]))
    later, _ = model.predict(series[[2, 0], 50:], state)
    assert_close(later, type(later)(*(part[[2, 0]] for part in whole)))


def test_what_is_refused(series):
    model = forecaster(PretrainedShare(0.5))
    _, state = model(series)
    with pytest.raises(ShapeError, match="state has no pretrained part"):
        model.predict(series, state)
    with pytest.raises(CheckpointError, match="digest of the pretrained model was abc in training"):
        forecaster(PretrainedShare(0.5, digest="abc")).predict(series)
