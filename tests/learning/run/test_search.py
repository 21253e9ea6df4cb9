"""The search for a learning rate: what it finds, and that it leaves nothing behind."""

import re

import numpy as np
import pytest
import torch

from scanl.cli import main
from scanl.errors import ConfigError
from scanl.layers import param_groups
from scanl.learning.run.config import TrainConfig
from scanl.learning.run.run import Run
from scanl.learning.run.search import HIGHEST, LOWEST, Search, judged, search

COVERS = ["cli/lr"]

TINY = {"data": ["adding"], "data_options": {"length": 6}, "layer": "s5", "dim": 8, "depth": 1, "accelerator": "cpu"}
TINY |= {"batch_size": 2}


def found(trials=20, **options):
    config = TrainConfig.of(**{**TINY, **options})
    run = Run(config)
    before = [parameter.clone() for parameter in run.model.parameters()]
    result = search(run, trials)
    for parameter, initial in zip(run.model.parameters(), before, strict=True):
        assert torch.equal(parameter, initial)
    return result


@pytest.fixture
def seen(monkeypatch):
    """The rates of the parameters at every step, by group."""
    steps = []
    own = Search.on_before_optimizer_step

    def watch(self, optimizer):
        own(self, optimizer)
        steps.append([group["lr"] for group in optimizer.param_groups])

    monkeypatch.setattr(Search, "on_before_optimizer_step", watch)
    return steps


def test_rates_rise_but_those_that_a_layer_names(seen, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    groups = param_groups(Run(TrainConfig.of(**TINY)).model)
    named = {group["lr"] for group in groups if "lr" in group}
    assert len(named) == 1
    result = found(21, accumulate=2)
    assert list(tmp_path.iterdir()) == []
    usual = [next(rate for rate in groups if rate not in named) for groups in seen]
    np.testing.assert_allclose(usual, result.rates, rtol=1e-6)
    ratios = np.array(result.rates[2:]) / result.rates[1:-1]
    np.testing.assert_allclose(ratios, (HIGHEST / LOWEST) ** (1 / 21), rtol=1e-6)
    assert (result.rates[0], result.rates[-1]) == (LOWEST, pytest.approx(HIGHEST))
    assert all(set(groups) - {rate} == named for groups, rate in zip(seen, usual, strict=True))


def test_the_seed_decides():
    assert found(seed=1) == found(seed=1)


def test_a_loss_that_is_not_finite_ends_the_search(monkeypatch):
    own = Search.training_step

    def broken(self, batch, number):
        batch[1].mul_(torch.nan if self.global_step == 12 else 1)
        return own(self, batch, number)

    monkeypatch.setattr(Search, "training_step", broken)
    result = found()
    assert len(result.rates) == len(result.losses) == len(result.means) == 12
    assert np.isfinite(result.losses).all()


def test_judged_by_hand():
    rates = [10.0**k for k in range(-4, 1)]
    valley = judged(rates, [4.0, 1.0, 2.0, 9.0, float("nan")])
    assert (valley.rates, valley.lowest, valley.suggestion) == (rates[:4], pytest.approx(1e-3), pytest.approx(1e-4))
    # The means of eleven losses, one on each side: the lowest loss alone is not the lowest mean.
    losses = [5.0, 5.0, 0.0, 5.0, 5.0, 2.0, 2.0, 2.0, 5.0, 5.0, 5.0]
    more = judged([10.0**k for k in range(-10, 1)], losses)
    assert more.means[:3] == [5.0, pytest.approx(10 / 3), pytest.approx(10 / 3)]
    assert more.lowest == pytest.approx(1e-4)
    assert judged(rates, [1.0, 2.0, 3.0, 4.0, 5.0]).suggestion is None


def test_the_command_prints_a_table_and_draws(tmp_path, capfd):
    options = "--data adding --data-options.length 6 --layer lru --dim 8 --depth 1 --accelerator cpu --batch-size 4"
    argv = ["lr", *options.split(), "--trials", "20", "--out", str(tmp_path / "run")]
    argv += ["--picture", str(tmp_path / "lr.png")]
    assert main(argv) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 1 + 20 + 1
    assert re.fullmatch(r"the loss (is lowest at .*: --lr [0-9.e-]+|never falls.*)", lines[-1])
    assert [path.name for path in tmp_path.iterdir()] == ["lr.png"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--trials 5", "lr: trials is 5, expected at least 20"),
        ("--devices 2", "lr: devices is 2, expected 1"),
        ("--picture a.jpg", "lr: picture is a.jpg, expected a file of .png"),
        ("--layer hwak", "unknown layer 'hwak'; did you mean 'hawk'?"),
        ("--trails 30", "unknown option of lr '--trails'; did you mean '--trials'?"),
    ],
)
def test_mistakes_are_one_line(options, message, capfd):
    assert main(["lr", "--data", "adding", "--accelerator", "cpu", "--dim", "8", "--depth", "1", *options.split()]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert message in err


def test_too_few_trials_in_python():
    with pytest.raises(ConfigError, match="trials is 19, expected at least 20"):
        found(trials=19)
