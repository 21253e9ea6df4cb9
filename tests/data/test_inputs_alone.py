"""Self-pretraining: targets are inputs, beside plain loops, and the command that trains on them first."""

import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from scanl.cli import main
from scanl.data.base import IGNORED
from scanl.data.batch import Batch
from scanl.data.inputs_alone import InputSource
from scanl.data.questions import Class, FeatureInputs, Label, NextToken, Number, Numbers, TokenLabel, Vocabulary
from scanl.errors import ConfigError

pytestmark = pytest.mark.usefixtures("empty_picture")


class Given:
    """A source of one batch."""

    name = "given"

    def __init__(self, question, *parts):
        self.question, self.one = question, Batch(*parts)

    def batch(self, step, size, rank=0, world=1):
        return self.one


MASK = np.array([[True] * 5, [True, True, True, False, False]])
TOKENS = np.array([[3, 1, 4, 1, 5], [2, 6, 5, 0, 0]])


def test_causal_layers_predict_the_next_input():
    source = InputSource(Given(Class(Vocabulary(7), 2), TOKENS, np.zeros(2), MASK), False, 0)
    assert (source.question, source.metric) == (Label(Vocabulary(7), 7), "accuracy")
    batch, N = source.batch(0, 2), IGNORED
    assert batch.targets.tolist() == [[1, 4, 1, 5, N], [6, 5, N, N, N]]
    assert batch.inputs.tolist() == TOKENS.tolist()
    asked = InputSource(Given(TokenLabel(Vocabulary(7)), TOKENS, TOKENS), False, 0).question
    assert asked == NextToken(Vocabulary(7))
    features = np.stack([TOKENS, TOKENS**2], -1).astype(np.float64)
    question = Number(FeatureInputs(2, scales=((1.0, 2.0), (-3.0, 4.0))))
    source = InputSource(Given(question, features, np.zeros(2), MASK), False, 0)
    assert source.question == Numbers(question.inputs, 2)
    targets = source.batch(0, 2).targets
    for row, t in np.ndindex(2, 5):
        known = t < 4 and MASK[row, t + 1]
        token = TOKENS[row, t + 1] if known else math.nan
        np.testing.assert_allclose(targets[row, t], [(token - 1) / 2, (token**2 + 3) / 4], rtol=1e-6)


@pytest.mark.parametrize("missing", [False, True])
def test_layers_of_both_directions_predict_what_is_hidden(missing):
    inputs = np.random.default_rng(0).normal(size=(40, 50, 1))
    mask = np.arange(50) < np.arange(11, 51)[:, None]
    question = Number(FeatureInputs(1, scales=((0.5, 2.0),), missing=missing))
    source = InputSource(Given(question, inputs, np.zeros(40), mask), True, 3)
    batch = source.batch(7, 40)
    hidden = ~np.isnan(batch.targets[..., 0])
    assert not hidden[~mask].any()
    assert abs(hidden.sum() / mask.sum() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / mask.sum())
    np.testing.assert_allclose(batch.targets[hidden], (inputs[hidden] - 0.5) / 2, rtol=1e-6)
    assert np.array_equal(batch.inputs[~hidden], inputs[~hidden])
    assert (np.isnan(batch.inputs[hidden]) if missing else batch.inputs[hidden] == 0.5).all()
    again, other = source.batch(7, 40), source.batch(8, 40)
    assert np.array_equal(again.inputs, batch.inputs, equal_nan=True)
    assert not np.array_equal(other.inputs, batch.inputs, equal_nan=True)
    tokens = InputSource(Given(Class(Vocabulary(7), 2), TOKENS, np.zeros(2), MASK), True, 0).batch(0, 2)
    shown = tokens.targets == IGNORED
    assert (tokens.inputs[shown] == TOKENS[shown]).all()
    assert (tokens.targets[~shown] == TOKENS[~shown]).all()
    assert not shown.all()


def test_what_is_asked_already_is_refused():
    with pytest.raises(ConfigError, match="expected False because given asks for its inputs already"):
        InputSource(Given(NextToken(Vocabulary(7)), TOKENS, TOKENS), False, 0)


@pytest.mark.parametrize("layer", ["lru", "bidirectional"])
def test_one_command_learns_the_inputs_first_and_can_be_resumed_in_either_part(layer, tmp_path, capfd):
    run, first = tmp_path / "run", tmp_path / "run" / "pretraining"
    options = f"--data adding --layer {layer} --dim 4 --depth 1 --batch-size 2 --sequence-length 9 --accelerator cpu"
    options = [*options.replace("--sequence-length 9", "--data-options.length 9").split(), "--eval-examples", "4"]
    assert main(["train", *options, "--steps", "1", "--pretrain", "12", "--out", str(run)]) == 0
    learnt, after = load_file(first / "model.safetensors"), load_file(run / "model.safetensors")
    # The second part starts from the weights of the first one, and its one step of Adam is at most 0.003 long.
    assert all(torch.allclose(after[name], learnt[name], atol=4e-3) for name in after if not name.startswith("head."))
    assert main(["train", *options, "--steps", "1", "--out", str(tmp_path / "alone")]) == 0
    alone = load_file(tmp_path / "alone" / "model.safetensors")
    assert not all(torch.allclose(alone[n], learnt[n], atol=4e-3) for n in alone if not n.startswith("head."))
    capfd.readouterr()
    for ended in (["checkpoint.ckpt", "model.safetensors", "metrics.csv"], ["pretraining/model.safetensors"], None):
        (run / "checkpoint.ckpt").unlink(missing_ok=True)
        (run / "model.safetensors").unlink(missing_ok=True)
        (run / "metrics.csv").unlink(missing_ok=True)
        if ended is None:
            shutil.rmtree(first)
        else:
            for name in ended:
                (run / name).unlink(missing_ok=True)
        assert main(["train", "--resume", str(run)]) == 0
        for name, value in load_file(run / "model.safetensors").items():
            assert torch.equal(value, after[name]), name


def test_options_that_do_not_fit_are_refused(tmp_path, capfd):
    (tmp_path / "config.yaml").write_text("", encoding="utf-8")
    cases = {"init": ["--init", str(tmp_path)], "inputs_alone": ["--inputs-alone", "true"]}
    for name, more in cases.items():
        assert main(["train", "--data", "adding", "--pretrain", "3", "--out", str(tmp_path / "run"), *more]) == 2
        assert f"pretrain is 3, expected none because {name} is given" in capfd.readouterr().err
