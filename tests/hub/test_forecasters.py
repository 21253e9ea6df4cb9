"""Forecasters of others: the forecasts that their programs gave, and an error for everything else.

tests/hub/make_forecasters.py makes the checkpoints in `forecasters` anew, and says which programs wrote them.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from scanl import hub
from scanl.errors import CheckpointError, ConfigError, ShapeError

COVERS = ["hub/forecasters/*", "models/forecasting/flowstate"]

FOLDER = Path(__file__).with_name("forecasters")
GIVEN = json.loads((FOLDER / "forecasts.json").read_text())
ERROR = 1e-5
each = pytest.mark.parametrize("name", sorted(GIVEN))


def series_of(name):
    values = [[float("nan") if value is None else value for value in row] for row in GIVEN[name]["series"]]
    return torch.tensor(values)[..., None]


@each
@torch.no_grad()
def test_forecasts_are_those_of_the_authors(name):
    model, x = hub.load(FOLDER / name), series_of(name)
    for horizon, answers in GIVEN[name]["answers"].items():
        wanted = torch.tensor(answers["quantiles"])
        whole, _ = model.predict(x, horizon=int(horizon))
        assert whole.quantiles.shape == (2, int(horizon), 1, wanted.shape[1])
        bound = ERROR * wanted.abs().max()
        assert (whole.quantiles[:, :, 0] - wanted.transpose(1, 2)).abs().max() <= bound
        assert (whole.mean[..., 0] - torch.tensor(answers["mean"])).abs().max() <= bound
        state = None
        for piece in (x[:, :1], x[:, 1:7], x[:, 7:]):
            cut, state = model.predict(piece, state, horizon=int(horizon))
        torch.testing.assert_close(cut.quantiles, whole.quantiles, rtol=0, atol=float(bound))


def test_a_step_reads_weights_that_have_changed():
    model, x = hub.load(FOLDER / "flowstate"), series_of("flowstate").double()
    model.double()
    with torch.no_grad():
        before = model.predict(x, horizon=2)[0].mean
        model.blocks[0].ssm.log_Delta.add_(0.5)
        assert not torch.equal(model.predict(x, horizon=2)[0].mean, before)
    learnt = model.predict(x, horizon=12)[0].mean
    learnt.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_columns_are_series_and_levels_are_between_the_learnt_ones():
    model = hub.load(FOLDER / "flowstate_gated")
    x = series_of("flowstate_gated").transpose(0, 2)
    with torch.no_grad():
        forecast, state = model.predict(x, horizon=5, scale=1.0, levels=(0.25, 0.75))
        assert forecast.quantiles.shape == (1, 5, 2, 2)
        assert (forecast.quantiles.diff() >= 0).all()
        alone, _ = model.predict(x[..., 1:], horizon=5, scale=1.0, levels=(0.25, 0.75))
        torch.testing.assert_close(alone.quantiles, forecast.quantiles[:, :, 1:])
    assert state.scale.tolist() == [1.0, 1.0]
    for wrong, error in (
        ({"scale": 0.0}, ConfigError),
        ({"levels": (1.5,)}, ConfigError),
        ({"horizon": 0}, ConfigError),
    ):
        with pytest.raises(error):
            model.predict(x, **{"horizon": 1} | wrong)
    with pytest.raises(ShapeError, match="state has 2 series, expected 1"):
        model.predict(x[..., :1], state, horizon=1)
    with pytest.raises(ShapeError, match="an infinite number"):
        model.predict(x / 0, horizon=1)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"encoder_num_layers": 3}, "has 2 blocks named model.encoder.layers.*, expected 3"),
        ({"embedding_feature_dim": 10**9}, "expected (1000000000, 2)"),
        ({"decoder_dim": "many"}, "decoder_dim is 'many'"),
        ({"decoder_type": "splines"}, "unknown basis 'splines'"),
        ({"quantiles": 0.5}, "quantiles is 0.5, expected a list"),
        ({"quantiles": [0.1, 1.5] * 4 + [0.5]}, "expected each above 0 and below 1"),
        ({"with_missing": False}, "with_missing is False, expected true"),
        ({"model_type": "flow"}, "model_type is 'flow', expected one of"),
    ],
)  # fmt: skip
def test_other_options_are_refused(entries, said, tmp_path):
    shutil.copytree(FOLDER / "flowstate", tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    with pytest.raises(CheckpointError) as error:
        hub.load(tmp_path / "other")
    assert said in str(error.value)
