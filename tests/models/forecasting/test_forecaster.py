"""Forecasters over every layer: streams against the whole, heads and statistics against numbers worked out by hand."""

import inspect
import itertools
import math
from dataclasses import replace
from statistics import NormalDist

import pytest
import torch
from torch.nn import functional as F

from scanl import data, layers
from scanl.errors import CheckpointError, ConfigError, ShapeError
from scanl.layers import state as states
from scanl.models import (
    Channels,
    Features,
    Forecaster,
    LanguageModel,
    Normalization,
    Saved,
    SequenceLabeler,
    SequenceRegressor,
    SeriesColumns,
    Stack,
    Tokens,
)
from scanl.models.decoding import compiled_step
from scanl.models.forecasting.lags import Lags
from scanl.models.forecasting.recent_errors import PRIOR, recent_factor, recent_steps
from scanl.models.forecasting.running import nothing_read, running
from scanl.models.heads import distributions as heads
from scanl.models.heads.distributions import HEADS, make_head
from scanl.models.saving import recorded

COVERS = [
    "models/forecasting/calibration",
    "models/forecasting/inputs",
    "models/forecasting/lags",
    "models/forecasting/normalization",
    "models/forecasting/recent_errors",
    "models/forecasting/running",
    "models/heads/regressor",
]

pytestmark = pytest.mark.cells_by_loop("name")

CAUSAL = [name for name in layers.names(presets=False) if not layers.get(name).bidirectional]
SCALES = [[3, 2], [5, 1.5], [1, 2], [0, 1], [0, 1], [0, 1], [1, 1], [0, 3]]
T, H = 9, 4


def series(rows=2, dtype=torch.float64):
    """Two targets with missing numbers, a covariate of the past, two static ones, three known ahead, and durations."""
    make = torch.Generator().manual_seed(3)
    x = (torch.rand(rows, T, 3, generator=make, dtype=dtype) * 20).round()
    x[0, 3, 0] = x[-1, 0] = torch.nan
    shapes = ((rows, 2), (rows, T + H, 3), (rows, T + H))
    drawn = [torch.rand(*shape, generator=make, dtype=dtype) for shape in shapes]
    return SeriesColumns(x[..., :2].clone(), x[..., 2:].clone(), *drawn)


def read(model, columns, state=None, **more):
    """The call of a model on columns."""
    x, *others = columns
    return model(x, state, **dict(zip(SeriesColumns._fields[1:], others, strict=True)), **more)


def forecaster(layer="lru", seed=0, **options):
    torch.manual_seed(seed)
    sample = options.pop("layer_options", dict(layers.get(layer).sample))
    stack = Stack(12, options.pop("depth", 2), layer, layer_options=sample)
    channels = Channels(target=2, past=1, static=2, future=3, timed=True, scales=SCALES)
    channels = replace(channels, **{name: options.pop(name) for name in channels.config.keys() & options.keys()})
    model = Forecaster(H, stack, channels, **{"lags": 3, "normalization": Normalization(20.0), **options}).double()
    if model.lags is not None:
        torch.nn.init.normal_(model.lags.weight)
    return model


def assert_same_state(actual, expected):
    for (place, a), (also, b) in zip(states.leaves(actual), states.leaves(expected), strict=True):
        assert place == also
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_stream_is_forecast_as_the_whole(name):
    """Of every layer: sample by sample from the kept state, and in pieces, as from the whole history."""
    model, given = forecaster(name, depth=1), series()
    whole, last = read(model, given)
    assert whole.shape == (2, T, H, 2, 2)
    parts, state = [], None
    for start, end in itertools.pairwise([0, 0, 2, 3, T]):
        y, state = read(model, given.steps(start, end), state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert_same_state(state, last)


@pytest.mark.parametrize(
    "options", [{}, {"lags": 0, "normalization": None}, {"lags": 1, "normalization": Normalization()}], ids=str
)
@pytest.mark.parametrize("recursive", [False, True])
@pytest.mark.parametrize("distribution", HEADS)
def test_predictions_of_a_stream_are_those_of_the_whole(distribution, recursive, options):
    model, given = forecaster(distribution=distribution, recursive=recursive, depth=1, **options), series()
    whole, last = model.predict(given, paths=5)
    state = None
    for t in range(T):
        forecast, state = model.predict(given.steps(t, t + 1), state, paths=5)
    torch.testing.assert_close(forecast, whole)
    assert_same_state(state, last)
    assert whole.mean.shape == (2, H, 2)
    assert whole.quantiles.shape == (2, H, 2, len(heads.LEVELS))
    assert bool((whole.quantiles.diff(dim=-1) >= 0).all())
    if not recursive:
        parameters, _ = read(model, given)
        torch.testing.assert_close(whole.mean, model.head.mean(parameters[:, -1]))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("distribution", ["gaussian", "negative_binomial"])
def test_padded_and_packed_series_equal_each_alone(side, distribution):
    model, given = forecaster(distribution=distribution), series(rows=3)
    lengths, steps = torch.tensor([4, T, 1])[:, None], torch.arange(T)
    mask = steps >= T - lengths if side == "left" else steps < lengths
    found, last = read(model, given, mask=mask)
    reach = [slice(int(row.nonzero()[0]), int(row.nonzero()[-1]) + 1 + H) for row in mask]
    reached = [*enumerate(reach), (0, slice(H))]  # the last sequence has no step, and H steps follow it too
    packing = {
        "past": given.past[mask][None],
        "static": torch.cat([given.static, given.static[:1]]),
        "future": torch.cat([given.future[row, steps] for row, steps in reached])[None],
        "timespans": torch.cat([given.timespans[row, steps] for row, steps in reached])[None],
        "cu_seqlens": torch.tensor([0, 4, 4 + T, 5 + T, 5 + T]),
    }
    packed, also = model(given.target[mask][None], **packing)
    again, _ = model(given.target[mask][None], also, **packing)  # go on from the state
    assert not found[~mask].any()
    torch.testing.assert_close(packed[0], found[mask])
    for row in range(3):
        one, here = slice(row, row + 1), mask[row]
        ahead = (values[one, reach[row]] for values in (given.future, given.timespans))
        own = SeriesColumns(given.target[one, here], given.past[one, here], given.static[one], *ahead)
        alone, state = read(model, own)
        torch.testing.assert_close(found[one, here], alone)
        begin, end = packing["cu_seqlens"][row], packing["cu_seqlens"][row + 1]
        torch.testing.assert_close(again[:, begin:end], read(model, own, state)[0])
        assert_same_state(states.index(last, [row]), state)
        assert_same_state(states.index(also, [row]), state)
    assert_same_state(states.index(also, [3]), model.init_state(1))


def test_nothing_at_all():
    model, given = forecaster(), series()
    none, state = read(model, given.steps(0, 0))
    assert none.shape == (2, 0, H, 2, 2)
    assert_same_state(state, model.init_state(2))
    rows, _ = read(model, SeriesColumns(*(values[:0] for values in given)))
    assert rows.shape == (0, T, H, 2, 2)


@pytest.mark.parametrize("recursive", [False, True])
def test_no_forecast_looks_ahead(recursive):
    model, given = forecaster(recursive=recursive), series()
    before, _ = read(model, given)
    given.target[:, 5] += 100
    given.past[:, 5] += 100
    after, _ = read(model, given)
    torch.testing.assert_close(after[:, :5], before[:, :5], rtol=0, atol=0)
    assert not torch.isclose(after[:, 5], before[:, 5]).any()


def loop(x, span):
    """Mean and variance of one channel after each step, as the equations say."""
    weight, mean, variance, prior, found = 0.0, 0.5, 0.0, 1.0, []
    for value in x:
        if not math.isnan(value):
            weight = weight * (1 if span is None else 1 - 1 / span) + 1
            gain = 1 / weight
            variance = (1 - gain) * (variance + gain * (value - mean) ** 2)
            mean += gain * (value - mean)
            prior /= 2
        found.append((mean, (weight * variance + prior) / (weight + prior)))
    return found


@pytest.mark.parametrize("span", [None, 3.0])
def test_running_statistics_by_a_loop(span):
    x = torch.tensor([math.nan, 5.0, math.nan, 7.0, 1e6 + 1, 1e6 + 3, math.nan, 1e6], dtype=torch.float64)
    mean, variance, _ = running(x[None, :, None], nothing_read(torch.full((1, 1), 0.5, dtype=torch.float64)), span)
    found = torch.tensor(loop(x.tolist(), span), dtype=torch.float64)
    torch.testing.assert_close(torch.stack([mean, variance], -1)[0, :, 0], found)


def test_a_constant_series_has_a_variance_of_its_own():
    """By hand: ε is added until a number differs, here by 3 from three that equal the mean before the first."""
    x = torch.tensor([2.0, 2.0, 2.0, 5.0], dtype=torch.float64)[None, :, None]
    _, variance, _ = running(x, nothing_read(torch.full((1, 1), 2.0, dtype=torch.float64)), epsilon=0.25)
    expected = [2.0**-n / (n + 2.0**-n) + 0.25 for n in (1, 2, 3)] + [(4 * 27 / 16 + 2.0**-4) / (4 + 2.0**-4)]
    torch.testing.assert_close(variance.flatten(), torch.tensor(expected, dtype=torch.float64))


def test_without_a_span_they_are_those_of_all_numbers():
    x = 5 + torch.randn(1, 60, 2, dtype=torch.float64)
    mean, variance, _ = running(x, nothing_read(torch.zeros(1, 2, dtype=torch.float64)))
    torch.testing.assert_close(mean[:, -1], x.mean(1))
    torch.testing.assert_close(variance[:, -1], x.var(1, correction=0))


def test_lags_by_a_loop():
    q, h = 3, 2
    lags = Lags(q, h).double()
    torch.nn.init.normal_(lags.weight)
    x, mean = torch.randn(1, 6, 2).double(), torch.randn(1, 6, 2).double()
    scale = torch.rand(1, 6, 2).double() + 1
    x[0, 2, 1] = torch.nan
    found, _ = lags(x, mean, scale, torch.zeros(1, q - 1, 6).double())
    for t, step, channel in itertools.product(range(6), range(h), range(2)):
        total = 0.0
        for k in range(min(q, t + 1)):
            value = x[0, t - k, channel].item()
            if not math.isnan(value):
                total += (
                    lags.weight[step, k].item() * (value - mean[0, t, channel].item()) / scale[0, t, channel].item()
                )
        assert found[0, t, step, channel].item() == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize("distribution", [name for name in HEADS if name != "negative_binomial"])
def test_forecasts_move_with_the_series(distribution):
    """Series that differ by a location and a scale have forecasts that differ by the same, once the prior is gone."""
    model = Forecaster(
        H, Stack(12, 1, "lru"), distribution=distribution, lags=2, normalization=Normalization(3.0)
    ).double()
    torch.nn.init.normal_(model.lags.weight)
    x = 10 * torch.randn(1, 400, 1).double()
    one, _ = model.predict(x)
    other, _ = model.predict(1000 + 50 * x)
    torch.testing.assert_close(other.mean, 1000 + 50 * one.mean, rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(other.quantiles, 1000 + 50 * one.quantiles, rtol=1e-5, atol=1e-2)
    plain = Forecaster(H, Stack(12, 1, "lru"), distribution=distribution, normalization=None).double()
    assert not torch.allclose(plain.predict(1000 + 50 * x)[0].mean, 1000 + 50 * plain.predict(x)[0].mean, rtol=1e-5)


def of_prices(distribution="quantiles", log=True, **options):
    channels = Channels(scales=[[50.0, 20.0]])
    normalization = Normalization(6.0, log, **options)
    model = Forecaster(H, Stack(8, 1, "lru"), channels, distribution=distribution, lags=3, normalization=normalization)
    torch.nn.init.normal_(model.lags.weight)
    return model.double()


@pytest.mark.parametrize("distribution", ["points", "quantiles"])
def test_logarithms_are_forecast_as_numbers_are(distribution):
    """With `log` the forecast is that of another model of the logarithms, mapped back; so is the loss."""
    torch.manual_seed(0)
    model, plain = of_prices(distribution), of_prices(distribution, log=False)
    plain.load_state_dict(model.state_dict())
    y = 50 * (0.3 * torch.randn(2, 12, 1).double()).exp()
    bent = 50 + 50 * (y / 50).log()
    there, here = plain.predict(bent)[0], model.predict(y)[0]
    torch.testing.assert_close(here.quantiles, 50 * (there.quantiles / 50 - 1).exp())
    torch.testing.assert_close(here.mean, 50 * (there.mean / 50 - 1).exp())
    torch.testing.assert_close(model(y)[0], 50 * (plain(bent)[0] / 50 - 1).exp())
    targets = y.unfold(1, H, 1)[:, 1:].transpose(2, 3)
    steps = targets.shape[1]
    expected = plain.loss(bent[:, :steps], 50 + 50 * (targets / 50).log())[0]
    torch.testing.assert_close(model.loss(y[:, :steps], targets)[0], expected)


def test_a_number_without_a_logarithm_is_missing():
    model, y = of_prices(), torch.rand(1, 9, 1).double() + 1
    missing, nothing = y.clone(), y.clone()
    missing[0, 4], nothing[0, 4] = torch.nan, 0
    torch.testing.assert_close(model.predict(nothing)[0], model.predict(missing)[0])


def test_quantiles_are_calibrated_about_the_median():
    torch.manual_seed(1)
    for log in (False, True):
        model, y = of_prices(log=log, calibrated=True), 40 + 5 * torch.rand(2, 9, 1).double()
        before = model.predict(y)[0]
        with torch.no_grad():
            model.calibration[:, :5], model.calibration[1, 6:] = 3.0, 0.5
        after = model.predict(y)[0]
        torch.testing.assert_close(after.mean, before.mean)
        bent = [(values / 50).log() if log else values for values in (before.quantiles, after.quantiles)]
        first, second = (values - values[..., 5:6] for values in bent)
        torch.testing.assert_close(second[..., :5], 3 * first[..., :5])
        torch.testing.assert_close(second[:, 1, :, 6:], 0.5 * first[:, 1, :, 6:])
        torch.testing.assert_close(second[:, 2, :, 6:], first[:, 2, :, 6:])
        between = model.predict(y, levels=[0.85, 0.05, 0.5])[0].quantiles
        torch.testing.assert_close(between[..., 1:], after.quantiles[..., [0, 5]])


def test_recent_errors_by_a_loop():
    """A missing number, and a forecast from lags of which more than half are missing, do not count."""
    q, h = 3, 2
    m = recent_steps(h)
    values, location, weight = *torch.randn(2, 2, q - 1 + m + h).double(), torch.randn(h, q).double()
    values[0, 4], values[1, :3] = torch.nan, torch.nan
    usual, scale = 1 + torch.rand(2, h).double(), 1 + torch.rand(2).double()
    found = recent_factor(values, location, scale, weight, usual)
    arguments = (values, location, scale[:, None] * usual, found)
    for row, means, units, expected in zip(*(one.tolist() for one in arguments), strict=True):
        total, count = PRIOR, PRIOR
        for at in range(len(row) - m, len(row)):
            ratios = []
            for ahead in range(1, h + 1):
                read = [row[at - ahead - k] for k in range(q)]
                if sum(math.isnan(one) for one in read) <= q / 2 and not math.isnan(row[at]):
                    about, of_lags = means[at - ahead], zip(weight[ahead - 1].tolist(), read, strict=True)
                    sums = sum(w * (one - about) for w, one in of_lags if one == one)
                    ratios.append(abs(row[at] - about - sums) / units[ahead - 1])
            if ratios:
                total, count = total + sum(ratios) / len(ratios), count + 1
        assert expected == pytest.approx(total / count)


def test_intervals_are_wider_after_errors_that_are_larger_than_usual():
    """As from the whole history, step by step; the median stays."""
    model, calm = forecaster("lru", distribution="quantiles", target=1, past=0, static=0, future=0, timed=False,
                             scales=SCALES[:1], normalization=Normalization(20.0, calibrated=True)), 40  # fmt: skip
    x = 5 + torch.randn(1, calm + 10, 1).double()
    x[:, calm:] *= 1 + torch.arange(10)[None, :, None] % 2
    assert model.usual_errors is not None
    before = model.predict(x)[0]
    model.usual_errors.fill_(0.2)
    (after, _), state = model.predict(x), None
    for step in x.split(7, 1):
        streamed, state = model.predict(step, state)
    torch.testing.assert_close(streamed, after)
    torch.testing.assert_close(after.mean, before.mean)
    width, first = (one.quantiles[..., -1] - one.quantiles[..., 0] for one in (after, before))
    ratios = width / first
    assert ratios.min() > 1.5
    torch.testing.assert_close(ratios, ratios[:, :1].expand_as(ratios))
    model.usual_errors.fill_(1e9)
    torch.testing.assert_close(
        model.predict(x)[0].quantiles - before.mean[..., None],
        (before.quantiles - before.mean[..., None]) * 16 / (16 + recent_steps(H)),
    )


def test_forecasts_are_rounded_and_have_a_least_number():
    model = forecaster(normalization=Normalization(20.0, rounded=True, least=4.0), distribution="quantiles")
    given = series()
    forecast, _ = model.predict(given)
    free = forecaster(distribution="quantiles").predict(given)[0]
    torch.testing.assert_close(forecast.quantiles, free.quantiles.clamp(min=4).round())
    torch.testing.assert_close(forecast.mean, free.mean.clamp(min=4).round())
    assert bool((free.quantiles < 4).any())


def test_the_loss_of_each_head_by_hand():
    y = torch.tensor([2.0])
    for name, parameters, expected in (
        ("points", [5.0], 9.0),
        ("gaussian", [1.0, 2.0], 0.5 * math.log(2 * math.pi * 4) + 1 / 8),
        # of 3 degrees of freedom at (2 - 1) / 2: density 2 / (π √3 (1 + t²/3)²) / 2
        ("student_t", [1.0, 2.0, 3.0], -math.log(2 / (math.pi * 3**0.5 * (1 + 0.25 / 3) ** 2) / 2)),
        # mean 3, dispersion 1/2: r = 2, p = 3/5; C(3, 2) p² (1-p)²
        ("negative_binomial", [3.0, 0.5], -math.log(3 * 0.6**2 * 0.4**2)),
    ):
        found = make_head(name, 4, 1).loss(torch.tensor([parameters]), y)
        torch.testing.assert_close(found, torch.tensor([expected]), rtol=1e-5, atol=1e-5)
    levels = torch.tensor(heads.LEVELS)
    forecast = torch.linspace(-1, 4, 11)
    by_hand = [2 * max(p * (2 - q), (p - 1) * (2 - q)) for p, q in zip(levels.tolist(), forecast.tolist(), strict=True)]
    torch.testing.assert_close(
        make_head("quantiles", 4, 1).loss(forecast, torch.tensor(2.0)), torch.tensor(by_hand).mean()
    )


@pytest.mark.parametrize("name", HEADS)
def test_quantiles_and_samples_of_heads(name):
    """Half of many draws are below the median, a tenth below the first decile; more for whole numbers."""
    torch.manual_seed(1)
    head = make_head(name, 3, 2)
    parameters = head.in_units(head(torch.randn(1, 3)), torch.full((1, 2), 10.0), torch.full((1, 2), 30.0))
    levels = torch.tensor([0.1, 0.5, 0.9])
    quantiles = head.quantiles(parameters, levels)
    assert quantiles.shape == (1, 2, 3)
    drawn = head.sample(parameters.expand(20_000, 2, -1), torch.Generator().manual_seed(0))
    below = (drawn[..., None] <= quantiles).double().mean(0)
    slack = 5 * (0.25 / 20_000) ** 0.5
    if name == "points":
        assert bool((drawn == parameters[..., 0]).all())
    elif name == "negative_binomial":
        assert bool((below >= levels - slack).all())
        assert bool(((drawn[..., None] < quantiles).double().mean(0) <= levels + slack).all())
    else:
        assert bool(((below - levels).abs() <= slack).all())


def test_the_levels_of_models_are_those_of_sources():
    assert heads.LEVELS == data.LEVELS


def test_crossing_quantiles_are_sorted_and_interpolated():
    head = make_head("quantiles", 3, 1)
    crossed = torch.arange(11.0).flip(0)
    found = head.quantiles(crossed, torch.tensor([0.01, 0.05, 0.075, 0.5, 0.85, 0.99]))
    tail = 5 * NormalDist().inv_cdf(0.99) / NormalDist().inv_cdf(0.95)
    torch.testing.assert_close(found, torch.tensor([5 - tail, 0.0, 0.5, 5.0, 8.5, 5 + tail]))
    assert head.mean(crossed) == 5


def test_what_is_not_asked_for_has_no_loss():
    model, given = forecaster(), series()
    targets = torch.rand(2, T, H, 2).double()
    targets[:, :, 1:] = torch.nan
    found, _ = model.loss(given, targets)
    found.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert not model.lags.weight.grad[1:].any()
    assert model.lags.weight.grad[0].any()
    parameters, _ = read(model, given)
    below = torch.distributions.Normal(*parameters[:, :, 0].unbind(-1)).log_prob(targets[:, :, 0])
    _, _, scale, _ = model._read(model._inputs(given), None, None)
    torch.testing.assert_close(found, -(below + scale[:, :, 0].log()).mean())
    nothing, _ = model.loss(given, torch.full_like(targets, torch.nan))
    assert nothing == 0


@pytest.mark.parametrize("distribution", ["points", "quantiles"])
def test_losses_are_in_units_of_the_last_scale_or_a_larger_one(distribution):
    """By hand, from the forecasts in units. One series begins quietly, the other grows quiet: span is short."""
    model = forecaster(distribution=distribution, normalization=Normalization(3.0))
    given = series()
    given.target[0, :5, :2] = 10 + torch.rand(5, 2)
    given.target[0, 5:, :2], given.target[1, 4:, :2] = 50 * torch.rand(4, 2), 7 + torch.rand(5, 2)
    targets = 20 * torch.rand(2, T, H, 2).double()
    targets[:, 3] = targets[1, 6] = targets[0, 7, 2:] = torch.nan
    _, _, scale, _ = model._read(model._inputs(given), None, None)
    assert (scale[0, :5] < scale[0, -1:] / 3).all()
    assert (scale[1, 3, :, 1] > 2 * scale[1, -1, :, 1]).all()
    parameters, _ = read(model, given)
    units = torch.maximum(scale, scale[:, -1:])
    if distribution == "points":
        errors = ((parameters[..., 0] - targets) / units) ** 2
    else:
        errors = 2 * heads.pinball(parameters, targets, parameters.new_tensor(heads.LEVELS)).mean(-1) / units
    found, _ = model.loss(given, targets)
    torch.testing.assert_close(found, errors[~targets.isnan()].mean())


def test_a_recursive_forecast_reads_itself():
    """By hand: the mean after each step is the next sample, the covariate of the past is missing then, and the
    durations are those of the steps."""
    model, given = forecaster(distribution="points", recursive=True), series()
    found, state = model.predict(given)
    parameters, ahead = read(model, given)
    expected = [parameters[:, -1, 0, :, 0]]
    for step in range(T, T + H - 1):
        more = SeriesColumns(
            expected[-1][:, None],
            torch.full((2, 1, 1), torch.nan).double(),
            given.static,
            F.pad(given.future[:, step : step + 1 + H], (0, 0, 0, step + 1 - T)),
            F.pad(given.timespans[:, step : step + 1 + H], (0, step + 1 - T)),
        )
        parameters, ahead = read(model, more, ahead)
        expected.append(parameters[:, -1, 0, :, 0])
    torch.testing.assert_close(found.mean, torch.stack(expected, 1))
    assert_same_state(state, read(model, given)[1])


def test_paths_are_drawn_by_their_seed():
    model, given = forecaster(recursive=True), series()
    one, same, other = (model.predict(given, paths=7, seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(one.quantiles, same.quantiles)
    assert not torch.equal(one.quantiles, other.quantiles)


@pytest.mark.parametrize("recursive", [False, True])
def test_it_learns_a_wave(recursive):
    """Of period 6 about a level that differs from row to row: a forecast in whose interval the wave lies."""
    torch.manual_seed(0)
    model = Forecaster(6, Stack(12, 1, "mingru"), recursive=recursive, lags=6)
    time, level = torch.arange(46.0), torch.tensor([[0.0], [100.0], [-7.0]])
    wave = (level + 3 * torch.sin(2 * math.pi * time / 6 + level))[..., None]
    targets = wave.unfold(1, 6, 1)[:, 1:].transpose(2, 3)
    optimiser = torch.optim.Adam(model.parameters(), 2e-2)
    for _ in range(100):
        loss, _ = model.loss(wave[:, :40], targets)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    forecast, _ = model.predict(wave[:, :40], paths=50)
    error = (forecast.mean - wave[:, 40:]).abs().mean()
    assert error < 0.6  # the wave's own mean is off by 3 * 2 / π = 1.9


def test_a_long_stream_stays_small_and_finite():
    """In float32: the state has the same size, and the statistics those of float64."""
    torch.manual_seed(0)
    model = Forecaster(2, Stack(8, 1, "lru"), lags=2)
    x = 1000 + torch.randn(1, 600, 1)
    x[:, ::7] = torch.nan
    sizes, state = set(), None
    for piece in x.split(1, 1):
        forecast, state = model.predict(piece, state)
        sizes.add(sum(leaf.numel() for _, leaf in states.leaves(state)))
    assert len(sizes) == 1
    exact, _ = model.double().predict(x.double())
    again, _ = model.float().predict(x)
    off = 2 * (again.mean - exact.mean).abs().max() + torch.finfo(torch.float32).eps * 1000
    assert (forecast.mean - exact.mean).abs().max() <= off


REGRESSORS = {name: SequenceRegressor(2, Stack(8, 1, "lru"), Features(3), distribution=name) for name in HEADS}


@pytest.mark.parametrize("name", HEADS)
def test_a_regressor_tells_numbers(name):
    """In pieces as at once; its answers are in units, and its loss is that of its head."""
    torch.manual_seed(0)
    scales = [[0.0, 1.0], [4.0, 3.0]]
    model = SequenceRegressor(
        2, Stack(8, 1, "lru"), Features(3, scales=[[1, 2]] * 3, missing=True), distribution=name, output_scales=scales
    ).double()
    x = torch.randn(2, 5, 3).double()
    x[0, 1, 1] = torch.nan
    whole, _ = model(x)
    _, state = model(x[:, :2])
    torch.testing.assert_close(model(x[:, 2:], state)[0], whole)
    plain = SequenceRegressor(2, Stack(8, 1, "lru"), Features(3, missing=True), distribution=name).double()
    plain.load_state_dict(model.state_dict())
    raw, _ = plain((x - 1) / 2)
    location = torch.zeros(2) if name == "negative_binomial" else torch.tensor([0.0, 4.0])
    torch.testing.assert_close(whole, model.head.in_units(raw, location.double(), torch.tensor([1.0, 3.0]).double()))
    targets = torch.tensor([[1.0, 5.0], [0.0, 7.0]]).double()
    found, _ = model.loss(x, targets)
    if name == "negative_binomial":
        expected = model.head.loss(whole, targets)
    else:
        expected = model.head.loss(raw, (targets - location) / torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(found, expected.mean())
    found.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_labeler_labels_each_step():
    torch.manual_seed(0)
    model = SequenceLabeler(4, Stack(8, 2, "lru"), Features(3, missing=True)).double()
    x = torch.randn(2, 6, 3).double()
    x[0, 1, 1] = torch.nan
    whole, last = model(x)
    assert whole.shape == (2, 6, 4)
    first, state = model(x[:, :2])
    second, state = model(x[:, 2:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    assert_same_state(state, last)
    known = torch.cat([x.nan_to_num(), (~x.isnan()).double()], -1)
    y, _ = model.stack(F.linear(known, model.input.weight, model.input.bias))
    torch.testing.assert_close(whole, model.head(y))
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    padded, _ = model(x, mask=mask)
    torch.testing.assert_close(padded[1, :3], model(x[1:, :3])[0][0])
    assert not padded[~mask].any()


SAVED = [
    Forecaster(
        3,
        Stack(8, 1, ["lru", "hawk"]),
        Channels(target=2, past=1, scales=[[1, 2]] * 3),
        distribution="student_t",
        lags=4,
    ),
    SequenceRegressor(2, Stack(8, 1, "gru"), Features(4), distribution="quantiles", output_scales=[[1, 2]] * 2),
    SequenceLabeler(3, Stack(8, 1, "mingru"), Tokens(7)),
]


@pytest.mark.parametrize("model", SAVED, ids=lambda model: type(model).__name__)
def test_saved_and_loaded(model, tmp_path):
    assert set(model.config) == set(inspect.signature(type(model).__init__).parameters) - {"self"}
    model.save(tmp_path)
    again = Saved.load(tmp_path)
    assert recorded(again) == recorded(model)
    x = torch.tensor([[1, 2, 3]]) if isinstance(model, SequenceLabeler) else torch.randn(1, 3, model.input.in_features)
    given = {}
    if isinstance(model, Forecaster):
        x, given = torch.randn(1, 3, 2), {"past": torch.randn(1, 3, 1)}
    torch.testing.assert_close(again(x, **given)[0], model.eval()(x, **given)[0], rtol=0, atol=0)
    with pytest.raises(CheckpointError, match="expected LanguageModel"):
        LanguageModel.load(tmp_path)


def test_dropout_is_of_training_alone():
    model, x = Forecaster(2, Stack(8, 1, "lru", dropout=0.5)), torch.randn(1, 4, 1)
    plain = Forecaster(2, Stack(8, 1, "lru"))
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.eval()(x)[0], plain(x)[0], rtol=0, atol=0)
    assert not torch.equal(model.train()(x)[0], plain(x)[0])


def plain(**options):
    return Forecaster(2, Stack(8, 1, "lru"), **options)


ONE = torch.zeros(1, 3, 1)
WRONG = [
    (lambda: plain(channels=Channels(0)), ConfigError, "Channels: target is 0, expected at least 1"),
    (lambda: plain(channels=Channels(past=-1)), ConfigError, "Channels: past is -1, expected at least 0"),
    (lambda: plain(channels=2), ConfigError, r"forecaster: channels is 2, expected Channels\("),
    (
        lambda: plain(normalization=True),
        ConfigError,
        r"forecaster: normalization is True, expected Norm",
    ),
    (lambda: Forecaster(0, Stack(8, 1)), ConfigError, "forecaster: horizon is 0, expected at least 1"),
    (lambda: Forecaster(1, None), ConfigError, "forecaster: stack is None, expected a stack of layers"),
    (lambda: plain(lags=-1), ConfigError, "forecaster: lags is -1, expected at least 0"),
    (lambda: Normalization(1.0), ConfigError, "Normalization: span is 1.0, expected more than 1"),
    (
        lambda: plain(normalization=Normalization(log=True), distribution="gaussian"),
        ConfigError,
        "forecaster: distribution is gaussian, expected points or quantiles because of log",
    ),
    (
        lambda: plain(normalization=Normalization(log=True), distribution="points"),
        ConfigError,
        "forecaster: scales has the location 0 of a target, expected more than 0 because of log",
    ),
    (lambda: plain(distribution="gausian"), ConfigError, r"unknown distribution 'gausian'; did you mean 'gaussian'\?"),
    (
        lambda: plain(channels=Channels(scales=[[0, 0]])),
        ConfigError,
        "a location and a scale above 0 for each of 1 channels",
    ),
    (lambda: plain(channels=Channels(past=1, scales=[[0, 1]])), ConfigError, "for each of 2 channels"),
    (
        lambda: Forecaster(2, Stack(8, 1, "bidirectional")),
        ConfigError,
        "'bidirectional' is bidirectional, expected causal",
    ),
    (lambda: plain()(ONE[0]), ShapeError, r"x is torch.float32 \(3, 1\), expected a floating dtype and \(B, T, 1\)"),
    (lambda: plain()(ONE.long()), ShapeError, "x is torch.int64"),
    (
        lambda: plain(channels=Channels(static=2))(ONE),
        ShapeError,
        r"static is None, expected \(1, 2\) because the model was made with",
    ),
    (lambda: plain()(ONE, static=ONE[0]), ShapeError, r"static has shape \(3, 1\), expected None because the model"),
    (
        lambda: plain(channels=Channels(past=1))(ONE),
        ShapeError,
        r"past is None, expected \(1, 3, 1\) because the model",
    ),
    (
        lambda: plain(channels=Channels(past=1))(ONE, past=ONE + math.inf),
        ShapeError,
        "past has an infinite number, expected finite ones",
    ),
    (
        lambda: plain(channels=Channels(future=1))(ONE, future=ONE),
        ShapeError,
        r"future has shape \(1, 3, 1\), expected \(1, 5, 1\)",
    ),
    (lambda: plain(channels=Channels(timed=True))(ONE), ShapeError, r"timespans is None, expected \(1, 5\)"),
    (lambda: plain()(ONE, timespans=ONE[..., 0]), ShapeError, "timespans has shape .* expected None because the model"),
    (
        lambda: plain().loss(ONE, ONE),
        ShapeError,
        r"targets has shape \(1, 3, 1\), expected \(1, 3, 2, 1\) because of x",
    ),
    (lambda: plain().predict(ONE[:, :0]), ShapeError, r"x has shape \(1, 0, 1\), expected \(B, T, C\) with T at least"),
    (lambda: plain().predict(ONE, levels=[0.5, 1.0]), ConfigError, r"levels are \(0.5, 1.0\), expected each above 0"),
    (lambda: plain().predict(ONE, paths=0), ConfigError, "paths is 0, expected at least 1"),
    (
        lambda: plain()(ONE, mask=torch.ones(1, 3).bool(), cu_seqlens=torch.tensor([0, 3])),
        ShapeError,
        "forecaster: mask and cu_seqlens are both given",
    ),
    (lambda: SequenceRegressor(2, Stack(8, 1), None), ConfigError, "regressor: inputs is None, expected Tokens"),
    (lambda: Tokens(0), ConfigError, "Tokens: vocab_size is 0, expected at least 1"),
    (lambda: Features(0), ConfigError, "Features: channels is 0, expected at least 1"),
    (
        lambda: SequenceRegressor(2, Stack(8, 1, "lru"), Features(1)).loss(ONE, ONE),
        ShapeError,
        r"regressor: targets has shape \(1, 3, 1\), expected \(1, 2\) because of x",
    ),
    (
        lambda: SequenceRegressor(2, Stack(8, 1, "lru"), Features(1)).loss(ONE, ONE[:, :2, 0], weights=ONE),
        ShapeError,
        r"regressor: weights has shape \(1, 3, 1\), expected \(1,\) because of x",
    ),
    (
        lambda: SequenceRegressor(2, Stack(8, 1, "lru"), Features(1), output_scales=[[0, 1]]),
        ConfigError,
        "a location and a scale above 0 for each of 2 channels",
    ),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_wrong_use_is_refused(case):
    call, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        call()


def test_steps_after_the_first_ones_are_by_a_compiled_step(monkeypatch):
    """Numbers are those of the ordinary step: in float32 it has other sums, and what is drawn is read again."""
    torch.manual_seed(0)
    channels = Channels(2, past=1, static=2, future=3, timed=True, scales=SCALES)
    model = Forecaster(H, Stack(8, 1, "gru"), channels, distribution="negative_binomial", recursive=True).eval()
    columns, steps = series(dtype=torch.float32), []
    following = torch.rand(9, 2, 3)
    for tokens in (1 << 40, 2):
        monkeypatch.setattr(compiled_step, "MIN_TOKENS", tokens)
        drawn = torch.stack(list(model.generate(columns, seed=1, max_steps=9, following=iter(following))))
        steps.append((drawn, *model.predict(columns, paths=3, seed=2)[0]))
    assert sorted(model._step()._kernels) == [(2, False), (4, False)]  # the paths of two series are six rows
    for number, expected in zip(*reversed(steps), strict=True):
        torch.testing.assert_close(number, expected, rtol=1e-5, atol=1e-5)
