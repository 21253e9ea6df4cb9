"""Forecasters of others: the forecasts that their programs gave, and an error for everything else.

tests/hub/make_forecasters.py makes the checkpoints in `forecasters` anew, and says which programs wrote them.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scanl import hub
from scanl.errors import CheckpointError, ConfigError, ShapeError
from scanl.layers import state as states

COVERS = ["hub/forecasters/*", "models/forecasting/flowstate", "models/forecasting/tirex2*"]

FOLDER = Path(__file__).with_name("forecasters")
GIVEN = json.loads((FOLDER / "forecasts.json").read_text())
ERROR = 1e-5
each = pytest.mark.parametrize("name", sorted(GIVEN))
TIREX2 = json.loads((FOLDER / "tirex2.json").read_text())
MISSING = 1e9  # in the series of that file


def copied(name, entries, folder):
    """Return a copy of a checkpoint with other entries in its config.json."""
    shutil.copytree(FOLDER / name, folder / "other")
    path = folder / "other" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return folder / "other"


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
    ("name", "entries", "said"),
    [
        ("flowstate", {"encoder_num_layers": 3}, "has 2 blocks named model.encoder.layers.*, expected 3"),
        ("flowstate", {"embedding_feature_dim": 10**9}, "expected (1000000000, 2)"),
        ("flowstate", {"decoder_dim": "many"}, "decoder_dim is 'many'"),
        ("flowstate", {"decoder_type": "splines"}, "unknown basis 'splines'"),
        ("flowstate", {"quantiles": 0.5}, "quantiles is 0.5, expected a list"),
        ("flowstate", {"quantiles": [0.1, 1.5] * 4 + [0.5]}, "expected each above 0 and below 1"),
        ("flowstate", {"with_missing": False}, "with_missing is False, expected true"),
        ("flowstate", {"model_type": "flow"}, "model_type is 'flow', expected one of"),
        ("tirex2", {"num_blocks": 3}, "recipe has 2 blocks, expected 3"),
        ("tirex2", {"context_len": "long"}, "context_len is 'long'"),
        ("tirex2", {"future_len": 20}, "future is 20, expected a multiple of patch=8"),
        ("tirex2", {"act_func": "torch.nn.Relu"}, "unknown act_func 'Relu'; did you mean 'ReLU'?"),
        ("tirex2", {"stack_config": {"recipe": ["s", "a"], "templates": {}}}, "s is absent"),
        ("tirex2", {"quantiles": [0.9, 0.5, 0.1]}, "expected at least two, each larger"),
        ("tirex2", {"embedding_dim": 12}, "embedding_dim of s is 8, expected 12"),
        ("tirex2", {"h_expand": 10**9}, "expected (8000000000, 8)"),
    ],
)  # fmt: skip
def test_other_options_are_refused(name, entries, said, tmp_path):
    with pytest.raises(CheckpointError) as error:
        hub.load(copied(name, entries, tmp_path))
    assert said in str(error.value)


@pytest.mark.parametrize("case", TIREX2, ids=["targets", "flips", "known", "stream"])
@torch.no_grad()
def test_forecasts_of_tirex2_are_those_of_the_authors(case, tmp_path):
    model = hub.load(copied("tirex2", case["entries"], tmp_path), dtype=torch.float32)
    x, known = (torch.tensor(case[name]) for name in ("x", "known"))
    x, known = x.masked_fill(x == MISSING, torch.nan), known.masked_fill(known == MISSING, torch.nan)
    state, options = None, {"horizon": case["ahead"], "targets": case["targets"]}
    for piece, answer in zip(x.split(case["pieces"], 1), case["quantiles"], strict=True):
        wanted = torch.tensor(answer)
        if known.shape[-1]:
            forecast = model.predict_known(piece, known, **options)
        else:
            forecast, state = model.predict(piece, state, **options)
        assert (forecast.quantiles - wanted).abs().max() <= ERROR * wanted.abs().max()
        torch.testing.assert_close(forecast.mean, forecast.quantiles[..., 1])


def test_tirex2_keeps_rows_apart_and_refuses_what_it_cannot_read(tmp_path):
    path = copied("tirex2", {"tta_sign_flip": True}, tmp_path)
    model, x = hub.load(path, dtype=torch.float32), torch.randn(3, 24, 2).cumsum(1)
    with torch.no_grad():
        forecast, state = model.predict(x, horizon=16, levels=(0.05, 0.3, 0.9))
        alone, _ = model.predict(x[1:2], horizon=16, levels=(0.1, 0.3, 0.9))
        torch.testing.assert_close(alone.quantiles, forecast.quantiles[1:2])
        torch.testing.assert_close(alone.quantiles[..., 1], (alone.quantiles[..., 0] + alone.mean) / 2)
        later, _ = model.predict(x[:, :8], state, horizon=4)
        second, _ = model.predict(x[1:2, :8], states.index(state, [1]), horizon=4)
        torch.testing.assert_close(second.quantiles, later.quantiles[1:2])
    model.predict(x, horizon=16)[0].mean.sum().backward()
    assert all(p.grad.isfinite().all() for name, p in model.named_parameters() if "combination" not in name)
    for piece, options, error, said in (
        (x[:, :7], {"state": state}, ShapeError, "x has 7 steps, expected a multiple of patch=8 because of state"),
        (x[:2], {"state": state}, ShapeError, "state is of 3 groups of 2 variates, expected 2 of 2"),
        (x, {"horizon": 17}, ConfigError, "horizon is 17"),
        (x, {"targets": 3}, ConfigError, "targets is 3"),
        (x / 0, {}, ShapeError, "an infinite number"),
    ):
        with pytest.raises(error, match=said):
            model.predict(piece, **{"horizon": 8} | options)
    assert model.predict(x[:0], horizon=16)[0].quantiles.shape == (0, 16, 2, 3)
    with pytest.raises(ShapeError, match=r"known has shape \(3, 24, 1\), expected \(B, T \+ H, K\)"):
        model.predict_known(x, x[..., :1], horizon=8)
    (path / "model.safetensors").unlink()
    tensors = load_file(FOLDER / "tirex2" / "model.safetensors")
    save_file(
        tensors | {name.replace("fwd", "rev"): 2 * tensors[name] for name in tensors if "zgate" in name},
        path / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"rev_cell.zgate.weight differs from stack.0.time_mixer.fwd_cell"):
        hub.load(path)
