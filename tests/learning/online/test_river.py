"""The estimators of river: river's own checks, and what those do not look at."""

import copy
import functools
import pickle
from itertools import islice

import pytest
import torch

pytest.importorskip("river", reason="river is not installed: pip install 'scanl[online]'")

from river import checks, compose, datasets, evaluate, metrics, preprocessing

from scanl.errors import ConfigError, DataError
from scanl.learning.online import RiverClassifier, RiverRegressor

MODELS = {"regressor": RiverRegressor, "classifier": RiverClassifier}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", MODELS)
def test_the_checks_of_river_pass(name, monkeypatch):
    """All of them, on the first 12 samples of each data set, or 60 where growth is looked for, of 200 and 2,000."""
    whole = checks._yield_datasets

    def short(model, scale=1):
        return [list(islice(iter(data), 12 if scale == 1 else 60)) for data in whole(model, scale)]

    monkeypatch.setattr(checks, "_yield_datasets", short)
    model = MODELS[name](dim=2)
    done = set()
    for check in checks.yield_checks(model):
        check(model.clone())
        done.add(check.__name__)
    assert {"check_pickling", "check_bounded_memory_growth", "check_shuffle_features_no_impact"} <= done


def test_in_a_pipeline_it_is_evaluated_as_any_estimator():
    model = preprocessing.StandardScaler() | RiverRegressor(dim=2)
    found = evaluate.progressive_val_score(datasets.TrumpApproval().take(30), model, metrics.MAE(), delay=2)
    assert found.n if hasattr(found, "n") else found.get() > 0


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_goes_on_to_the_bit(again):
    data = list(datasets.Phishing().take(20))
    model = RiverClassifier(dim=2, feedback=False)
    for x, y in data[:10]:
        model.learn_one(x, y)
    other = again(model)
    for x, y in data[10:]:
        assert model.predict_proba_one(x) == other.predict_proba_one(x)
        model.learn_one(x, y)
        other.learn_one(x, y)


def test_a_bad_truth_changes_nothing():
    model = RiverRegressor(dim=2)
    model.learn_one({"a": 1.0}, 0.5)
    before = pickle.dumps(model)
    with pytest.raises(DataError, match="the target is nan, expected a finite number"):
        model.learn_one({"a": 2.0}, float("nan"))
    assert pickle.dumps(model) == before
    assert model._raw_memory_usage > 1000  # bytes of the parameters, at the least


def test_text_is_not_read_and_a_hasher_reads_it():
    """Two samples that differ in text alone have one answer, unless their text is hashed."""
    samples = [({"word": word, "size": 1.0}, float(word == "a")) for word in "abab"]
    for before, same in ((compose.Discard("nothing"), True), (preprocessing.OneHotEncoder(), False)):
        model = functools.reduce(lambda left, right: left | right, [before, RiverRegressor(dim=2)])
        for x, y in samples:
            model.learn_one(x, y)
        assert (model.predict_one({"word": "a", "size": 1.0}) == model.predict_one({"word": "b", "size": 1.0})) == same


def test_bad_options():
    with pytest.raises(ConfigError, match="classes is 1, expected at least 2"):
        RiverClassifier(classes=1)
