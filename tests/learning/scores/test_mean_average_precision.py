"""Mean average precision, beside scikit-learn's."""

import math

import pytest
import torch
from sklearn.metrics import average_precision_score

from scanl.data.batch import Batch
from scanl.data.questions import FeatureInputs, Flags
from scanl.learning.questions import answerer
from scanl.learning.questions.base import means
from scanl.models import Stack


def test_parts_of_steps_make_the_score_of_all_and_equal_logits_are_one():
    torch.manual_seed(0)
    outputs = torch.randint(-3, 4, (40, 5)).float()  # many are equal
    targets = (torch.rand(40, 5) < 0.3).float()
    targets[:, 3] = 0  # no yes: it has no average precision
    targets[::7, 1] = math.nan
    method = answerer(Flags(FeatureInputs(2), 5, scores=("nats", "mAP")))
    found = means(method.scores(outputs[rows], targets[rows]) for rows in (slice(9), slice(9, 10), slice(10, None)))
    known = targets.isfinite()
    of_each = [average_precision_score(targets[known[:, c], c], outputs[known[:, c], c]) for c in (0, 1, 2, 4)]
    assert found["mAP"] == pytest.approx(sum(of_each) / 4, rel=1e-12)
    assert math.isnan(means([method.scores(outputs, torch.zeros(40, 5))])["mAP"])
    nats = torch.nn.functional.binary_cross_entropy_with_logits(outputs[known].double(), targets[known].double())
    assert found["nats"] == pytest.approx(5 * nats.item(), rel=1e-12)


def test_a_labelers_answers_keep_their_questions():
    """A step of which one answer is known counts, and its unknown ones do not."""
    torch.manual_seed(0)
    method = answerer(Flags(FeatureInputs(2), 3, scores=("mAP", "bit error")))
    model = method.model(Stack(8, 1, "lru"))
    targets = torch.full((1, 4, 3), math.nan)
    targets[0, 1] = torch.tensor([1.0, 0.0, 1.0])
    targets[0, 2, 1] = 1.0
    batch = Batch(torch.randn(1, 4, 2), targets)
    outputs, kept, _ = method.answers(model, batch)
    logits = model(batch.inputs)[0][0]
    torch.testing.assert_close(outputs, logits[1:3])
    wrong = [(logits[1, 0] <= 0), (logits[1, 1] > 0), (logits[1, 2] <= 0), (logits[2, 1] <= 0)]
    assert method.scores(outputs, kept)["bit error"] == (sum(map(int, wrong)), 4)
    assert means([method.scores(outputs, kept)])["mAP"] == (2 + (1.0 if logits[2, 1] > logits[1, 1] else 0.5)) / 3
