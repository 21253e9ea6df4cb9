"""The estimators are scikit-learn's in their habits, and frames come out as they went in."""

import numpy as np
import pytest
import torch

sklearn = pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'scanl[sklearn]'")
pd = pytest.importorskip("pandas", reason="pandas is not installed: pip install 'scanl[series]'")

from sklearn.model_selection import GridSearchCV  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import FunctionTransformer  # noqa: E402
from sklearn.utils.estimator_checks import estimator_checks_generator  # noqa: E402

from scanl.errors import ConfigError  # noqa: E402
from scanl.learning.estimators import SeriesClassifier, SeriesRegressor  # noqa: E402

SMALL = {"layer": "lru", "dim": 8, "steps": 3}
# Checks that need a good score are run with training that is long enough for one.
SCORED = {"check_classifiers_train", "check_regressors_train", "check_supervised_y_2d"}
CHECKS = [
    pytest.param(kind, check, id=f"{kind.__name__}-{getattr(check, 'func', check).__name__}-{number}")
    for kind in (SeriesClassifier, SeriesRegressor)
    for number, (_, check) in enumerate(estimator_checks_generator(kind(**SMALL)))
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "check"), CHECKS)
def test_a_check_of_scikit_learn(kind, check, request):
    name = getattr(check, "func", check).__name__
    if name in SCORED and not request.config.getoption("--all"):
        pytest.skip("a long training: runs with --all")
    check(kind(**{**SMALL, "steps": 150, "lr": 0.02} if name in SCORED else kind(**SMALL).get_params()))


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
        make_pipeline(FunctionTransformer(lambda a: 10 * a), SeriesClassifier("lru", dim=8, lr=0.05)),
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
    model = SeriesRegressor("lru", dim=8, steps=50, lr=0.05).fit(x, y)
    assert model.predict(x).shape == (60, 2)
    assert model.score(x, y) > 0.5
    again = SeriesRegressor("lru", dim=8, steps=50, lr=0.05).fit(x, y)
    np.testing.assert_array_equal(again.predict(x), model.predict(x))
    with pytest.raises(ConfigError, match="steps is 0, expected a whole number of at least 1"):
        SeriesRegressor(steps=0).fit(x, y)
