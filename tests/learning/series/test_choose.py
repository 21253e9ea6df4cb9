"""The choice for series of a table: it fits what the estimator fits, takes what is best, and its run answers."""

import json

import numpy as np
import pytest
import torch
import yaml

from scanl.cli import main
from scanl.errors import ConfigError, DataError
from scanl.export.flat import FlatModel
from scanl.learning import RunFolder, predict
from scanl.learning.series import choose as module
from scanl.models.saving import Saved

pd = pytest.importorskip("pandas", reason="pandas is not installed: pip install 'scanl[series]'")

STEPS = 12
FEW = json.dumps({"filters": 24})


def waves(count=60, seed=0):
    """Series (n, T) of two classes, and a number of each."""
    draw = np.random.default_rng(seed)
    kind, size = np.arange(count) % 2, draw.uniform(1, 2, count)
    phase = draw.uniform(0, 6, count)[:, None] + np.arange(STEPS) * np.where(kind, 0.9, 1.4)[:, None]
    x = size[:, None] * np.sin(phase) + 0.1 * draw.normal(size=(count, STEPS))
    x[draw.uniform(size=x.shape) < 0.02] = np.nan
    return x, kind, size


def table(path, count=60, seed=0):
    """Write the waves as a table with a row a step."""
    x, kind, size = waves(count, seed)
    frame = pd.DataFrame(
        {
            "id": np.repeat([f"s{i:03}" for i in range(count)], STEPS),
            "step": np.tile(np.arange(STEPS), count),
            "value": x.reshape(-1),
            "kind": np.repeat(np.array(["slow", "fast"])[1 - kind], STEPS),
            "size": np.repeat(size, STEPS),
        }
    )
    frame["up"] = np.where(frame["value"].fillna(0) > 0, "yes", "no")
    frame.to_csv(path, index=False)
    return path


def line(path, question, target, *more):
    return [
        *("train", "--data", str(path), "--question", question, "--target", target, "--time", "step"),
        *("--series", "id", "--past", "value", *more),
    ]


def test_the_command_fits_what_the_estimator_fits(tmp_path, capsys):
    estimators = pytest.importorskip("scanl.learning.estimators", reason="scikit-learn is not installed")
    path, other = table(tmp_path / "t.csv"), table(tmp_path / "other.csv", seed=1)
    run = tmp_path / "run"
    whole = ["--validation", "0", "--test", "0", "--filters", FEW]
    assert main(line(path, "classify", "kind", *whole, "--out", str(run))) == 0
    out, err = capsys.readouterr()
    assert not out
    assert "24 random filters, of series that are left out one by one: accuracy 1" in err
    assert "no stack is tried, as 60 series to learn from are few for one" in err
    x, kind, _ = waves()
    model = estimators.SeriesClassifier(filter_options=json.loads(FEW)).fit(x, np.array(["slow", "fast"])[1 - kind])
    answers = predict(run, other)
    found = answers[[f"kind-p-{name}" for name in model.classes_]].to_numpy()
    np.testing.assert_allclose(found, model.predict_proba(waves(seed=1)[0]), atol=1e-5)
    with pytest.raises(DataError, match=r"table: test is 0, so .*t\.csv has no test part; measure other series"):
        RunFolder.open(run).source.exam()
    assert main(["eval", str(run), "--data", str(other)]) == 0
    assert "this model     1\n" in capsys.readouterr().out
    assert main(line(path, "classify", "kind", "--test", "0", "--steps", "1", "--out", str(tmp_path / "no"))) == 2
    assert "train: test is 0, expected more because steps are measured on that part" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("question", "target", "gain", "taken"),
    [
        ("classify", "kind", 9, module.FILTERS_ALONE),
        ("classify", "kind", -9, module.BESIDE),
        ("classify", "kind", -9, module.ALONE),
        ("regress", "size", 9, module.FILTERS_ALONE),
        ("regress", "size", -9, module.BESIDE),
        ("label", "up", 9, module.ALONE),
    ],
)
def test_a_run_has_what_was_taken_and_answers(question, target, gain, taken, tmp_path, monkeypatch, capsys):
    for name, value in {"LEAST_SERIES": 0, "STEPS": 12, "GAIN": gain}.items():
        monkeypatch.setattr(module, name, value)
    if taken == module.ALONE:
        monkeypatch.setattr(module, "BESIDE", module.ALONE)  # beside the filters it would always be better
    path, run, again = table(tmp_path / "t.csv", 40), tmp_path / "run", tmp_path / "again"
    filters = [] if question == "label" else ["--filters", FEW]
    asked = line(path, question, target, "--dim", "8", "--layer", "lru", *filters)
    assert main([*asked, "--out", str(run)]) == 0
    out, err = capsys.readouterr()
    assert "this model" in out
    folder = RunFolder.open(run)
    options = yaml.safe_load(folder.config_file.read_text("utf-8"))
    assert bool(options["head"]["filters"]) == (taken != module.ALONE)
    assert bool(options["training"]["steps"]) == (taken != module.FILTERS_ALONE)
    assert ("24 random filters" in err.split("chosen: ")[1]) == (taken != module.ALONE)
    assert ("lru of width 8" in err.split("chosen: ")[1]) == (taken != module.FILTERS_ALONE)
    assert taken in folder.choice.read_text("utf-8")
    one, other = Saved.load(run), folder.load_model()
    assert (one.head.weight.abs().sum() > 0) == (taken != module.FILTERS_ALONE)
    x = torch.randn(3, 20, 1)
    torch.testing.assert_close(one(x)[0], other(x)[0])
    assert len(predict(run, path)) == 40 * (STEPS if question == "label" else 1)
    assert main(["eval", str(run)]) == 0
    assert main(["train", "--resume", str(run)]) == 2
    assert "is complete: its model was chosen; to choose again, leave out --resume" in capsys.readouterr().err
    if taken != module.ALONE:
        with pytest.raises(ConfigError, match="export: the model has random filters, expected a stack alone"):
            FlatModel(one)
        assert main(["train", "--config", str(folder.config_file), "--out", str(again)]) == 0
        for name, values in one.state_dict().items():
            torch.testing.assert_close(Saved.load(again).state_dict()[name], values)


def test_numbers_have_the_spread_of_series_that_were_left_out(tmp_path):
    path, run = table(tmp_path / "t.csv", 120), tmp_path / "run"
    assert main(line(path, "regress", "size", "--filters", FEW, "--out", str(run))) == 0
    other = table(tmp_path / "other.csv", 120, seed=1)
    answers, (_, _, size) = predict(run, other, levels=[80]), waves(120, seed=1)
    assert np.corrcoef(answers["size"], size)[0, 1] > 0.9
    inside = (answers["size-lo-80"] <= size) & (size <= answers["size-hi-80"])
    assert 0.7 < inside.mean() < 0.9
    widths = answers["size-hi-80"] - answers["size-lo-80"]
    np.testing.assert_allclose(widths, widths[0], rtol=1e-5)
