import numpy as np
import pytest
import torch
from torch.testing import assert_close

from scanl.learning.forecasting import pretraining
from scanl.learning.forecasting.pretraining import batch_loss, new_model, pretrain
from scanl.models import PretrainedForecaster, pretrained_forecaster


@pytest.fixture(autouse=True)
def few_series(monkeypatch):
    monkeypatch.setattr(pretraining, "TOKENS", 1500)
    monkeypatch.setattr(pretraining, "FORECASTS", 500)


SMALL = {"dim": 8, "depth": 1, "width": 8}


def loss(model):
    with torch.no_grad():
        return float(np.mean([batch_loss(model, np.random.default_rng((9, k))).item() for k in range(4)]))


def test_training_goes_on_where_it_ended(tmp_path):
    pretrain(tmp_path / "whole", minutes=1, steps=4, seed=0, **SMALL)
    pretrain(tmp_path / "pieces", minutes=1, steps=4, seed=0, stop=2, **SMALL)
    pretrain(tmp_path / "pieces", minutes=1, steps=4, seed=0, **SMALL)
    whole, pieces = (PretrainedForecaster.load(tmp_path / name).state_dict() for name in ("whole", "pieces"))
    assert_close(pieces, whole, rtol=0, atol=0)


def test_the_packaged_model_has_learnt():
    torch.manual_seed(0)
    assert loss(pretrained_forecaster()) < 0.97 * loss(new_model(0).double())
