"""Quantiles, scales, scores and baselines against numbers from loops, tables and scipy."""

import csv
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

from scanl.cli import main
from scanl.data import IGNORED, Table
from scanl.data.base import LEVELS
from scanl.data.batch import Outcomes
from scanl.data.published.forecasts import LongForecast
from scanl.data.questions import ForecastQuestion
from scanl.data.series.naive import naive, season_errors
from scanl.learning.evaluation import baselines
from scanl.learning.questions import answerer
from scanl.models import Channels, Features, Forecaster, SequenceRegressor, Stack
from scanl.models.heads.distributions import make_head

COVERS = ["data/published/forecasts", "data/series/naive", "learning/evaluation", "models/heads/distributions"]

pd = pytest.importorskip("pandas", reason="pandas is not installed: pip install 'scanl[series]'")
stats = pytest.importorskip("scipy.stats", reason="scipy is not installed: pip install 'scanl[series]'")

# Quantiles of Student's t at 0.9, 0.95, 0.975 and 0.995, of any printed table.
STUDENT = {
    3: (1.638, 2.353, 3.182, 5.841),
    5: (1.476, 2.015, 2.571, 4.032),
    30: (1.310, 1.697, 2.042, 2.750),
    10**7: (1.282, 1.645, 1.960, 2.576),
}


@pytest.mark.parametrize("freedom", STUDENT)
def test_quantiles_of_student_by_a_table(freedom):
    head = make_head("student_t", 3, 1)
    levels = torch.tensor([0.9, 0.95, 0.975, 0.995], dtype=torch.float64)
    found = head.quantiles(torch.tensor([7.0, 2.0, freedom], dtype=torch.float64), levels)
    expected = 7 + 2 * torch.tensor(STUDENT[freedom], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=2 * 0.0006)  # of three printed decimals
    below = head.quantiles(torch.tensor([7.0, 2.0, freedom], dtype=torch.float64), 1 - levels)
    torch.testing.assert_close(below, 14 - found)
    assert head.mean(torch.tensor([7.0, 2.0, freedom], dtype=torch.float64)) == 7


@pytest.mark.parametrize("raw", [-1e4, -50.0, 0.0, 50.0, 1e4])
def test_degrees_of_freedom_are_above_2_and_finite(raw):
    """So that the variance exists. Near 2 the quantiles have a closed form, (2 p - 1) / sqrt(2 p (1 - p))."""
    head = make_head("student_t", 3, 1).double()
    where, spread, freedom = head._valid(torch.tensor([0.0, 0.0, raw], dtype=torch.float64)).tolist()
    assert (where, spread) == (0.0, pytest.approx(1 + 1e-4, rel=1e-4))
    expected = 2 + 1e-4 + (math.log1p(math.exp(raw + 3)) if raw < 100 else raw + 3)
    assert freedom == pytest.approx(expected, rel=1e-9)
    if raw < -40:
        levels = torch.tensor([0.6, 0.9, 0.99], dtype=torch.float64)
        closed = (2 * levels - 1) / (2 * levels * (1 - levels)).sqrt()
        found = head.quantiles(torch.tensor([0.0, 1.0, freedom], dtype=torch.float64), levels)
        torch.testing.assert_close(found, closed, rtol=3e-4, atol=0)  # of 2.0001 degrees


@pytest.mark.parametrize("freedom", [2.0001, 5.0, 1e3, 1e6, 1e9])
def test_losses_of_student_at_any_degrees_of_freedom(freedom):
    """In float32 too, where the logarithms of the gamma functions have no decimals."""
    y = torch.tensor([-40.0, 0.0, 1.5, 3e3])
    parameters = torch.tensor([1.0, 2.0, freedom]).expand(4, 3)
    freedom = parameters[0, 2].item()
    expected = -stats.t.logpdf(y.numpy().astype(float), freedom, 1.0, 2.0)
    found = make_head("student_t", 3, 1).loss(parameters, y)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def counts(mean, dispersion, most):
    """Probabilities of 0, 1, ... by p_{k+1} / p_k = (k + r) / (k + 1) * m / (m + r), with r = 1 / dispersion."""
    r = 1 / dispersion
    found = [math.exp(r * math.log(r / (r + mean)))]
    for k in range(most):
        found.append(found[-1] * (k + r) / (k + 1) * mean / (mean + r))
    return np.array(found)


@pytest.mark.parametrize(("mean", "dispersion"), [(10.0, 0.5), (0.3, 2.0), (200.0, 0.01), (5.0, 1e-4), (40.0, 3.0)])
def test_quantiles_of_counts_by_a_loop(mean, dispersion):
    head = make_head("negative_binomial", 3, 1)
    chances = counts(mean, dispersion, 20_000)
    numbers = np.arange(len(chances))
    assert (chances * numbers).sum() == pytest.approx(mean, rel=1e-9)
    assert (chances * (numbers - mean) ** 2).sum() == pytest.approx(mean + dispersion * mean**2, rel=1e-9)
    parameters = torch.tensor([mean, dispersion], dtype=torch.float64)
    expected = [int(np.searchsorted(chances.cumsum(), level)) for level in LEVELS]
    assert head.quantiles(parameters, torch.tensor(LEVELS, dtype=torch.float64)).tolist() == expected
    some = [0, 1, 7, 60]
    found = head.loss(parameters.expand(4, 2), torch.tensor(some, dtype=torch.float64))
    np.testing.assert_allclose(found, -np.log(chances[some]), rtol=1e-7, atol=1e-7)
    assert head.mean(parameters) == mean


def test_counts_of_any_size_in_float32():
    """Counts of 1e8, whose logarithms of gamma functions are about 1e9, which a float32 knows to 64."""
    mean, dispersion = np.float32(1e8), np.float32(1e-3)
    y = np.float32([9.5e7, 1e8, 1.2e8])
    r = 1 / float(dispersion)
    expected = -stats.nbinom.logpmf(y.astype(float), r, r / (r + float(mean)))
    found = make_head("negative_binomial", 3, 1).loss(torch.tensor([mean, dispersion]).expand(3, 2), torch.tensor(y))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def constant_head(model, raw):
    """Make a model whose parameters are the same after every step, before units."""
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor(raw).repeat(len(model.head.bias) // len(raw)))
    return model.double().eval()


def softplus(x):
    return math.log1p(math.exp(x))


@pytest.mark.parametrize("scales", [None, [[30.0, 4.0]], [[0.0, 1e-3]], [[5.0, 1e4]]])
def test_the_unit_of_counts_is_the_running_mean_plus_one(scales):
    """Whatever the scales of training are, except that the start is their location."""
    model = constant_head(
        Forecaster(2, Stack(8, 1, "lru"), Channels(scales=scales), distribution="negative_binomial", lags=0),
        [0.3, -1.0],
    )
    y = [3.0, 0.0, math.nan, 8.0, 200.0]
    found = model(torch.tensor(y, dtype=torch.float64)[None, :, None])[0][0, :, 0, 0].detach()
    for t, (mean, dispersion) in enumerate(found.tolist()):
        known = [value for value in y[: t + 1] if not math.isnan(value)]
        assert mean == pytest.approx((np.mean(known) + 1) * (softplus(0.3 + 0.5413) + 1e-4), rel=1e-6)
        assert dispersion == pytest.approx(softplus(-1 + 0.5413) + 1e-4, rel=1e-6)
    regressor = SequenceRegressor(
        1, Stack(8, 1, "lru"), Features(1), distribution="negative_binomial", output_scales=[[9.0, 4.0]]
    )
    mean = constant_head(regressor, [0.3, -1.0])(torch.zeros(1, 3, 1))[0].detach()[0, 0, 0]
    assert mean == pytest.approx(4 * (softplus(0.3 + 0.5413) + 1e-4), rel=1e-6)  # 9 is no location of counts


def normalised(y, location, scale):
    """Mean and scale of a series after its last number, in its units, by the sums themselves."""
    z = (np.asarray(y) - location) / scale
    prior = 0.5 ** len(z)
    return location + scale * z.mean(), scale * math.sqrt((len(z) * z.var() + prior) / (len(z) + prior))


def test_the_interval_of_a_frame():
    """A normal distribution whose mean and deviation are known in the unit of each series."""
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'scanl[sklearn]'")
    from scanl.learning.forecasting.frames import Frames

    draw = np.random.default_rng(0)
    y = {"a": draw.normal(size=60), "b": 100 + 7 * draw.normal(size=60)}
    dates = pd.date_range("2024-01-01", periods=60)
    frame = pd.concat([pd.DataFrame({"unique_id": k, "ds": dates, "y": v}) for k, v in y.items()])
    model = Frames(3, layer="lru", dim=8, steps=1, lags=0, sequence_length=25).fit(frame)
    model.model = constant_head(model.model, [0.4, -0.7])
    both = np.concatenate(list(y.values()))
    for level in (90, 50, 99.8):
        found = model.predict(levels=[level])
        half = NormalDist().inv_cdf(0.5 + level / 200) * (softplus(-0.7 + 0.5413) + 1e-4)
        for name, rows in found.groupby("unique_id"):
            mean, unit = normalised(y[name][-25:], both.mean(), both.std())
            for column, expected in (("", 0.4), (f"-lo-{level:g}", 0.4 - half), (f"-hi-{level:g}", 0.4 + half)):
                np.testing.assert_allclose(rows[f"scanl{column}"], mean + unit * expected, rtol=1e-5)


def write(path, frame):
    frame.to_csv(path, index=False)
    return path


def labelled(rows=30, series=10, seed=0):
    draw = np.random.default_rng(seed)
    parts = [
        pd.DataFrame({
            "id": f"s{i}", "y": draw.normal(3 * i, 1 + i, rows), "u": draw.exponential(1 + i, rows), "size": i**2 * 1.0,
            "kind": "odd" if i % 3 else "even", "up": draw.choice(["no", "yes"], rows),
        })
        for i in range(series)
    ]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


def training_rows(source, frame):
    each = source.collection.series
    names = [each[i].name for i, *_ in source.parts[0]]
    rows = pd.concat([frame[frame.id == each[i].name][begin:end] for i, begin, end in source.parts[0]])
    return names, rows


@pytest.mark.parametrize("split", ["time", "series"])
def test_scales_are_of_the_training_part_alone(split, tmp_path):
    frame = labelled()
    path = write(tmp_path / "t.csv", frame)
    given = {"series": "id", "past": ["u"], "split": split}
    forecast = Table([path], "forecast", "y", horizon=3, future=["size"], **given)
    label = Table([path], "label", "up", **given)
    regress = Table([path], "regress", "size", **{**given, "split": "series"})
    for source, columns in ((forecast, ["y", "u", "size"]), (label, ["u"]), (regress, ["u"])):
        names, rows = training_rows(source, frame)
        assert len(rows) < 0.8 * len(frame)
        expected = [(rows[name].mean(), rows[name].std(ddof=0)) for name in columns]
        scales = source.question.scales if source is forecast else source.question.inputs.scales
        np.testing.assert_allclose(scales, expected, rtol=1e-9)
    sizes = frame.groupby("id")["size"].first()[names]
    np.testing.assert_allclose(regress.question.scale, (sizes.mean(), sizes.std(ddof=0)), rtol=1e-9)


def test_the_unit_of_errors_is_of_the_training_part_alone(tmp_path):
    frame = labelled(rows=40, series=2)
    source = Table([write(tmp_path / "t.csv", frame)], "forecast", "y", horizon=3, series="id", season=5)
    for i, one in enumerate(source.collection.series):
        y = one.target[:28, 0]  # seven tenths
        off = [y[t] - y[t - 5] for t in range(5, 28)]
        assert source.asking.units[i][0] == pytest.approx(np.mean(np.abs(off)), rel=1e-12)
        assert source.asking.naive_errors[i][1][0] == pytest.approx(math.sqrt(np.mean(np.square(off))), rel=1e-12)


def test_who_does_not_learn_by_hand(tmp_path):
    frame = labelled()
    path = write(tmp_path / "t.csv", frame)
    for ask, target, name in (("regress", "size", "training mean"), ("classify", "kind", "most frequent")):
        source = Table([path], ask, target, series="id", past=["u"])
        answers = [frame[frame.id == one.name][target].iloc[0] for one in source.collection.series]
        train, test = ([answers[i] for i, *_ in source.parts[part]] for part in (0, 2))
        if ask == "regress":
            expected = np.mean([(answer - sum(train) / len(train)) ** 2 for answer in test])
        else:
            usual = max(set(train), key=train.count)
            expected = np.mean([answer == usual for answer in test])
        assert baselines(source, source.exam()) == {name: {source.metric: pytest.approx(expected, rel=1e-12)}}
    label = Table([path], "label", "up", series="id", past=["u"])
    _, rows = training_rows(label, frame)
    test = frame[frame.id.isin([label.collection.series[i].name for i, *_ in label.parts[2]])]
    assert baselines(label, label.exam()) == {
        "most frequent": {"accuracy": pytest.approx((test.up == rows.up.mode()[0]).mean())}
    }


def test_scores_of_a_long_horizon_by_a_loop():
    """In units of each column's deviation in training; numbers that are missing do not count."""
    draw = np.random.default_rng(0)
    rows, steps, columns = 3, 48, 2
    scales = ((5.0, 4.0), (0.0, 0.5))
    question = ForecastQuestion(steps, target=columns, scales=scales, scores=LongForecast.scores)
    quantiles = np.sort(draw.normal(size=(rows, steps, columns, len(LEVELS))), -1)
    numbers = draw.normal(size=(rows, steps, columns))
    numbers[0, 5, 1] = numbers[2, 40, 0] = np.nan
    outcomes = Outcomes(torch.tensor(numbers), torch.full((rows, columns), 2.0))
    found = answerer(question).scores(torch.tensor(quantiles), outcomes)
    squares, sizes, inside, crps = [], [], [], []
    for r in range(rows):
        for h in range(steps):
            for c in range(columns):
                y, q = numbers[r, h, c], quantiles[r, h, c]
                if not math.isnan(y):
                    squares.append(((y - q[5]) / scales[c][1]) ** 2)
                    sizes.append(abs(y - q[5]) / scales[c][1])
                    inside.append(q[0] <= y <= q[10])
                    losses = [max(p * (y - v), (p - 1) * (y - v)) for p, v in zip(LEVELS, q, strict=True)]
                    crps.append(2 * sum(losses) / 11 / 2.0)
    count = rows * steps * columns - 2
    for name, expected in (("MSE", squares), ("MAE", sizes), ("coverage", inside), ("CRPS", crps)):
        assert found[name] == (pytest.approx(float(np.sum(expected)), rel=1e-9), count)


def test_coverage_counts_its_borders_and_neither_side(tmp_path):
    source = Table([write(tmp_path / "t.csv", labelled(series=1))], "forecast", "y", horizon=6)
    numbers = torch.tensor([0.49, 0.5, 3.0, 9.5, 9.51, math.nan], dtype=torch.float64)[:, None]
    quantiles = 10 * torch.tensor(LEVELS, dtype=torch.float64).expand(1, 6, 1, 11)
    targets = Outcomes(numbers[None], torch.ones(1, 1))
    assert answerer(source.question).scores(quantiles, targets)["coverage"] == (3.0, 5)


@pytest.mark.parametrize("season", [3, 4, 5])
def test_a_history_of_exactly_one_season(season):
    """It is enough to forecast by, but has no two numbers a season apart, so errors are those of the last number."""
    y = np.array([[1.0], [4.0], [2.0], [8.0]])
    found = naive(y, season, 6, np.array([1.0]), [0.5, 0.8413447460685429])
    cycle = {3: [4.0, 2.0, 8.0], 4: [1.0, 4.0, 2.0, 8.0], 5: [8.0]}[season]
    assert found[:, 0, 0].tolist() == [cycle[h % len(cycle)] for h in range(6)]
    widths = [math.sqrt(h // len(cycle) + 1) for h in range(6)]
    np.testing.assert_allclose(found[:, 0, 1] - found[:, 0, 0], widths, rtol=1e-6)
    mean, root = season_errors(y, season)
    off = {3: [7.0], 4: [3.0, -2.0, 6.0], 5: [3.0, -2.0, 6.0]}[season]
    assert mean[0] == pytest.approx(np.mean(np.abs(off)))
    assert root[0] == pytest.approx(math.sqrt(np.mean(np.square(off))))


@pytest.mark.parametrize("length", [7, 20, 30, 99])
def test_windows_of_labels_reach_both_ends_of_their_part(length, tmp_path):
    """Also when the part is longer than a window, as long, or a step longer."""
    frame = pd.DataFrame({"u": np.arange(40.0), "up": ["no", "yes"] * 20})
    source = Table([write(tmp_path / "t.csv", frame)], "label", "up", past=["u"], sequence_length=length)
    (_, begin, end), *_ = source.parts[0]
    assert (begin, end) == (0, 28)
    windows, labels, *_ = source.batch(0, 400)
    first = set(windows[:, 0, 0].tolist())
    assert first == set(range(max(1, 28 - length + 1)))
    known = labels != IGNORED
    assert set(windows[..., 0][known].tolist()) == set(range(28))
    np.testing.assert_array_equal(labels[known], windows[..., 0][known] % 2)


def test_windows_of_forecasts_reach_the_last_row_of_their_part(tmp_path):
    frame = pd.DataFrame({"y": np.arange(40.0)})
    source = Table([write(tmp_path / "t.csv", frame)], "forecast", "y", horizon=2, sequence_length=10)
    columns, targets, *_ = source.batch(0, 400)
    assert set(columns.target[:, 0, 0].tolist()) == set(range(18))  # 28 rows; behind the last window is one
    known = targets[~np.isnan(targets)]
    assert (known.min(), known.max()) == (1.0, 27.0)


@pytest.mark.parametrize(
    ("task", "score", "ends"),
    [("copy", 0.5, True), ("copy", 0.49, False), ("adding", 0.125, True), ("adding", 0.13, False)],
)
def test_until_is_reached_exactly(task, score, ends, tmp_path, capfd, monkeypatch):
    """A score that equals `--until` ends the run, of scores of which more is better and of those of which less is."""
    until = {"copy": "0.5", "adding": "0.125"}[task]
    monkeypatch.setattr("scanl.learning.run.callbacks.measure", lambda *_: score)
    options = "--layer lru --dim 8 --depth 1 --steps 3 --batch-size 2 --accelerator cpu --eval-every 1 --log-every 1"
    short = ["--data-options.length", "6"]
    assert (
        main(["train", *options.split(), *short, "--data", task, "--until", until, "--out", str(tmp_path / "run")]) == 0
    )
    assert (f"the score is as good as --until {until} after step 1" in capfd.readouterr().err) == ends
    with (tmp_path / "run" / "metrics.csv").open() as file:
        assert len(list(csv.DictReader(file))) == (1 if ends else 3)
