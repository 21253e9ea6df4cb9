"""A run makes the updates of its algorithm, keeps what outlives a sequence, and resumes in the middle of one."""

import csv
import itertools
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from scanl.cli import main
from scanl.errors import ConfigError
from scanl.learning import RunFolder, TrainConfig
from scanl.learning.algorithms import algorithms
from scanl.learning.questions import answerer
from scanl.learning.run.checkpoint import read_checkpoint
from scanl.learning.run.config import seeded_model
from scanl.learning.run.module import Learning
from scanl.learning.run.run import Run

pytestmark = [pytest.mark.usefixtures("short_sample"), pytest.mark.cells_by_loop]

TINY = "--accelerator cpu --dim 4 --depth 1 --channel-mixer none --batch-size 3 --eval-examples 2 --log-every 1".split()  # noqa: SIM905
CAPACITY = ["--data", "capacity", "--data-options.length", "20"]  # 50 steps; none of the first 20 has a target


def trained(folder, name, *options, data=CAPACITY):
    assert main(["train", *TINY, *data, "--algorithm", name, "--out", str(folder), *options]) == 0
    return RunFolder.open(folder).config()


def losses(folder):
    with (folder / "metrics.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def by_hand(config, block, batches):
    """Yield the loss of each update that has an answer, from a loop over the parts of the batches."""
    source = config.open_source()
    model = seeded_model(config, source.question)
    algorithm = algorithms.get(config.training.algorithm)(answerer(source.question).loss)
    for number in range(batches):
        batch = source.batch(number, 3).tensors()
        learner = algorithm.init(model, 3)
        for begin in range(0, 50, block):
            part = batch.steps(begin, begin + block, targets=True)
            loss, learner = algorithm.update(model, learner, part)
            if part.targets.isfinite().any():
                yield loss.item()


def test_a_batch_is_cut_into_updates_each_of_which_makes_a_step(tmp_path, capfd):
    """With a learning rate of nothing. An update without an answer makes no step, and its state is carried on."""
    config = trained(tmp_path / "run", "rtrl", "--layer", "elman", "--block", "15", "--steps", "7", "--lr", "1e-30")
    expected = list(by_hand(config, 15, 3))
    assert losses(tmp_path / "run") == pytest.approx(expected[:7], rel=1e-5)
    assert "rtrl: exact gradient, in updates of 15 steps; while the parameters are constant" in capfd.readouterr().err
    assert len(expected) == 9  # of 12 updates


def test_without_a_block_real_time_recurrent_learning_makes_a_step_after_every_step(tmp_path, capfd):
    config = trained(tmp_path / "run", "rtrl", "--layer", "elman", "--steps", "3", "--lr", "1e-30")
    expected = by_hand(config, 1, 1)
    assert losses(tmp_path / "run") == pytest.approx([next(expected) for _ in range(3)], rel=1e-5)
    assert "rtrl: exact gradient, in updates of 1 step;" in capfd.readouterr().err


@pytest.mark.parametrize(("name", "layer"), [("uoro", "elman"), ("fptt", "elman"), ("ccn", "columnar_constructive")])
def test_a_run_resumes_in_the_middle_of_a_sequence_with_the_same_bits(name, layer, tmp_path):
    options = ["--layer", layer, "--block", "8", "--steps", "7"]
    trained(tmp_path / "whole", name, *options)
    step = Learning.training_step

    def interrupted(self, batch, batch_idx):
        self.wishes["stop"] = self.wishes["stop"] or self.global_step == 2
        return step(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learning, "training_step", interrupted)
        command = ["train", *TINY, *CAPACITY, "--algorithm", name, "--out", str(tmp_path / "cut"), *options]
        assert main(command) == 130
    assert read_checkpoint(tmp_path / "cut" / "checkpoint.ckpt")["scanl"]["place"] == {"batch": 0, "step": 40}
    assert main(["train", "--resume", str(tmp_path / "cut")]) == 0
    expected, found = (load_file(tmp_path / each / "model.safetensors") for each in ("whole", "cut"))
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_the_least_squares_of_force_are_over_all_batches(tmp_path):
    """Against ridge regression on the features of all batches at once, from the first readout."""
    config = trained(tmp_path / "run", "force", "--layer", "elman", "--steps", "3")
    source = config.open_source()
    model = seeded_model(config, source.question).double()
    first, rows = torch.cat([model.head.weight, model.head.bias[:, None]], 1).detach(), []
    for number in range(3):
        batch = source.batch(number, 3).tensors()
        features = []
        hook = model.head.register_forward_pre_hook(lambda _, given, kept=features: kept.append(given[0].detach()))
        model(batch.inputs)
        hook.remove()
        known = batch.targets.isfinite().all(-1)
        ones = torch.ones(*known.shape, 1, dtype=torch.float64)
        rows.append((torch.cat([features[0], ones], -1)[known], batch.targets[known].double()))
    r, y = (torch.cat(parts) for parts in zip(*rows, strict=True))
    expected = first + torch.linalg.solve(r.T @ r + torch.eye(5).double(), r.T @ (y - r @ first.T)).T
    weights = load_file(tmp_path / "run" / "model.safetensors")
    torch.testing.assert_close(weights["head.weight"], expected[:, :4].float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights["head.bias"], expected[:, 4].float(), rtol=1e-4, atol=1e-5)


def test_the_stages_of_a_constructive_network_go_on_with_the_batches(tmp_path):
    """Of the 4 updates of a batch the last 3 have answers: the eighth, in which the second stage begins, is step 6."""
    options = ["--layer", "columnar_constructive", "--layer-options.columns", "2", "--algorithm-options.stage_updates"]
    grown = []
    for steps in ("5", "6"):
        trained(tmp_path / steps, "ccn", *options, "7", "--block", "15", "--steps", steps)
        grown.append(load_file(tmp_path / steps / "model.safetensors")["stack.blocks.0.mixer.grown"].tolist())
    assert grown == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_the_averages_of_forward_propagation_are_what_is_measured_and_kept(tmp_path):
    trained(tmp_path / "run", "fptt", "--layer", "elman", "--block", "10", "--steps", "4", "--lr", "0.1")
    weights = load_file(tmp_path / "run" / "model.safetensors")
    carried = read_checkpoint(tmp_path / "run" / "checkpoint.ckpt")["scanl"]["carried"]
    means = [leaf[0] for path, leaf in carried.items() if ".means." in path]
    named = [
        name for name, _ in seeded_model(RunFolder.open(tmp_path / "run").config(), _question()).named_parameters()
    ]
    assert all(torch.equal(weights[name], mean) for name, mean in zip(named, means, strict=True))
    assert not any(leaf.any() for path, leaf in carried.items() if ".slopes." in path)


def _question():
    return TrainConfig.of(data=["capacity"], data_options={"length": 20}).open_source().question


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "kfrtrl", "data": ["adding"], "layer": "elman"}, "expected one that answers at every step"),
        ({"algorithm": "diagonal_rtrl", "data": ["listops"], "layer": "lru"}, "batch.mask is given, expected none"),
        ({"algorithm": "gtf", "data": ["adding"], "layer": "elman"}, "expected a scanl.models.Dynamics"),
        ({"algorithm": "force", "data": ["adding"], "layer": "elman"}, "expected numbers"),
        ({"algorithm": "force", "data": ["capacity"], "layer": "elman", "devices": 2}, "devices is 2, expected 1"),
        ({"block": 0, "data": ["adding"], "layer": "elman"}, "block is 0, expected at least 1"),
    ],
)
def test_what_an_algorithm_cannot_learn_is_refused_before_the_run_begins(options, message):
    with pytest.raises(ConfigError, match=message):
        Run(TrainConfig.of(dim=4, depth=1, **options))


def test_each_part_of_a_sequence_with_one_answer_is_learnt_by_forward_propagation(tmp_path):
    """By a loop: the loss of part p of 2 is p/2 of the squared error there, and each makes a step."""
    data = ["--data", "adding", "--data-options.length", "6"]
    options = ["--layer", "elman", "--block", "3", "--steps", "4", "--lr", "1e-30"]
    config = trained(tmp_path / "run", "fptt", *options, data=data)
    source = config.open_source()
    model, expected = seeded_model(config, source.question), []
    for number in range(2):
        batch, state = source.batch(number, 3).tensors(), None
        for p in (1, 2):
            y, state = model(batch.inputs[:, 3 * p - 3 : 3 * p], state)
            expected.append(p / 2 * (y.flatten() - batch.targets.flatten()).square().mean().item())
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)


def test_each_batch_of_a_step_has_random_numbers_of_its_own():
    training = SimpleNamespace(accumulate=3)
    config, seeds = SimpleNamespace(training=training, run=SimpleNamespace(seed=1)), set()
    for step, read, rank in itertools.product(range(3), range(3), range(2)):
        place = SimpleNamespace(config=config, global_step=step, read=read, global_rank=rank)
        Learning.on_train_batch_start(place, None, 0)
        seeds.add(torch.initial_seed())
    assert len(seeds) == 18
