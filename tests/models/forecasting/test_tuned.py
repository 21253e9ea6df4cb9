import pytest
import torch
from torch.testing import assert_close

from scanl.errors import ShapeError
from scanl.models import Channels, PretrainedForecaster, Stack, TunedForecaster, pretrained_forecaster
from scanl.series_columns import SeriesColumns


@pytest.fixture
def model():
    torch.manual_seed(0)
    return TunedForecaster(3, PretrainedForecaster(Stack(8, 1, "lru"), 8), Channels(2), season=4).eval()


def test_the_forecast_is_that_of_its_forecaster(model, tmp_path):
    """Also from a state, and loaded."""
    x = torch.randn(2, 30, 2)
    right, _ = model.forecaster.predict(x, horizon=3, season=(4, 1), levels=(0.1, 0.5))
    _, state = model.predict(x[:, :20], levels=(0.1, 0.5))
    later, _ = model.predict(x[:, 20:], state, levels=(0.1, 0.5))
    assert_close(later, right)
    model.save(tmp_path)
    loaded, _ = TunedForecaster.load(tmp_path).predict(SeriesColumns(x), levels=(0.1, 0.5))
    assert_close(loaded, right, rtol=0, atol=0)
    assert model.init_state(2).simple.known.shape == (4,)


def test_the_model_in_the_package_has_memory_whoever_asks_first():
    pretrained_forecaster.cache_clear()
    with torch.device("meta"):
        assert not any(part.is_meta for part in pretrained_forecaster().state_dict().values())


def test_another_number_of_targets_is_refused(model):
    with pytest.raises(ShapeError, match=r"expected a floating dtype and \(B, T, 2\)"):
        model.predict(torch.zeros(1, 4, 1))
