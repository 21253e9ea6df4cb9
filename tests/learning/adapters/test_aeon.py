"""The classifier and the forecaster for aeon pass aeon's own checks."""

import numpy as np
import pytest

pytest.importorskip("aeon", reason="aeon is not installed: pip install 'scanl[aeon]'")
pytest.importorskip("pandas", reason="pandas is not installed: pip install 'scanl[series]'")

from aeon.testing.estimator_checking._yield_estimator_checks import _yield_all_aeon_checks

from scanl.errors import DataError
from scanl.learning.adapters.aeon import AeonClassifier, AeonForecaster

pytestmark = pytest.mark.filterwarnings("ignore")  # of aeon
# Checks that do not apply, and why.
APART = {
    "check_dl_constructor_initializes_deeply": "it is of aeon's own networks in Keras",
    "check_classifier_saving_loading_deep_learning": "it is of aeon's own networks in Keras",
    "check_classifier_random_state_deep_learning": "it is of aeon's own networks in Keras",
}
CHECKS = [
    pytest.param(check, id=f"{kind.__name__}-{check.func.__name__}-{number}")
    for kind in (AeonClassifier, AeonForecaster)
    for number, check in enumerate(_yield_all_aeon_checks(kind, use_first_parameter_set=True, has_dependencies=True))
]


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_of_aeon(check):
    if check.func.__name__ in APART:
        pytest.skip(APART[check.func.__name__])
    check()


def test_series_of_unequal_length_are_classified():
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, 40)
    series = []
    for label in y:
        time = np.arange(draw.integers(10, 15)) + draw.uniform(0, 6)
        series.append(np.stack([np.sin(time + 0.8 * label), np.sin(time)]))
    series[0][0, 3] = np.nan
    names = np.array(["behind", "ahead"])[y]
    model = AeonClassifier(method="stack", layer="lru", dim=8, steps=60, lr=0.05).fit(series, names)
    assert (model.predict(series) == names).mean() > 0.9
    with_longer = model.predict_proba([*series, np.ones((2, 30))])
    np.testing.assert_allclose(with_longer[:-1], model.predict_proba(series), rtol=1e-4, atol=1e-6)
    one = AeonClassifier(method="stack", layer="lru", dim=8, steps=1).fit(series, names)
    longest = [each for each in series if each.shape[1] == 14]
    np.testing.assert_allclose(
        one.predict_proba(longest), one.model_.predict_proba(np.stack(longest).transpose(0, 2, 1)), rtol=1e-4, atol=1e-6
    )


def test_a_wave_is_forecast():
    wave = 50 + 3 * np.sin(2 * np.pi * np.arange(120) / 8)
    truth = 50 + 3 * np.sin(2 * np.pi * np.arange(120, 124) / 8)
    model = AeonForecaster(lags=8, layer="lru", dim=8, steps=40, lr=0.03, sequence_length=32)
    found = model.iterative_forecast(wave, 4)
    assert np.abs(found - truth).max() < 1
    ahead = AeonForecaster(horizon=3, lags=8, layer="lru", dim=8, steps=40, lr=0.03, sequence_length=32).forecast(wave)
    assert abs(ahead - truth[2]) < 1
    with pytest.raises(DataError, match="y has 3 steps, expected at least 4 because the horizon is 3"):
        AeonForecaster(horizon=3).fit(wave[:3])
