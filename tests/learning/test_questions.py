"""Questions, losses and scores: each is one file, and a new one is a new file. Parts of a batch keep their names."""

import importlib.util
import pkgutil
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from scanl.cli import main
from scanl.data import questions, sources
from scanl.data.base import IGNORED
from scanl.data.batch import Batch, Outcomes
from scanl.data.questions import FeatureInputs, ForecastQuestion, NextToken, Number, Numbers, Question, Vocabulary
from scanl.errors import ConfigError
from scanl.learning import losses as of_losses
from scanl.learning import questions as of_questions
from scanl.learning import scores as of_scores
from scanl.learning.losses import losses
from scanl.learning.questions import Answerer, answerer, answers
from scanl.learning.questions.base import registry
from scanl.learning.scores import scores
from scanl.models import SeriesColumns, Stack
from scanl.models.heads.distributions import HEADS

COVERS = [
    "data/batch",
    "data/questions",
    "learning/losses/*",
    "learning/questions/*",
    "learning/scores/*",
    "models/heads/labeler",
]

ROOM = Path(__file__).parents[2] / "src" / "scanl"

ABSOLUTE_ERROR = '''
"""Absolute error of numbers."""

from scanl.learning.losses import loss


@loss("absolute_error")
def absolute_error(outputs, targets):
    """Return the losses (n,) of numbers (n,)."""
    return (outputs - targets).abs()
'''

MASKED_TOKEN = '''
"""Masked tokens: some tokens of a row are hidden, and a model that reads both ways says which they were."""

from dataclasses import dataclass

import numpy as np

from scanl.data.base import IGNORED, register
from scanl.data.batch import Batch
from scanl.data.fresh import FreshRows
from scanl.data.questions import Question, Vocabulary
from scanl.learning.questions import Answerer, Answers, answers
from scanl.learning.questions.base import form
from scanl.models import SequenceLabeler


@dataclass(frozen=True)
class MaskedToken(Question):
    """The hidden tokens. targets: (N, T) integers, IGNORED at steps that are not hidden."""

    inputs: Vocabulary
    loss: str = "cross_entropy"
    scores: tuple[str, ...] = ("accuracy",)


@answers(MaskedToken)
class MaskedTokenAnswerer(Answerer[MaskedToken]):
    """A labeler of each step; the last token of the vocabulary hides another."""

    every_step = True

    def head(self, stack, options):
        return SequenceLabeler(self.question.inputs.size - 1, stack, form(self.question.inputs))

    def answers(self, model, batch, state=None):
        logits, state = model(batch.inputs, state)
        hidden = batch.targets != IGNORED
        return Answers(logits[hidden], batch.targets[hidden], state)


@register("masked")
@dataclass
class Masked(FreshRows):
    """Rows of one token, a third of which are hidden. Args: see `FreshRows`."""

    question = MaskedToken(Vocabulary(5))
    metric = "accuracy"
    length = 9

    def generate(self, count, random, *, training):
        tokens = np.repeat(random.integers(0, 4, (count, 1)), self.length, 1)
        hidden = random.random(tokens.shape) < 1 / 3
        return Batch(np.where(hidden, 4, tokens), np.where(hidden, tokens, IGNORED))
'''


def written(tmp_path, name, text):
    """Write a file and import it as a module."""
    path = tmp_path / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def absolute_error(tmp_path):
    yield written(tmp_path, "absolute_error", ABSOLUTE_ERROR)
    losses.remove("absolute_error")


@pytest.fixture
def masked_token(tmp_path):
    module = written(tmp_path, "masked_token", MASKED_TOKEN)
    yield module
    registry.pop(module.MaskedToken)
    sources.remove("masked")


def stepped(method, model, batch):
    """The loss of a batch before a step of the optimiser, and after it."""
    optimiser = torch.optim.SGD(model.parameters(), 0.01)
    before, _ = method.loss(model, batch)
    before.backward()
    optimiser.step()
    return before.item(), method.loss(model, batch)[0].item()


def test_a_new_loss_is_one_new_file(absolute_error):
    torch.manual_seed(0)
    method = answerer(Numbers(FeatureInputs(3), 2, loss="absolute_error"))
    model = method.model(Stack(8, 1, "lru"))
    targets = torch.randn(2, 5, 2)
    targets[0, 3] = torch.nan
    batch = Batch(torch.randn(2, 5, 3), targets)
    known = ~targets.isnan()
    expected = (model(batch.inputs)[0] - targets)[known].abs().sum().item() / 18
    before, after = stepped(method, model, batch)
    assert before == pytest.approx(expected, rel=1e-6)
    assert after < before


def test_a_new_loss_of_a_distribution_is_one_new_class(monkeypatch):
    class Absolute(HEADS["points"]):
        """One number, learnt by its absolute error."""

        degree = 1

        def loss(self, parameters, y):
            return (parameters[..., 0] - y).abs()

    monkeypatch.setitem(HEADS, "absolute", Absolute)
    torch.manual_seed(0)
    method = answerer(ForecastQuestion(2, distribution="absolute"))
    model = method.model(Stack(8, 1, "lru"))
    columns = SeriesColumns(torch.randn(2, 5, 1), torch.zeros(2, 5, 0), torch.zeros(2, 0), torch.zeros(2, 7, 0))
    before, after = stepped(method, model, Batch(columns, torch.randn(2, 5, 2, 1)))
    assert after < before


def test_a_new_question_is_one_new_file(masked_token, tmp_path, capfd):
    """Trained, measured, and loaded again by the command line."""
    folder = tmp_path / "run"
    command = "train --data masked --accelerator cpu --layer bidirectional --dim 8 --depth 1 --steps 1".split()  # noqa: SIM905
    options = ["--layer-options", "{layer: lru}"]
    assert main([*command, *options, "--out", str(folder)]) == 0
    assert capfd.readouterr().out.startswith("accuracy on 512 new rows of masked:\n  this model  ")
    batch = sources.get("masked").open({"seed": 0, "eval_examples": 8, "data_options": {}}).batch(0, 4).tensors()
    method = answerer(masked_token.MaskedToken(Vocabulary(5)))
    torch.manual_seed(0)
    model = method.model(Stack(8, 1, "bidirectional", layer_options={"layer": "lru"}))
    before, after = stepped(method, model, batch)
    logits = model.eval()(batch.inputs)[0]
    expected = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
    assert after == pytest.approx(expected.item(), rel=1e-6)
    assert after < before


def test_every_file_of_a_folder_is_found():
    """Each module of the three folders is imported with its folder; each question has a file."""
    for folder in (of_questions, of_losses, of_scores):
        for module in pkgutil.iter_modules(folder.__path__):
            assert f"{folder.__name__}.{module.name}" in sys.modules
    classes = {cls for cls in vars(questions).values() if isinstance(cls, type) and issubclass(cls, Question)}
    assert set(registry) == classes - {Question}
    for question, cls in registry.items():
        defaults = {field.name: field.default for field in question.__dataclass_fields__.values()}
        assert set(defaults["scores"]) <= set(scores.names())
        assert "loss" not in defaults or defaults["loss"] in losses.names()
        assert cls.__module__.startswith("scanl.learning.questions.")


def test_no_code_asks_what_kind_a_model_or_a_question_is():
    asks = re.compile(r"isinstance\(\s*(self\.)?model\b|\bkind\s*(==|!=)|(?<!for )\bkind in [(\[\"']")
    files = [*(ROOM / "learning").rglob("*.py"), *(ROOM / "data").rglob("*.py")]
    found = {
        f"{path.name}:{number}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if asks.search(line)
    }
    assert not found


def test_what_is_unknown_or_known_twice_is_refused():
    @dataclass(frozen=True)
    class Riddle(Question):
        inputs: Vocabulary

    def mine(outputs, targets):
        return outputs

    known = "Class, Flags, ForecastQuestion, Label"
    with pytest.raises(ConfigError, match=f"unknown question 'Riddle', expected one of {known}"):
        answerer(Riddle(Vocabulary(3)))
    with pytest.raises(ConfigError, match="question NextToken is registered twice: NextTokenAnswerer and Answerer"):
        answers(NextToken)(Answerer)
    with pytest.raises(ConfigError, match="loss 'cross_entropy' is registered twice: cross_entropy and mine"):
        losses.add("cross_entropy")(mine)
    method = answerer(Numbers(FeatureInputs(1), 1, loss="squared_eror"))
    with pytest.raises(ConfigError, match=r"unknown loss 'squared_eror'; did you mean 'squared_error'\?"):
        method.loss(method.model(Stack(8, 1, "lru")), Batch(torch.zeros(1, 2, 1), torch.zeros(1, 2, 1)))
    with pytest.raises(ConfigError, match=r"unknown score 'CRP'; did you mean 'CRPS'\?"):
        answerer(ForecastQuestion(1, scores=("CRP",))).scores(
            torch.zeros(1, 1, 1, 11), Outcomes(*torch.zeros(2, 1, 1, 1))
        )


def test_a_number_of_rows_that_end_early_is_learnt_without_their_padding():
    """The loss is the mean of those of the rows alone, and every gradient is finite."""
    torch.manual_seed(0)
    method = answerer(Number(FeatureInputs(2)))
    model = method.model(Stack(8, 1, "lru"))
    inputs, targets = torch.randn(2, 6, 2), torch.tensor([1.0, -2.0])
    inputs[0, 4:] = torch.nan
    mask = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    loss, _ = method.loss(model, Batch(inputs, targets, mask))
    alone = [model.loss(inputs[i : i + 1, mask[i]], targets[i : i + 1, None])[0] for i in range(2)]
    torch.testing.assert_close(loss, (alone[0] + alone[1]) / 2)
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_steps_of_a_batch_reach_as_far_ahead_as_the_whole():
    """T = 5 steps, H = 3 ahead; static covariates and answers after the last step are not cut."""
    columns = SeriesColumns(
        *(np.arange(np.prod(shape)).reshape(shape) for shape in ((2, 5, 1), (2, 5, 2), (2, 1), (2, 8, 1))),
        np.arange(16.0).reshape(2, 8),
    )
    batch = Batch(columns, np.zeros((2, 3, 1)), np.ones((2, 5), bool))
    assert (batch.size, batch.length) == (2, 5)
    part = batch.steps(2, 4, targets=False)
    assert [each.shape for each in part.inputs] == [(2, 2, 1), (2, 2, 2), (2, 1), (2, 5, 1), (2, 5)]
    assert part.inputs.timespans[0].tolist() == [2, 3, 4, 5, 6]
    assert (part.mask.shape, part.targets.shape) == ((2, 2), (2, 3, 1))
    assert batch.steps(4, 9, targets=False).inputs.timespans[0].tolist() == [4, 5, 6, 7]
    tokens = Batch(np.arange(10, dtype=np.int16).reshape(2, 5), np.arange(10).reshape(2, 5), np.ones((2, 5), bool))
    read = tokens.steps(1, 3, targets=True).tensors()
    assert (read.inputs.tolist(), read.targets.tolist()) == ([[1, 2], [6, 7]], [[1, 2], [6, 7]])
    assert (read.inputs.dtype, read.mask.dtype, read.timespans) == (torch.int64, torch.bool, None)
    assert tokens.rows(slice(1, 2)).inputs.tolist() == [[5, 6, 7, 8, 9]]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("gradual", [False, True])
def test_parts_of_a_batch_have_each_answer_of_a_row_where_the_row_ends(size, gradual):
    """Rows of 5, 2 and 0 steps, by a loop over them; the last one, without a step, is answered in the first part."""
    lengths, x = (5, 2, 0), torch.randn(3, 5, 2)
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    parts = list(Batch(x, torch.arange(3), mask).parts(size, gradual=gradual))
    assert torch.equal(torch.cat([part.inputs for part in parts], 1), x)
    assert torch.equal(torch.cat([part.mask for part in parts], 1), mask)
    for number, part in enumerate(parts):
        begin, end = number * size, min(number * size + size, 5)
        for row, length in enumerate(lengths):
            share = min(end, length) / length if length else 1.0
            here = begin < length or (length == 0 and begin == 0)
            expected = (share if gradual else float(share == 1)) if here else 0.0
            assert part.weights[row].item() == pytest.approx(expected)
    whole = list(Batch(x, torch.zeros(3, 5), mask).parts(2))
    assert [part.targets.shape[1] for part in whole] == [2, 2, 1]
    assert whole[0].weights is None


@pytest.mark.parametrize("question", [questions.Class(FeatureInputs(2), classes=3), Number(FeatureInputs(2))])
def test_the_loss_of_parts_counts_each_answer_once(question):
    task = answerer(question)
    torch.manual_seed(0)
    model = task.model(Stack(4, 1, "gru")).double()
    targets = torch.tensor([1, 2, 0])
    mask = torch.arange(5) < torch.tensor([5, 2, 4])[:, None]
    batch = Batch(
        torch.randn(3, 5, 2).double(), targets if isinstance(question, questions.Class) else targets.double(), mask
    )
    expected, _ = task.loss(model, batch)
    total, state = torch.zeros((), dtype=torch.float64), None
    for part in batch.parts(2):
        loss, state = task.loss(model, part, state)
        total = total + loss * (part.weights > 0).sum() / 3
    torch.testing.assert_close(total, expected)
