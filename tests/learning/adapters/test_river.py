"""The estimators of river: river's own checks, and what those do not look at."""

import copy
import functools
import math
import pickle
from itertools import islice

import numpy as np
import pytest
import torch

pytest.importorskip("river", reason="river is not installed: pip install 'scanl[online]'")

from river import checks, compose, datasets, evaluate, metrics, preprocessing

from scanl.errors import ConfigError, DataError
from scanl.learning.adapters.river import RiverClassifier, RiverRegressor
from scanl.learning.online import AnswerNumbers, Online
from scanl.models import Stack

MODELS = {"regressor": RiverRegressor, "classifier": RiverClassifier}


@pytest.mark.parametrize("name", MODELS)
def test_the_checks_of_river_pass(name, monkeypatch):
    """All of them, on the first 6 samples of each data set, or 40 where growth is looked for, of 200 and 2,000."""
    whole = checks._yield_datasets

    def short(model, scale=1):
        return [list(islice(iter(data), 6 if scale == 1 else 40)) for data in whole(model, scale)]

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


def test_the_seed_is_that_of_the_weights():
    models = [RiverRegressor(dim=2, seed=seed) for seed in (0, 1)]
    for model, seed in zip(models, (0, 1), strict=True):
        model.learn_one({"a": 1.0}, 0.5)
        model.learn_one({"a": 2.0}, 0.7)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            alone = Online(Stack(2, 1, "lru"), AnswerNumbers(1, model.span, True), span=model.span).begin(16)
        for value, truth in ((1.0, 0.5), (2.0, 0.7)):
            alone.answer([value, *[math.nan] * 15])
            alone.learn(truth)
        assert model.predict_one({"a": 3.0}) == alone.peek([3.0, *[math.nan] * 15])
    assert models[0].predict_one({"a": 3.0}) != models[1].predict_one({"a": 3.0})


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


def learnt(model, samples):
    answers = []
    for x, y in samples:
        answers.append(model.predict_one(x))
        model.learn_one(x, y)
    return answers


def test_features_appear_vanish_and_are_missing_at_any_sample():
    """A sample of no features may be the first. A feature that appears late tells the truth from then on."""
    draw = np.random.default_rng(0)
    values = draw.normal(size=300)
    early = [({}, 0.0), ({"a": None}, 0.0), ({"a": 1.0}, 0.0), ({"b": math.nan, "a": "text"}, 0.0)]
    model = RiverRegressor(dim=8, lr=0.02, feedback=False)
    learnt(model, early)
    assert model._online._names == ["a"]
    answers = learnt(model, [({"c": value}, value) for value in values])
    assert model._online._names == ["a", "c"]
    assert np.abs(answers - values)[-50:].mean() < 0.4 * np.abs(values[-50:]).mean()
    assert math.isfinite(model.predict_one({"d": 1.0}))


def test_a_feature_that_is_absent_is_a_missing_number():
    first = [({"a": 1.0, "b": 2.0}, 1.0), ({"a": 2.0, "b": 1.0}, 2.0)]
    one, two = RiverRegressor(dim=2), RiverRegressor(dim=2)
    learnt(one, [*first, ({"b": 1.0}, 1.0), ({}, 2.0)])
    learnt(two, [*first, ({"a": None, "b": 1.0}, 1.0), ({"a": math.nan, "b": None}, 2.0)])
    assert one.predict_one({"a": 1.0}) == two.predict_one({"a": 1.0, "b": math.nan})


def test_a_feature_that_finds_no_place_is_a_warning():
    model = RiverClassifier(dim=2, features=2)
    with pytest.warns(UserWarning, match="feature 'c' is not read because all 2 places are taken") as said:
        learnt(model, [({"a": 1.0}, "x"), ({"b": 1.0, "c": 2.0}, "y"), ({"d": 1.0}, "x")])
    assert len(said) == 1
    assert copy.deepcopy(model).predict_proba_one({"a": 1.0, "c": 5.0}) == model.predict_proba_one({"a": 1.0})


def test_an_infinite_feature_changes_nothing():
    model = RiverRegressor(dim=2)
    model.learn_one({"a": 1.0}, 0.5)
    before = pickle.dumps(model)
    with pytest.raises(DataError, match="feature 'b' is inf, expected a finite number"):
        model.learn_one({"a": 2.0, "b": math.inf}, 1.0)
    assert pickle.dumps(model) == before


def test_bad_options():
    with pytest.raises(ConfigError, match="features is 0, expected at least 1, or None"):
        RiverRegressor(features=0)
    with pytest.raises(ConfigError, match="classes is 1, expected at least 2"):
        RiverClassifier(classes=1)
