"""Scores of a stream: river's over all and over a window, the fading one, and the detectors."""

import pickle

import numpy as np
import pytest

pytest.importorskip("river", reason="river is not installed: pip install 'scanl[online]'")

from river import metrics

from scanl.errors import CheckpointError, ConfigError
from scanl.learning.online import AnswerClass, AnswerNumbers, Scores
from scanl.learning.online.scores import Fading


def scored(kind, names, truths, answers, **options):
    scores = Scores(kind, names, 5, 0.9, **options)
    for truth, answer in zip(truths, answers, strict=True):
        wanted = kind.read(truth)
        scores.update(wanted, answer, None, kind.error(wanted, answer))
    return scores


def test_numbers_by_hand():
    draw = np.random.default_rng(0)
    truths, answers = draw.normal(size=30).tolist(), draw.normal(size=30).tolist()
    row = scored(AnswerNumbers(1, 100, False), ["MAE", "RMSE"], truths, answers).get()
    errors = np.abs(np.subtract(truths, answers))
    weights = 0.9 ** np.arange(29, -1, -1)
    assert row["MAE"] == pytest.approx(errors.mean())
    assert row["MAE window"] == pytest.approx(errors[-5:].mean())
    assert row["MAE fading"] == pytest.approx((weights * errors).sum() / weights.sum())
    assert row["RMSE window"] == pytest.approx(np.sqrt((errors[-5:] ** 2).mean()))


def test_classes_by_hand():
    truths, answers = list("abba"), [{"a": 0.7, "b": 0.3}] * 4
    row = scored(AnswerClass(2, False), ["Accuracy"], truths, answers).get()
    assert row["Accuracy"] == 0.5
    assert row["Accuracy fading"] == pytest.approx((1 + 0.9**3) / (1 + 0.9 + 0.81 + 0.729))


def test_probabilities_reach_the_metrics_that_read_them():
    row = scored(AnswerClass(2, False), ["CrossEntropy"], ["a", "b"], [{"a": 0.5, "b": 0.5}] * 2).get()
    assert row["CrossEntropy"] == pytest.approx(np.log(2))


def test_the_naive_answer_is_scored_beside():
    kind = AnswerNumbers(1, 100, False)
    scores = Scores(kind, ["MAE"], 5, 0.9)
    scores.update(kind.read(3.0), 1.0, 2.5, 2.0)
    assert (scores.get()["MAE"], scores.get()["MAE naive"]) == (2.0, 0.5)


def test_a_drift_is_found():
    kind = AnswerNumbers(1, 100, False)
    scores, found = Scores(kind, ["MAE"], 5, 0.9, "adwin"), []
    for t in range(600):
        error = 0.1 if t < 300 else 2.0
        scores.update(kind.read(error), 0.0, None, error)
        if scores.drift:
            found.append(t)
    assert found
    assert 300 <= found[0] < 350


def test_scores_go_on_from_their_bytes():
    kind = AnswerClass(2, False)
    first = scored(kind, ["Accuracy", "MacroF1"], list("ab") * 8, [{"a": 0.6, "b": 0.4}] * 16, detector="kswin")
    second = Scores(kind, ["Accuracy", "MacroF1"], 5, 0.9, "kswin")
    second.loads(first.dumps())
    for scores in (first, second):
        scores.update("b", {"a": 1.0}, None, 1.0)
    assert first.get() == second.get()


def test_bytes_make_nothing_but_scores():
    scores = Scores(AnswerClass(2, False), ["Accuracy"], 5, 0.9)
    with pytest.raises(CheckpointError, match="no part of the scores"):
        scores.loads(pickle.dumps((print,)))


@pytest.mark.parametrize(("name", "message"), [("MAEE", "did you mean 'MAE'"), ("FBeta", "needs arguments")])
def test_bad_metrics(name, message):
    with pytest.raises(ConfigError, match=message):
        Scores(AnswerNumbers(1, 100, False), [name], 5, 0.9)


def test_fading_is_0_before_any_answer():
    assert Fading(metrics.MAE, 0.9).get() == 0
