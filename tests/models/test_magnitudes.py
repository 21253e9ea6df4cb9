"""Numbers of any size and offset: what is centred in float64, and then cast, has the same forecasts in its unit."""

import csv

import numpy as np
import pytest
import torch

from scanl.data import Table
from scanl.data.series.naive import naive, season_errors
from scanl.data.series.rows import scale_of
from scanl.models import (
    Channels,
    Features,
    Forecaster,
    SequenceClassifier,
    SequenceRegressor,
    Stack,
)

sklearn = pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'scanl[sklearn]'")
pd = pytest.importorskip("pandas", reason="pandas is not installed: pip install 'scanl[series]'")

from scanl.learning.estimators import SeriesClassifier, SeriesRegressor  # noqa: E402
from scanl.learning.forecasting.frames import Frames  # noqa: E402

EPS = np.finfo(np.float64).eps
UNITS = [(1e8, 1.0), (-3e12, 7.0), (0.0, 1e-13), (0.0, 1e-300), (5e-9, 1e-12), (1e30, 3e24)]  # offset and scale


def wave(steps, rows=1, seed=0):
    draw = np.random.default_rng(seed)
    return np.sin(2 * np.pi * np.arange(steps) / 7 + draw.uniform(0, 6, (rows, 1))) + 0.1 * draw.normal(
        size=(rows, steps)
    )


def slack(offset, scale):
    """How far two computations may be apart, in units of the scale.

    The numbers themselves are known to eps * offset / scale. The network is in float32; a last bit of its input moves
    few of its last bits.
    """
    return 64 * (EPS * abs(offset) / scale + np.finfo(np.float32).eps)


def test_scales_by_hand():
    """Of numbers whose squares are not representable, of large ids, and of constants."""
    draw = np.random.default_rng(0).normal(size=200)
    for size in (1.0, 1e-300, 1e300):
        mean, deviation = scale_of(size * draw)
        assert mean / size == pytest.approx(draw.mean(), rel=1e-12)
        assert deviation / size == pytest.approx(draw.std(), rel=1e-12)
    four = np.arange(4.0)
    for first in (1e9, 1e12, 4e15):
        mean, deviation = scale_of(first + four)
        assert abs(mean - first - 1.5) <= EPS * first
        assert deviation == pytest.approx(four.std(), rel=4 * EPS * first)
    assert scale_of(np.array([5e-13, np.nan, 5e-13])) == (5e-13, 5e-13)
    assert scale_of(np.array([-7.0, -7.0])) == (-7.0, 7.0)
    assert scale_of(np.array([0.1 + 0.2, 0.3])) == (pytest.approx(0.3), pytest.approx(0.3))  # equal up to rounding
    assert scale_of(np.zeros(3)) == scale_of(np.full(3, np.nan)) == scale_of(np.zeros(0)) == (0.0, 1.0)


def frame(offset, scale, rows=60):
    dates = pd.date_range("2024-01-01", periods=rows)
    names = zip("ab", offset + scale * wave(rows, 2), strict=True)
    return pd.concat([pd.DataFrame({"unique_id": name, "ds": dates, "y": y}) for name, y in names], ignore_index=True)


def forecasts(table):
    model = Frames(5, layer="lru", dim=8, steps=4, season=7, sequence_length=20).fit(table)
    return model.predict(levels=[90])[["scanl", "scanl-lo-90", "scanl-hi-90"]].to_numpy()


@pytest.mark.parametrize(("offset", "scale"), UNITS)
def test_a_frame_is_forecast_in_its_unit(offset, scale):
    expected = forecasts(frame(0.0, 1.0))
    found = (forecasts(frame(offset, scale)) - offset) / scale
    np.testing.assert_allclose(found, expected, rtol=0, atol=slack(offset, scale))
    assert np.ptp(expected) > 0.1


def test_series_of_different_sizes_are_each_forecast_in_their_unit():
    """The large one does not hide the small one: both are normalised by their own past."""
    y = wave(2000)[0]  # long enough for a layer to forget the first steps, in which the prior scale counts
    model = Forecaster(
        5, Stack(8, 1, "lru"), Channels(scales=[list(scale_of(np.array([1e9, 1e9 + 1, 1e-2])))]), lags=7
    ).eval()
    torch.nn.init.normal_(model.lags.weight)
    x = torch.from_numpy(np.stack([1e9 + y, 1e-2 * y]))[..., None]
    found = model.predict(x)[0]
    plain = Forecaster(5, Stack(8, 1, "lru"), lags=7).eval()
    plain.load_state_dict(model.state_dict())
    expected = plain.predict(torch.from_numpy(y)[None, :, None])[0]
    for of in ("mean", "quantiles"):
        large, small = getattr(found, of)
        own = getattr(expected, of)[0]
        np.testing.assert_allclose(large - 1e9, own, rtol=0, atol=slack(1e9, 1))
        np.testing.assert_allclose(small / 1e-2, own, rtol=0, atol=slack(1e9, 1e-2))


@pytest.mark.parametrize("size", [5e-13, 3e11, -1.0])
def test_a_constant_stays_near_itself(size):
    table = frame(0.0, 1.0).assign(y=size)
    found = forecasts(table)
    assert (abs(found - size) < 0.05 * abs(size)).all()


@pytest.mark.parametrize(("offset", "scale"), UNITS)
def test_estimators_learn_series_in_any_unit(offset, scale):
    """A class is told, and numbers are predicted, as of the same series about 0; the numbers have a unit too."""
    x = wave(15, 24)
    kinds = (x[:, 0] > x[:, 1]).astype(int)
    numbers = np.stack([x.mean(1), x[:, 0]], 1)
    options = {"method": "stack", "layer": "lru", "dim": 8, "steps": 4, "lr": 0.02}
    one = SeriesClassifier(**options).fit(x, kinds).predict_proba(x)
    other = SeriesClassifier(**options).fit(offset + scale * x, kinds).predict_proba(offset + scale * x)
    np.testing.assert_allclose(other, one, rtol=0, atol=slack(offset, scale))
    one = SeriesRegressor(**options).fit(x, numbers).predict(x)
    regressor = SeriesRegressor(**options).fit(offset + scale * x, offset + scale * numbers)
    other = (regressor.predict(offset + scale * x) - offset) / scale
    np.testing.assert_allclose(other, one, rtol=0, atol=slack(offset, scale))


def write(path, columns):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(
            [list(columns), *zip(*(map(repr, values) for values in columns.values()), strict=True)]
        )
    return path


@pytest.mark.parametrize(("offset", "scale"), UNITS)
def test_what_a_table_gives_is_not_rounded_before_the_model_centres_it(offset, scale, tmp_path):
    """Rows, covariates, targets, static ids, the numbers that are scored, and those of the naive forecast."""
    rows, names = 60, ["p", "q"]
    y, u, late = (offset + scale * wave(rows, 2, seed) for seed in range(3))
    flat = {"y": y, "u": u, "late": late}
    columns = {name: values.reshape(-1).tolist() for name, values in flat.items()}
    columns |= {"id": [name for name in names for _ in range(rows)]}
    columns |= {"plant": [1e12 + i for i in range(2) for _ in range(rows)]}
    path = write(tmp_path / "t.csv", columns)
    source = Table(
        [path], "forecast", "y", series="id", past=["u"], static=["plant"], future=["late"], horizon=3,
        sequence_length=10, season=7,
    )  # fmt: skip
    columns, targets, *_ = source.batch(0, 6)
    for target, past, static, future, wanted in zip(*columns[:4], targets, strict=True):
        i = int(static[0] - 1e12)
        (first,) = np.flatnonzero(y[i] == target[0, 0])
        assert np.array_equal(past[:, 0], u[i, first : first + 10])
        known = late[i, first : first + 13]
        assert np.array_equal(future[: len(known), 0], known)
        known = ~np.isnan(wanted[:, 0, 0])
        assert np.array_equal(wanted[known, 0, 0], y[i, first + 1 : first + 11][known])
    for origins, batch in source.asking.forecasts(2):
        for (i, _, last), numbers, unit, found in zip(
            origins, *batch.targets, source.asking.naive(origins), strict=True
        ):
            assert np.array_equal(numbers[:, 0], y[i, last + 1 : last + 4])
            np.testing.assert_array_equal(found[:, 0, 5], y[i, last - 6 : last - 3])
            apart = [abs(y[i, t] - y[i, t - 7]) / scale for t in range(7, 42)]
            np.testing.assert_allclose(unit / scale, np.mean(apart), rtol=1e-6)


def test_errors_of_the_naive_whose_squares_are_nothing():
    y = np.array([[0.0], [3.0], [0.0], [4.0]])
    for size in (1.0, 1e-300, 2e300):
        mean, root = season_errors(size * y, 1)
        assert mean[0] / size == pytest.approx(10 / 3, rel=1e-12)
        assert root[0] / size == pytest.approx(np.sqrt((9 + 9 + 16) / 3), rel=1e-12)
    ahead = naive(1e8 + y, 2, 2, np.array([0.0]), [0.5])
    assert ahead[:, 0, 0].tolist() == [1e8, 1e8 + 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_cast_of_the_model_leaves_its_scales(dtype):
    """Otherwise a location of 1e8 would be 99,614,720 in bfloat16, and infinite in float16."""
    x = torch.from_numpy(1e8 + wave(6, 3))[..., None]
    inputs = Features(1, scales=[[1e8, 0.5]])
    for model in (
        Forecaster(2, Stack(8, 1, "lru"), Channels(scales=[[1e8, 0.5]])),
        SequenceClassifier(3, Stack(8, 1, "lru"), inputs),
        SequenceRegressor(2, Stack(8, 1, "lru"), inputs, output_scales=[[1e9, 2], [1e-9, 3]]),
    ):
        exact = model.double()(x)[0]
        cast = model.to(dtype)(x)[0]
        unit = 1.0 if isinstance(model, SequenceClassifier) else torch.tensor([0.5, 2.0])[..., None][: exact.shape[1]]
        unit = 0.5 if isinstance(model, Forecaster) else unit
        assert bool(((cast.double() - exact).abs() <= 40 * torch.finfo(dtype).eps * unit).all())
        model.float()
    assert model.answer.location.tolist() == [1e9, 1e-9]


def test_a_drawn_series_goes_on_at_its_level():
    """Generation feeds back what it has drawn, in float64."""
    model = Forecaster(1, Stack(8, 1, "lru"), Channels(scales=[[1e12, 1.0]]), recursive=True).eval()
    plain = Forecaster(1, Stack(8, 1, "lru"), recursive=True).eval()
    plain.load_state_dict(model.state_dict())
    y = torch.from_numpy(wave(30))[..., None]
    found = torch.stack(list(model.generate(1e12 + y, max_steps=6, seed=1)))
    expected = torch.stack(list(plain.generate(y, max_steps=6, seed=1)))
    np.testing.assert_allclose(found - 1e12, expected, rtol=0, atol=slack(1e12, 1.0))
