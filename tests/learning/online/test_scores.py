"""Scores of a stream: river's over all and over a window, the fading one, and the detectors."""

import io

import numpy as np
import pytest
import torch

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


def test_scores_go_on_from_their_numbers():
    kind = AnswerClass(2, False)
    first = scored(kind, ["Accuracy", "MacroF1"], list("ab") * 8, [{"a": 0.6, "b": 0.4}] * 16, detector="kswin")
    second = Scores(kind, ["Accuracy", "MacroF1"], 5, 0.9, "kswin")
    second.load_state_dict(first.state_dict())
    for scores in (first, second):
        scores.update("b", {"a": 1.0}, None, 1.0)
    assert first.get() == second.get()


def answered(kind, scores, count, draw):
    """Let scores read drawn answers."""
    for _ in range(count):
        yes, level = bool(draw.random() < 0.5), draw.random()
        if isinstance(kind, AnswerClass):
            scores.update(yes, {True: level, False: 1 - level}, {yes: 1.0}, 1.0 - level)
        else:
            scores.update(np.array([3 * level]), draw.random(), level, level)


@pytest.mark.parametrize("name", [name for name in metrics.__all__ if name not in ("base", "multioutput")])
def test_each_metric_of_river_goes_on_to_the_bit_from_plain_numbers(name):
    """Through a file that holds no objects."""
    for kind in (AnswerClass(2, False), AnswerNumbers(1, 100, False)):
        try:
            first, second = (Scores(kind, [name], 7, 0.9) for _ in range(2))
            answered(kind, first, 20, np.random.default_rng(0))
            first.get()
        except (ConfigError, TypeError, ValueError, AttributeError, NotImplementedError):
            continue  # a metric of the other kind of answers, or one that river does not roll
        second.load_state_dict(through_a_file(first.state_dict()))
        for scores in (first, second):
            answered(kind, scores, 20, np.random.default_rng(1))
        assert repr((first.get(), first.state_dict())) == repr((second.get(), second.state_dict()))


@pytest.mark.parametrize("detector", ["adwin", "kswin"])
def test_a_detector_goes_on_to_the_bit_beyond_its_next_drift(detector):
    kind, drifts = AnswerNumbers(1, 100, False), []
    first, second = (Scores(kind, ["MAE"], 7, 0.9, detector) for _ in range(2))
    answered(kind, first, 110, np.random.default_rng(0))
    second.load_state_dict(through_a_file(first.state_dict()))
    for scores in (first, second):
        draw = np.random.default_rng(1)
        drifts.append([])
        for t in range(250):
            scores.update(np.array([1.0]), 0.0, None, draw.random() + 9 * (t > 20))
            drifts[-1] += [t] * scores.drift
    assert drifts[0] == drifts[1] != []
    assert repr(first.state_dict()) == repr(second.state_dict())


def through_a_file(state):
    torch.save(state, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


class Runs:
    def __reduce__(self):
        return print, ("it ran",)


@pytest.mark.parametrize("value", [Runs(), Runs, print, [Runs()], {"n": 1}, "text", b"cos\nsystem\n", [["x", 1]]])
@pytest.mark.parametrize("where", ["metrics", "windows", "fading", "drift"])
def test_what_is_no_number_makes_no_scores(where, value, capfd):
    kind = AnswerNumbers(1, 100, False)
    state = scored(kind, ["MAE"], [1.0, 2.0], [0.0, 0.0], detector="adwin").state_dict()
    first = 1 if where == "drift" else [value, *list(state[where])[1:]]
    for damaged in ({**state, where: value}, {**state, where: first}):
        with pytest.raises(CheckpointError, match="the scores of the checkpoint cannot be read"):
            Scores(kind, ["MAE"], 5, 0.9, "adwin").load_state_dict(damaged)
    assert "it ran" not in capfd.readouterr().out


def test_the_numbers_of_a_detector_fit_each_other():
    """River's compiled part finds an index beyond its buckets only when it reads an error, and a size by an abort."""
    kind = AnswerNumbers(1, 100, False)
    state = scored(kind, ["MAE"], np.arange(90.0), np.zeros(90), detector="adwin").state_dict()
    helper = state["metrics"][3]["_helper"]
    refused = 0
    for at in range(0, len(helper), 4):
        state["metrics"][3]["_helper"] = [*helper[:at], 255 - helper[at], *helper[at + 1 :]]
        scores = Scores(kind, ["MAE"], 5, 0.9, "adwin")
        try:
            scores.load_state_dict(state)
        except CheckpointError:
            refused += 1
        else:
            for error in np.linspace(0, 1, 70):
                scores.detector.update(error)
    assert refused > 10


@pytest.mark.parametrize(("name", "message"), [("MAEE", "did you mean 'MAE'"), ("FBeta", "needs arguments")])
def test_bad_metrics(name, message):
    with pytest.raises(ConfigError, match=message):
        Scores(AnswerNumbers(1, 100, False), [name], 5, 0.9)


def test_fading_is_0_before_any_answer():
    assert Fading(metrics.MAE, 0.9).get() == 0
