"""The estimators are scikit-learn's in their habits, and frames come out as they went in."""

import functools
import pickle

import numpy as np
import pytest
import torch

sklearn = pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'scanl[sklearn]'")
pd = pytest.importorskip("pandas", reason="pandas is not installed: pip install 'scanl[series]'")

from sklearn.model_selection import GridSearchCV  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import FunctionTransformer  # noqa: E402
from sklearn.utils.estimator_checks import estimator_checks_generator  # noqa: E402

from scanl.errors import ConfigError, DataError  # noqa: E402
from scanl.layers import Hawk  # noqa: E402
from scanl.learning.estimators import SeriesClassifier, SeriesRegressor  # noqa: E402
from scanl.learning.estimators.options import device_of  # noqa: E402
from scanl.models import RandomFilters  # noqa: E402

COVERS = ["learning/estimators/*"]
SMALL = {"method": "stack", "layer": "lru", "dim": 8, "steps": 3}
FEW = {"filter_options": {"filters": 10}}
# Checks that need a good score are run with training that is long enough for one, or with more filters.
SCORED = {
    "check_classifiers_train", "check_regressors_train", "check_supervised_y_2d", "check_class_weight_classifiers"
}  # fmt: skip
# Checks that compare to 1e-7, closer than float32 goes: they are run in float64, where the sums' order does not show.
EXACT = {"check_sample_weight_equivalence_on_dense_data"}
CHECKS = [
    pytest.param(kind, options, check, id=f"{kind.__name__}-{getattr(check, 'func', check).__name__}-{number}")
    for kind in (SeriesClassifier, SeriesRegressor)
    for options in (SMALL, FEW)
    for number, (_, check) in enumerate(estimator_checks_generator(kind(**options)))
]


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "options", "check"), CHECKS)
def test_a_check_of_scikit_learn(kind, options, check, request):
    name = getattr(check, "func", check).__name__
    if name in EXACT:
        request.getfixturevalue("float64")
    if name in SCORED and options is SMALL:
        if not request.config.getoption("--all"):
            pytest.skip("a long training: runs with --all")
        options = {**SMALL, "steps": 150, "lr": 0.02}
    if name in SCORED and options is FEW:
        options = {"filter_options": {"filters": 100}}
    check(kind(**options))


def waves(n=60, steps=12, seed=0):
    """Two channels; the class is whether the first one leads."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 2, n)
    time = np.arange(steps)[None] + draw.uniform(0, 6, (n, 1))
    x = np.stack([np.sin(time + 0.8 * y[:, None]), np.sin(time)], 2) + 0.05 * draw.normal(size=(n, steps, 2))
    return x, y


def test_series_of_several_channels_in_a_pipeline_and_a_search():
    x, y = waves()
    x[3, 4, 1] = np.nan
    names = np.array(["behind", "ahead"])[y]
    search = GridSearchCV(
        make_pipeline(
            FunctionTransformer(lambda a: 10 * a), SeriesClassifier(method="stack", layer="lru", dim=8, lr=0.05)
        ),
        {"seriesclassifier__steps": [1, 50]},
        cv=2,
    ).fit(x, names)
    assert search.best_params_ == {"seriesclassifier__steps": 50}
    other, truth = waves(seed=1)
    assert search.score(other, np.array(["behind", "ahead"])[truth]) > 0.9
    probabilities = search.predict_proba(other)
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)
    assert search.predict(other).tolist() == search.classes_[probabilities.argmax(1)].tolist()
    with pytest.raises(ValueError, match="X has 1 channels, expected 2 as in fit"):
        search.predict(x[..., 0])


def test_several_numbers_of_a_series():
    x, _ = waves()
    y = np.stack([x[:, :, 0].mean(1), 100 + x[:, 0, 1]], 1)
    model = SeriesRegressor(method="stack", layer="lru", dim=8, steps=50, lr=0.05).fit(x, y)
    assert model.predict(x).shape == (60, 2)
    assert model.score(x, y) > 0.5
    again = SeriesRegressor(method="stack", layer="lru", dim=8, steps=50, lr=0.05).fit(x, y)
    np.testing.assert_array_equal(again.predict(x), model.predict(x))
    with pytest.raises(ConfigError, match="steps is 0, expected a whole number of at least 1"):
        SeriesRegressor(method="stack", steps=0).fit(x, y)


KINDS = pytest.mark.parametrize("kind", [SeriesClassifier, SeriesRegressor])


def parameters(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.model_.parameters()])


def test_random_states(monkeypatch):
    x, y = waves(20)
    states = (3, np.random.RandomState(3), np.random.default_rng(3))
    for state in states:
        one, two = (parameters(SeriesClassifier(**SMALL, random_state=state).fit(x, y)) for _ in range(2))
        assert torch.equal(one, two) == isinstance(state, int)  # a generator goes on
    for make in (np.random.RandomState, np.random.default_rng):
        one, two = (parameters(SeriesClassifier(**SMALL, random_state=make(3)).fit(x, y)) for _ in range(2))
        assert torch.equal(one, two)
    fits = []
    for _ in range(2):
        monkeypatch.setattr(np.random.mtrand, "_rand", np.random.RandomState(5))
        fits += [parameters(SeriesClassifier(**SMALL, random_state=None).fit(x, y)) for _ in range(2)]
    one, two, again, _ = fits
    assert torch.equal(one, again)
    assert not torch.equal(one, two)
    with pytest.raises(
        ConfigError, match=r"random_state is 2\.5, expected a whole number of at least 0, a RandomState"
    ):
        SeriesClassifier(**SMALL, random_state=2.5).fit(x, y)


@KINDS
def test_lines_of_a_fit(kind, capsys):
    x, y = waves(20)
    kind(method="stack", layer="lru", dim=8, steps=20).fit(x, y)
    assert capsys.readouterr().out == ""
    kind(method="stack", layer="lru", dim=8, steps=20, verbose=1).fit(x, y)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith(f"{kind.__name__}: step 2 of 20, loss ")
    assert lines[-1].startswith(f"{kind.__name__}: step 20 of 20, loss ")


@KINDS
def test_a_device(kind):
    x, y = waves(20)
    expected = kind(**SMALL).fit(x, y).predict(x)
    np.testing.assert_array_equal(kind(**SMALL, device=torch.device("cpu")).fit(x, y).predict(x), expected)
    assert device_of("who", None) == torch.device("cpu")
    for wrong in ("nowhere", 2.5):
        with pytest.raises(ConfigError, match=f"{kind.__name__}: device is {wrong!r}, expected a device of torch that"):
            kind(**SMALL, device=wrong).fit(x, y)


@KINDS
@pytest.mark.usefixtures("float64")
def test_weights_of_series(kind):
    """Of a batch with all series, weights 2 and 0 equal a series twice and none, up to rounding. X has NaN."""
    x, y = waves(12)
    x[0, 3], x[5, 2] = np.nan, np.nan
    weights = np.array([2, 0, 1, 1, 2, 1, 3, 1, 0, 1, 1, 2])
    model = kind(**{**SMALL, "steps": 6}, batch_size=100)
    method = "predict_proba" if kind is SeriesClassifier else "predict"
    weighted = getattr(model.fit(x, y, sample_weight=weights), method)(x)
    repeated = getattr(model.fit(x.repeat(weights, 0), y.repeat(weights)), method)(x)
    plain = getattr(model.fit(x, y), method)(x)
    np.testing.assert_array_equal(plain, getattr(model.fit(x, y, 0.5), method)(x))
    # Adam's first steps divide gradients by their size, so rounding of the smallest ones grows to its root.
    np.testing.assert_allclose(weighted, repeated, rtol=0, atol=np.finfo(np.float64).eps ** 0.5)
    assert np.abs(weighted - plain).max() > 1e-4


@KINDS
def test_weights_that_are_none(kind):
    x, y = waves(12)
    for wrong in (np.ones((12, 2)), np.ones(11)):
        with pytest.raises(DataError, match=r"sample_weight has shape \(1[12],.*, expected \(12,\) because of X"):
            kind(**SMALL).fit(x, y, wrong)
    for wrong in (np.arange(12) - 1.0, np.full(12, np.inf)):
        with pytest.raises(DataError, match=r"sample_weight is from .* to .*, expected finite numbers of at least 0"):
            kind(**SMALL).fit(x, y, wrong)
    with pytest.raises(DataError, match="sample_weight is zero for every series, expected one weight above zero"):
        kind(**SMALL).fit(x, y, np.zeros(12))


def test_weights_of_classes():
    x, y = waves(40)
    few = np.r_[np.flatnonzero(y == 0), np.flatnonzero(y == 1)[:4]]
    x, names = x[few], np.array(["behind", "ahead"])[y[few]]
    options = {**SMALL, "batch_size": 100}
    counts = {name: (names == name).sum() for name in set(names)}
    by_hand = {name: len(names) / (2 * count) for name, count in counts.items()}
    fits = [SeriesClassifier(**options, class_weight=weight).fit(x, names) for weight in ("balanced", by_hand)]
    one, two = (fit.predict_proba(x) for fit in fits)
    np.testing.assert_allclose(one, two, rtol=1e-6)
    plain = SeriesClassifier(**options).fit(x, names).predict_proba(x)
    assert one[:, 0].mean() > plain[:, 0].mean()  # "ahead" is the rare one
    with pytest.raises(ConfigError, match="class_weight is 'equal', expected 'balanced', a dict of weights by class,"):
        SeriesClassifier(**SMALL, class_weight="equal").fit(x, names)


@KINDS
def test_early_stopping(kind, capsys):
    """The loss of the series held out is noise here: training ends early, at the weights with the smallest one."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(40, 6)), np.arange(40) % 2
    options = {**SMALL, "steps": 400, "lr": 0.05, "early_stopping": True, "n_iter_no_change": 3, "verbose": 1}
    fitted = kind(**options, validation_fraction=0.25).fit(x, y)
    out = capsys.readouterr().out
    assert f"{kind.__name__}: stopped at step" in out
    assert "step 400 of 400" not in out
    assert np.isfinite(fitted.predict(x.astype(float))).all()
    learnt, check = fitted._split(torch.from_numpy(y), np.random.default_rng(1))
    assert sorted([*learnt.tolist(), *check.tolist()]) == list(range(40))
    assert y[check].tolist().count(0) == y[check].tolist().count(1) == 5
    with pytest.raises(ConfigError, match=r"validation_fraction is 1\.5, expected a number between 0 and 1"):
        kind(**SMALL, early_stopping=True, validation_fraction=1.5).fit(x, y)
    with pytest.raises(
        DataError, match=r"X has 4 series, of which a validation_fraction of 0\.1 is none; expected one"
    ):
        kind(**SMALL, early_stopping=True).fit(x[:4], y[:4])


@KINDS
def test_a_warm_start(kind):
    x, y = waves(20)
    model = kind(**SMALL, warm_start=True).fit(x, y)
    one, scales = parameters(model), model.model_.standard.scale.clone()
    again = kind(**SMALL, warm_start=True).fit(x, y)
    assert torch.equal(parameters(again), one)
    two = model.set_params(lr=1e-6).fit(2 * x, y)
    torch.testing.assert_close(parameters(two), one, rtol=0, atol=1e-5)  # three steps of at most about lr
    assert not torch.equal(parameters(two), one)
    assert torch.equal(model.model_.standard.scale, scales)
    with pytest.raises(ValueError, match="X has 1 channels, expected 2 as in fit"):
        model.fit(x[..., 0], y)
    message = {
        SeriesClassifier: r"y has the classes \[1, 2\], expected \[0, 1\] of the last fit because of warm_start",
        SeriesRegressor: "y has 2 numbers of a series, expected 1 of the last fit because of warm_start",
    }[kind]
    with pytest.raises(ValueError, match=message):
        model.fit(x, y + 1 if kind is SeriesClassifier else np.stack([y, y], 1))


def test_predictions_of_long_series_are_read_in_pieces(monkeypatch):
    x, y = waves(10)
    model = SeriesRegressor(**SMALL).fit(x, y)
    expected = model.predict(x)
    for steps in (5, 24, 60):  # pieces of a series, two series, and five
        monkeypatch.setattr("scanl.learning.series.examples.STEPS", steps)
        np.testing.assert_allclose(model.predict(x), expected, rtol=1e-12, atol=1e-12)


def test_intervals_of_a_regressor():
    x, y = waves(60)
    y = y + np.random.default_rng(1).normal(size=60)
    model = SeriesRegressor(method="stack", layer="lru", dim=8, steps=40, lr=0.05, distribution="gaussian").fit(x, y)
    frame = model.predict_interval(x, [80, 50])
    assert list(frame.columns) == ["y", "y-lo-80", "y-hi-80", "y-lo-50", "y-hi-50"]
    np.testing.assert_array_equal(frame["y"], model.predict(x))
    assert (frame["y-lo-80"] < frame["y-lo-50"]).all()
    assert (frame["y-hi-80"] > frame["y-hi-50"]).all()
    # Of a normal distribution the 90th and the 75th per cent are at 1.2816 and 0.6745 deviations.
    widths = (frame["y-hi-80"] - frame["y-lo-80"]) / (frame["y-hi-50"] - frame["y-lo-50"])
    np.testing.assert_allclose(widths, 1.2815515655446004 / 0.6744897501960817, rtol=1e-9)
    pair = SeriesRegressor(**SMALL, distribution="quantiles").fit(x, np.stack([y, y], 1)).predict_interval(x)
    assert list(pair.columns)[:3] == ["y0", "y0-lo-80", "y0-hi-80"]
    assert "y1-hi-95" in pair.columns
    points = SeriesRegressor(**SMALL).fit(x, y)
    with pytest.raises(
        ConfigError, match="distribution is 'points', expected one with intervals because of predict_in"
    ):
        points.predict_interval(x)
    with pytest.raises(ConfigError, match=r"levels is \[80\], expected none because the distribution is points"):
        points.predict_interval(x, [80])


def test_the_pool_of_a_classifier():
    x, y = waves(20)
    mean, last = (SeriesClassifier(**SMALL, pool=pool).fit(x, y) for pool in ("mean", "last"))
    assert (mean.model_.pool, last.model_.pool) == ("mean", "last")
    assert torch.equal(parameters(SeriesClassifier(**SMALL).fit(x, y)), parameters(mean))
    with pytest.raises(ConfigError, match="classifier: unknown pool 'first'; known: mean, last"):
        SeriesClassifier(**SMALL, pool="first").fit(x, y)


def test_the_default_is_chosen_by_series_that_are_left_out(capsys):
    x, y = waves()
    names = np.array(["behind", "ahead"])[y]
    other, truth = waves(seed=1)
    model = SeriesClassifier(verbose=1).fit(x, names)
    assert isinstance(model.model_, RandomFilters)
    assert model.score(other, np.array(["behind", "ahead"])[truth]) > 0.95
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": loss")[0] for line in lines] == ["SeriesClassifier: 2048 filters, leave_out=False"]
    loss = min(float(line.partition("loss ")[2].split()[0]) for line in lines)
    assert model.choice_["loss"] == pytest.approx(loss, rel=1e-3)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(other), model.predict_proba(other))
    options = {name: model.choice_[name] for name in ("filters", "levels", "longest", "leave_out", "known")}
    said = SeriesClassifier(filter_options=options, penalty=model.choice_["penalty"]).fit(x, names)
    np.testing.assert_array_equal(said.predict_proba(other), model.predict_proba(other))
    another = SeriesClassifier(filter_options=options, random_state=1).fit(x, names)
    assert (another.predict_proba(other) != model.predict_proba(other)).all()
    assert 0.9 < model.predict_proba(other).max(1).mean() < 0.995  # 60 series were all right
    assert isinstance(SeriesClassifier(method="stack", steps=2).fit(x, names).model_.stack.mixers()[0], Hawk)


def test_whether_missing_steps_are_left_out_is_chosen():
    """Once the length alone says the class, and once it says nothing."""
    draw = np.random.default_rng(0)
    y = np.arange(40) % 2
    lengths = {
        True: draw.integers(8, 20, 40),
        False: np.where(y == 0, draw.integers(8, 13, 40), draw.integers(15, 20, 40)),
    }
    for left_out, steps in lengths.items():
        x = draw.normal(size=(40, 20)) + (2 * y[:, None] if left_out else 0)
        x[np.arange(20) < 20 - steps[:, None]] = np.nan
        model = SeriesClassifier(**FEW).fit(x, y)
        assert model.choice_["leave_out"] == left_out
        assert model.score(x, y) == 1


@KINDS
def test_pieces_are_learnt_as_the_whole(kind):
    """The readout is the ridge regression on all pieces, weighted or repeated alike; a stack is trained on."""
    x, y = waves(40)
    options = {"classes": [0, 1]} if kind is SeriesClassifier else {}
    pieces = [slice(0, 20), slice(20, 23), slice(23, 40)]
    weights = np.array([1, 2, 1, 3] * 10)
    one, two = kind(**FEW), kind(**FEW)
    for piece in pieces:
        one.partial_fit(x[piece], y[piece], sample_weight=weights[piece], **options)
    two.partial_fit(x[:20], y[:20], sample_weight=weights[:20], **options)
    two.partial_fit(np.repeat(x[20:], weights[20:], 0), np.repeat(y[20:], weights[20:]))
    torch.testing.assert_close(one.ridge_.solve(), two.ridge_.solve())
    assert one.score(x, y) > 0.9
    stack = kind(method="stack", layer="lru", dim=8, lr=0.02, batch_size=20)
    for _ in range(20):
        for piece in pieces:
            stack.partial_fit(x[piece], y[piece], **options)
    assert stack.score(x, y) > 0.7
    with pytest.raises(ValueError, match="X has 1 channels, expected 2 as in fit"):
        stack.partial_fit(x[..., 0], y)


OPEN = {"method": "filters", "layer": None, "dim": 32, "steps": None}


@pytest.mark.parametrize("kind", [SeriesClassifier, SeriesRegressor])
@pytest.mark.parametrize("options", [{"filter_options": {"filters": 16}}, SMALL], ids=["filters", "stack"])
def test_pieces_come_before_and_after_a_fit(kind, options):
    """The model of the last fit goes on, or begins anew; its weights change, not those of the one before."""
    x, y = waves(30)
    pieces = {"classes": [0, 1]} if kind is SeriesClassifier else {}
    model = kind(**options).partial_fit(x, y, **pieces).fit(x, y)
    once = np.concatenate([value.detach().flatten() for value in model.model_.parameters()])
    model.partial_fit(x[:20], 1 - y[:20])
    after = np.concatenate([value.detach().flatten() for value in model.model_.parameters()])
    assert once.shape != after.shape or not np.array_equal(once, after)
    assert model.trained_ == ("layer" in options)


@pytest.mark.parametrize("kind", [SeriesClassifier, SeriesRegressor])
def test_a_fitted_estimator_is_asked_for_the_other_model(kind):
    x, y = waves(30)
    for first, then in ((OPEN, SMALL), (SMALL, OPEN)):
        for further in ({}, {"warm_start": True} if then is SMALL else {}):
            model = kind(**first).fit(x, y).set_params(**then, **further)
            learn = model.fit if further else model.partial_fit
            assert learn(x, y).trained_ == (then is SMALL)
            model.predict(x)


@KINDS
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 33}, "dim is 33, expected 32 because method is 'filters'; give method='stack', or leave the option"),
        ({"early_stopping": True}, "early_stopping is True, expected False because method is 'filters'"),
        ({"method": "stack", "penalty": 1.0}, "penalty is 1.0, expected None because method is 'stack'; give meth"),
        ({"method": "filter"}, "method is 'filter', expected one of filters, stack"),
    ],
)
def test_an_option_of_the_other_method_is_refused(kind, options, message):
    """In a fit, because scikit-learn wants constructors and `set_params` to take everything."""
    x, y = waves(20)
    pieces = {"classes": [0, 1]} if kind is SeriesClassifier else {}
    for model in (kind(**options), kind().set_params(**options)):
        for learn in (model.fit, functools.partial(model.partial_fit, **pieces)):
            with pytest.raises(ConfigError) as raised:
                learn(x, y)
            assert str(raised.value).startswith(f"{kind.__name__}: {message}")
    assert kind(method="stack", dim=33, steps=1).fit(x, y).trained_


def test_pieces_that_are_refused():
    x, y = waves(20)
    with pytest.raises(ValueError, match="classes is None, expected all classes in the first call of partial_fit"):
        SeriesClassifier(**FEW).partial_fit(x, y)
    model = SeriesClassifier(**FEW).partial_fit(x, y, [0, 1])
    with pytest.raises(ValueError, match=r"classes is \[0, 2\], expected \[0, 1\] of the first call"):
        model.partial_fit(x, y, [0, 2])
    with pytest.raises(ValueError, match=r"y has the class .*2.*, expected one of \[0, 1\]"):
        model.partial_fit(x, y + 1)
    numbers = SeriesRegressor(**FEW).partial_fit(x, y)
    with pytest.raises(
        ValueError, match="y has 2 numbers of a series, expected 1 of the last fit because of partial_fit"
    ):
        numbers.partial_fit(x, np.stack([y, y], 1))
    with pytest.raises(ConfigError, match="series were learnt by partial_fit, expected fit because of predict"):
        numbers.predict_interval(x)


def test_intervals_of_filters_have_the_errors_of_series_that_were_left_out():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(300, 10))
    y = x.mean(1) + draw.normal(size=300)
    model = SeriesRegressor(**FEW).fit(x[:150], y[:150])
    frame = model.predict_interval(x[150:], [80])
    inside = (frame["y-lo-80"] <= y[150:]) & (y[150:] <= frame["y-hi-80"])
    assert 0.7 < inside.mean() < 0.9  # three standard errors of 150 draws
    np.testing.assert_allclose(frame["y-hi-80"] - frame["y"], np.quantile(model.errors_, 0.9))
