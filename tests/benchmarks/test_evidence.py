"""The tables of evidence: their runs on small files, and the rows that they write."""

import argparse
import itertools
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import published

pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'scanl[sklearn]'")
pytest.importorskip("pandas", reason="pandas is not installed: pip install 'scanl[series]'")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import harness
from quality import classify, forecast, long_sequences
from scanl.data import sources
from scanl.data.files import folders
from scanl.learning.questions.forecast import ForecastAnswerer

AUTOREGRESSION = forecast._autoregression


SHORTER = {
    "mnist": {}, "image_layers": {}, "cifar10": {"data_options": {"aside": 4}},
    "listops": {"data_options": {"length": 30, "least": 5}},
    "enwik8": {"sequence_length": 16, "eval_bytes": 64},
    "imdb": {"data_options": {"max_length": 20, "aside": 1}},
}  # fmt: skip
EASIER = [
    {"data_options": {"length": 12, "least": 3}, "steps": 1},
    {"data_options": {"length": 20, "least": 4}, "steps": 2},
]
SMALL = {
    "mnist": {"permuted": {"data": ["mnist"], "data_options": {**long_sequences.PERMUTED, "aside": 4}}},
    "image_layers": {"Fashion-MNIST": {"data": ["fashion_mnist"], "data_options": {"aside": 4}}},
}


class First:
    """A rival that answers the first class, and has series without missing numbers."""

    def fit(self, x, y):
        assert x.shape == (8, 1, 4)
        assert np.isfinite(x).all()
        self.answer = y[0]
        return self

    def predict(self, x):
        return np.full(len(x), self.answer)


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Tiny runs on small files; returns the folder of the results."""
    for name in (
        "ucr",
        "spoken_digits",
        "etth1",
        "hourly_electricity",
        "mnist",
        "fashion_mnist",
        "cifar10",
        "imdb",
        "enwik8",
    ):
        (tmp_path / "data" / name).mkdir(parents=True)
        published.WRITERS[name](tmp_path / "data" / name)
        monkeypatch.setattr(folders[name], "sha256", {})
        monkeypatch.setattr(folders[name], "counts", {})
    monkeypatch.setenv("SCANL_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(classify, "PROBLEMS", ("Small",))
    monkeypatch.setattr(classify, "IRREGULAR", ("Small",))
    monkeypatch.setattr(classify, "DROPPED", (0.5,))
    monkeypatch.setattr(classify, "LAYERS", ("lru",))
    monkeypatch.setattr(classify, "TIMED", {"lru": {}, "gru": {}})
    monkeypatch.setattr(classify, "_minirocket", lambda name: {"accuracy": 1.0, "minutes": 0.0})
    monkeypatch.setattr(classify, "_rivals", lambda: {"MiniRocket": First()})
    monkeypatch.setattr(classify, "UNSEEN", ("Small",))
    archive = tmp_path / "data" / "UCRArchive_2018" / "Small"
    archive.mkdir(parents=True)
    for part in ("TRAIN", "TEST"):
        archive.joinpath(f"Small_{part}.tsv").write_text(
            "".join(f"{k % 2}\t{k}\tNaN\t{k % 2}\tNaN\n" for k in range(8))
        )
    monkeypatch.setattr(classify, "RARE_STEPS", 1)
    monkeypatch.setitem(classify.DIGITS, "steps", 1)
    monkeypatch.setattr(long_sequences, "IMAGES", SMALL)
    monkeypatch.setattr(long_sequences, "EASIER", {("listops", "lru"): EASIER})
    for table, runs in long_sequences.RUNS.items():
        first = {"layer_options": {}, **next(iter(runs.values()))}
        short = {**first, "layer": "lru", "dim": 8, "minutes": None, "steps": 1, "batch_size": 2}
        short |= SHORTER[table]
        monkeypatch.setitem(long_sequences.RUNS, table, {"lru": short})
    monkeypatch.setattr(forecast, "READ", 20)
    monkeypatch.setattr(forecast, "HORIZONS", (4,))
    monkeypatch.setattr(forecast, "STEPS", {4: 1})
    monkeypatch.setattr(forecast, "LINEAR_STEPS", 2)
    monkeypatch.setattr(forecast, "LONG", {**forecast.LONG, "sequence_length": 20, "lags": 20})
    monkeypatch.setattr(forecast, "LAYERS", {"lru": {}})
    monkeypatch.setattr(forecast, "ALONE", ("lru alone",))
    monkeypatch.setattr(forecast, "SERIES", ("hourly_electricity",))
    monkeypatch.setattr(forecast, "INTERVALS", {"lru": {}})
    monkeypatch.setattr(forecast, "DAY", {**forecast.DAY, "steps": 1, "horizon": 4, "lags": 6})
    monkeypatch.setattr(forecast, "_autoregression", lambda source, exam: {"CRPS": 1.0})
    return tmp_path


ONCE = {"seeds": 1, "quick": False, "again": False, "device": "cpu"}
ROWS = {
    "etth1": 9, "intervals": 3, "ucr": 3, "ucr_unseen": 2, "pixels": 1, "digits": 1, "irregular": 5, "mnist": 2,
    "image_layers": 1, "cifar10": 1, "imdb": 1, "enwik8": 4, "listops": 1,
}  # fmt: skip
SEEDS = {"etth1": 2, "ucr": 2, "mnist": 2}  # one table of each program; the others are asked for one seed again


SHORT = {"etth1", "irregular", "mnist"}  # one of each program: its other tables take as long


@pytest.mark.parametrize(
    ("program", "name"),
    [
        pytest.param(program, name, id=name, marks=[pytest.mark.long] * (name not in SHORT))
        for program in (forecast, classify, long_sequences)
        for name in program.TABLES
        if name != "spacetime"  # tests/docs/test_docs_run.py runs that one
    ],
)
def test_a_table_goes_on_where_it_stopped(program, name, tables, monkeypatch):
    path = tables / f"{name}.csv"
    for seeds in (1, SEEDS.get(name, 1)):
        before = path.read_text().splitlines() if path.exists() else []
        monkeypatch.setattr(sys, "argv", [program.__name__, name, "--seeds", str(seeds)])
        program.main()
        after = path.read_text().splitlines()
        assert after[: len(before)] == before, "a recorded run is not run again"
        assert seeds == 2 or not before or after == before
    rows = harness.Results(name).rows
    assert len(rows) == ROWS[name]
    for row in rows:
        numbers = [row.get(score) or "nan" for score in ("MSE", "CRPS", "accuracy", "bits per byte")]
        assert sum(np.isfinite(float(number)) for number in numbers) == 1, row
        assert row["machine"] == harness.machine()
        assert "torch" in row["versions"]
    if name == "irregular":
        assert (tables / "docs" / "evidence_irregular.png").stat().st_size > 1000


def test_durations_are_those_since_the_sample_before():
    x = np.broadcast_to(np.arange(40.0, dtype=np.float32)[:, None], (3, 40, 1))
    kept, spans = classify.thinned(x, 0.7, np.random.default_rng(0))
    assert kept.shape == (3, 12, 1)
    assert (kept[:, 0] == 0).all()
    np.testing.assert_allclose(np.diff(kept[..., 0]) * 0.3, spans[:, 1:], rtol=1e-5)


def test_forecasts_of_an_autoregression_are_those_of_statsmodels(tables, monkeypatch):
    pytest.importorskip("statsmodels", reason="statsmodels is not installed")
    from statsmodels.tsa.ar_model import AutoReg

    monkeypatch.setattr(forecast, "DAY", {**forecast.DAY, "horizon": 4, "lags": 3})
    source = sources.get("hourly_electricity")(horizon=4, sequence_length=20)
    seen = {}
    monkeypatch.setattr(ForecastAnswerer, "scores", lambda self, q, t: seen.update(q=q, t=t) or {"CRPS": (0.0, 1)})
    AUTOREGRESSION(source, source.exam())
    y = source.table[1][:, 0]
    y = np.where(np.isnan(y), np.roll(y, 1), y)
    last = source.asking.origins(2)[-1][2]
    fit = AutoReg(y[: source.parts[0][0][2]], 3).fit()
    applied = fit.apply(y[: last + 1])
    expected = applied.get_prediction(last + 1, last + 4)
    np.testing.assert_allclose(seen["q"][-1, :, 0, 5], expected.predicted_mean, rtol=1e-6, atol=1e-6)
    # `apply` measures the noise anew, on all that it is given; ours is that of the training part.
    off = (expected.conf_int(0.1) - expected.predicted_mean[:, None]) * (fit.sigma2 / applied.sigma2) ** 0.5
    np.testing.assert_allclose(
        seen["q"].numpy()[-1, :, 0, [0, -1]].T - expected.predicted_mean[:, None], off, rtol=1e-5
    )


def test_probabilities_of_counts_by_hand():
    """abab is read, and then ab: p_1 = (2 + 2/256)/6 of each byte; of b after a, p_2 = (2 + p_1)/3."""
    first = (2 + 2 / 256) / 6
    second = (2 + first) / 3
    train, test = (np.frombuffer(text, np.uint8) for text in (b"abab", b"ab"))
    found = long_sequences.counted(train, test, 2)
    np.testing.assert_allclose(found, -(np.log2(first) + np.log2(second)) / 2)
    # xy occurs nowhere: both bytes by D = 2 of N + D = 6
    unknown = long_sequences.counted(train, np.frombuffer(b"xy", np.uint8), 3)
    np.testing.assert_allclose(unknown, -np.log2(2 / 256 / 6))


def test_an_interrupted_run_goes_on(tables, monkeypatch):
    """A run that a signal ended leaves no row; the same command goes on from its checkpoint."""
    options = {**long_sequences.RUNS["listops"]["lru"], "steps": 6, "eval_every": 2}
    monkeypatch.setitem(long_sequences.RUNS, "listops", {"lru": options})
    learn = long_sequences.train

    def interrupted(run, steps):
        batch = run.source.batch

        def once(step, *given):
            if run.config.training.steps == 6 and step == 3:
                signal.raise_signal(signal.SIGTERM)
            return batch(step, *given)

        with monkeypatch.context() as patch:
            patch.setattr(run.source, "batch", once)
            return learn(run, steps)

    with monkeypatch.context() as patch:
        patch.setattr(long_sequences, "train", interrupted)
        with pytest.raises(SystemExit, match="130"):
            long_sequences.runs("listops", argparse.Namespace(**ONCE, results=tables))
    assert not (tables / "listops.csv").exists()
    begun = []
    monkeypatch.setattr(long_sequences, "train", lambda *given: begun.append(given[-1]) or learn(*given))
    long_sequences.runs("listops", argparse.Namespace(**ONCE, results=tables))
    assert begun == [1, 2, 6], "the plans of the checkpoints"
    assert harness.Results("listops").has(model="lru", seed=0, steps=1 + 2 + 6)


def test_a_run_starts_from_the_weights_of_the_easier_one(tables, monkeypatch):
    begun, ended = [], []
    learn = long_sequences.train

    def seen(run, steps):
        begun.append({name: value.clone() for name, value in run.model.state_dict().items()})
        outcome = learn(run, steps)
        ended.append(outcome.model.state_dict())
        return outcome

    monkeypatch.setattr(long_sequences, "train", seen)
    long_sequences.runs("listops", argparse.Namespace(**ONCE, results=tables))
    assert len(begun) == 3
    for before, after in itertools.pairwise([*zip(begun, ended, strict=True)]):
        for name, value in before[1].items():
            torch.testing.assert_close(after[0][name], value, rtol=0, atol=0)
    assert any(not torch.equal(begun[0][name], begun[2][name]) for name in begun[0])
