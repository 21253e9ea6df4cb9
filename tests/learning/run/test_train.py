"""Training: the same numbers however a run was cut, killed or shared; refusals; what is left behind."""

import csv
import math
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from forked import begun
from scanl.cli import main
from scanl.cli.train import parse
from scanl.data import ContiguousStreams, Text, read_corpus
from scanl.errors import CheckpointError, ConfigError
from scanl.files import written_whole
from scanl.learning import RunFolder, TrainConfig, bits_per_byte
from scanl.learning.optimizers import OPTIMIZERS
from scanl.learning.run import config as config_module
from scanl.learning.run import folder as folder_module
from scanl.learning.run.checkpoint import read_checkpoint
from scanl.learning.run.config import (
    SourceConfig,
    StackConfig,
    TrainingConfig,
    build_model,
    fitting_precision,
    seeded_model,
)
from scanl.learning.run.metrics import read_metrics
from scanl.learning.run.module import Learning
from scanl.learning.run.plan import UNKNOWN_PLAN, RunLength, rate
from scanl.learning.run.run import Run
from scanl.models import LanguageModel

COVERS = [
    "cli/evaluate", "cli/train", "files", "learning/run/config", "learning/run/configuration", "learning/run/metrics",
    "learning/run/plan", "learning/run/run", "learning/run/trainer",
]  # fmt: skip

pytestmark = pytest.mark.usefixtures("short_sample")

STEPS = 24
TINY = "--accelerator cpu --dim 16 --depth 2 --sequence-length 16 --eval-bytes 64 --log-every 1".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(np.random.default_rng(0).integers(97, 105, 3000).astype(np.uint8).tobytes())
    return path


def options(text: Path, out: Path, steps: int = STEPS) -> list[str]:
    return [*TINY, "--data", str(text), "--out", str(out), "--steps", str(steps)]


def losses(folder: Path) -> dict[int, float]:
    with (folder / "metrics.csv").open() as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}


def assert_same_weights(one: Path, other: Path) -> None:
    expected, found = (load_file(path / "model.safetensors") for path in (one, other))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


@pytest.fixture(scope="module", params=[[], ["--carry-state"]], ids=["windows", "carry_state"])
def whole(request, text, tmp_path_factory) -> tuple[Path, list[str]]:
    """An uninterrupted run, and what distinguishes it."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", *options(text, folder), "--batch-size", "4", *request.param]) == 0
    return folder, request.param


def test_a_run_leaves_its_folder(whole):
    folder, _ = whole
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.yaml", "metrics.csv", "loss.png", "model.safetensors", "sample.txt", "checkpoint.ckpt"}
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len((folder / "sample.txt").read_bytes()) == 600
    assert list(losses(folder)) == list(range(1, STEPS + 1))
    trained = losses(folder)
    assert trained[STEPS] < trained[1]
    rows = read_metrics(RunFolder(folder))
    measured = [int(row["step"]) for row in rows if row["held_out_bits_per_byte"]]
    assert measured == [math.ceil(STEPS * tenth / 10) for tenth in range(1, 11)]


def interrupted(text: Path, folder: Path, extra: list[str], number: int = signal.SIGINT) -> None:
    """A run like `whole` that gets a signal in its tenth step."""
    from scanl.learning.run.module import Learning

    step = Learning.training_step

    def interrupted_step(self, batch, batch_idx):
        if self.global_step == 9:
            os.kill(os.getpid(), number)
        return step(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learning, "training_step", interrupted_step)
        assert main(["train", *options(text, folder), "--batch-size", "4", *extra]) == 130


def test_dropout_resumes_with_the_same_bits(text, tmp_path):
    """Its random numbers are those of the step. Measurements, which drop nothing out, do not move them."""
    alone, folder, extra = tmp_path / "alone", tmp_path / "run", ["--dropout", "0.3"]
    assert main(["train", *options(text, alone), "--batch-size", "4", *extra]) == 0
    interrupted(text, folder, extra)
    assert main(["train", "--resume", str(folder)]) == 0
    assert_same_weights(alone, folder)
    assert losses(folder) == losses(alone)
    assert LanguageModel.load(folder).stack.config["dropout"] == 0.3


@pytest.mark.parametrize("extra", [[], ["--carry-state"]], ids=["windows", "carry_state"])
def test_accumulated_batches_make_a_step(text, tmp_path, extra):
    """Two batches of 2 rows give the gradient of one of 4. Interrupted between steps, a run resumes with equal bits."""
    whole, parts, cut = tmp_path / "whole", tmp_path / "parts", tmp_path / "cut"
    halves = ["--batch-size", "2", "--accumulate", "2", *extra]
    assert main(["train", *options(text, parts), *halves]) == 0
    assert list(losses(parts)) == list(range(1, STEPS + 1))
    if not extra:  # streams cut the text in other places when there are other rows
        assert main(["train", *options(text, whole), "--batch-size", "4"]) == 0
        for step, loss in losses(whole).items():
            assert losses(parts)[step] == pytest.approx(loss, rel=1e-4)
    step = Learning.training_step

    def interrupted_step(self, batch, batch_idx):
        if self.global_step == 9:
            self.wishes["stop"] = True
        return step(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learning, "training_step", interrupted_step)
        assert main(["train", *options(text, cut), *halves]) == 130
    assert list(losses(cut)) == list(range(1, 11))
    assert main(["train", "--resume", str(cut)]) == 0
    assert_same_weights(parts, cut)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_signal_saves_and_resuming_ends_with_the_same_bits(whole, text, tmp_path, capfd, number):
    alone, extra = whole
    folder = tmp_path / "run"
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # pytest may be started under nohup
    try:
        handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        interrupted(text, folder, extra, number)
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "interrupted after step 10; saved. Go on with:" in capfd.readouterr().err
    assert list(losses(folder)) == list(range(1, 11))
    assert main(["train", "--resume", str(folder)]) == 0
    assert_same_weights(alone, folder)
    assert losses(folder) == losses(alone)
    assert main(["train", "--resume", str(folder)]) == 0  # a run that has ended stays as it is
    assert_same_weights(alone, folder)


@pytest.mark.long
def test_a_run_whose_terminal_closes_is_saved(text, tmp_path):
    """The terminal of the run is closed after its first row of metrics; the bar cannot be written any more."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "scanl.cli", "train", *options(text, folder, 100_000), "--log-every", "1"]
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever pytest is started with
        os.execv(sys.executable, command)
    metrics = folder / "metrics.csv"
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 65536)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert (folder / "model.safetensors").exists()
    assert read_checkpoint(folder / "checkpoint.ckpt")["global_step"] == max(losses(folder))


def test_an_ignored_hang_up_stays_ignored(text, tmp_path):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(AssertionError):  # the run goes on to its end
            interrupted(text, tmp_path / "run", [], signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (tmp_path / "run" / "sample.txt").exists()


def test_a_thread_that_gets_no_signals_trains(text, tmp_path):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(main, ["train", *options(text, tmp_path / "run", 2)]).result() == 0


def test_sigkill_and_resume_ends_with_the_same_bits(text, tmp_path):
    folder, alone, steps = tmp_path / "run", tmp_path / "alone", 80
    process = begun("train", *options(text, folder, steps), "--save-seconds", "0.05")
    while not (folder / "checkpoint.ckpt").exists() and process.is_alive():
        time.sleep(0.02)
    time.sleep(0.1)
    process.kill()
    process.join()
    assert not (folder / "model.safetensors").exists()
    assert main(["train", "--resume", str(folder), "--save-seconds", "30"]) == 0
    assert main(["train", *options(text, alone, steps)]) == 0
    assert_same_weights(alone, folder)
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("begun", [True, pytest.param(False, marks=pytest.mark.long)], ids=["resumed", "whole"])
def test_two_processes_learn_as_one_with_the_doubled_batch(begun, whole, text, tmp_path):
    """A run of two, and a run that one process has begun and two go on with."""
    alone, extra = whole
    if not extra:
        pytest.skip("one of the two orders is enough here: the law of both is in test_tasks")
    folder = tmp_path / "run"
    start = ["--resume", str(folder)] if begun else [*options(text, folder), *extra, "--save-seconds", "0"]
    if begun:
        interrupted(text, folder, extra)
    command = [sys.executable, "-m", "scanl.cli", "train", *start]
    shared = ["--strategy", "ddp", "--devices", "2", "--batch-size", "2"]
    done = subprocess.run([*command, *shared], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected, found = losses(alone), losses(folder)
    assert expected.keys() == found.keys()
    # A batch summed in two halves: rounding of the first step, grown by the steps that follow.
    bound = 64 * torch.finfo(torch.float32).eps
    for step, loss in expected.items():
        assert abs(found[step] - loss) <= bound * loss * step
    stored, reference = (read_checkpoint(p / "checkpoint.ckpt")["scanl"]["carried"] for p in (folder, alone))
    assert stored.keys() == reference.keys()
    for name, leaf in stored.items():
        torch.testing.assert_close(leaf, reference[name], rtol=1e-3, atol=1e-4)
    assert RunFolder.open(folder).config().run.devices == 2


def test_a_divided_model_learns_as_the_whole_one_which_goes_on(whole, text, tmp_path, alone_in_a_group):
    alone, extra = whole
    if not extra:
        pytest.skip("one of the two orders is enough here")
    folder = tmp_path / "run"
    interrupted(text, folder, [*extra, "--strategy", "fsdp", "--patience", "99", "--clip-value", "9"])
    assert read_checkpoint(folder / "checkpoint.ckpt")["state_dict"]["model.head.weight"].is_meta
    assert LanguageModel.load(folder)(torch.zeros(1, 1, dtype=torch.int64))[0].isfinite().all()
    assert main(["train", "--resume", str(folder), "--strategy", "auto"]) == 0
    for step, loss in losses(alone).items():
        assert losses(folder)[step] == pytest.approx(loss, rel=1e-5)


def test_the_state_is_carried_from_chunk_to_chunk(text, tmp_path):
    """With a learning rate of nothing, the losses are those of the untrained model reading each stream on."""
    folder = tmp_path / "run"
    assert main(["train", *options(text, folder, 5), "--batch-size", "3", "--lr", "1e-30", "--carry-state"]) == 0
    config = RunFolder.open(folder).config()
    model, state = seeded_model(config, config.open_source().question), None
    streams = ContiguousStreams(read_corpus(config.source.data).train, 16, config.run.seed)
    for step, loss in losses(folder).items():
        batch = torch.from_numpy(streams.batch(step - 1, 3))
        with torch.no_grad():
            logits, state = model(batch[:, :-1], state)
        expected = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        assert loss == pytest.approx(expected.item(), rel=4 * torch.finfo(torch.float32).eps)


def test_not_finite_stops_and_names_the_layer(text, tmp_path):
    from scanl.learning.run.module import DivergenceError
    from scanl.learning.run.train import train

    config = TrainConfig.of(
        data=[str(text)], out=str(tmp_path / "run"), dim=16, depth=2, sequence_length=16, steps=9, save_seconds=0,
        eval_bytes=64, accelerator="cpu",
    )  # fmt: skip
    folder = RunFolder.fresh(config)
    run, calls = Run(config, folder), []
    folder.create(config)

    def poison(module, inputs, output):
        calls.append(1)
        return (output[0] * (math.nan if run.model.training and len(calls) > 5 else 1), output[1])

    run.model.stack.blocks[1].mixer.register_forward_hook(poison)
    with pytest.raises(
        DivergenceError, match=r"loss is nan at step \d+; first not finite: stack.blocks.1.mixer \(Hawk\)"
    ):
        train(run)
    kept = read_checkpoint(folder.checkpoint)
    assert kept["global_step"] >= 1
    assert all(value.isfinite().all() for value in kept["state_dict"].values())


def test_a_wild_learning_rate_is_one_line(text, tmp_path, capfd):
    assert main(["train", *options(text, tmp_path / "run"), "--lr", "1e30", "--warmup", "0"]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("scanl: train: ")
    assert "at step" in error or "after step" in error
    assert "smaller --lr" in error


def test_damaged_and_foreign_files_are_refused(whole, tmp_path, capfd):
    folder = tmp_path / "run"

    def fresh(change) -> str:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole[0], folder)
        change()
        assert main(["train", "--resume", str(folder)]) == 2 or main(["eval", str(folder)]) == 2
        return capfd.readouterr().err

    def halve(name):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])

    def other_config(old, new):
        path = folder / "config.yaml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    assert "checkpoint.ckpt is damaged or cut short, or was not written by `scanl train`" in fresh(
        lambda: halve("checkpoint.ckpt")
    )
    assert "layer is lru, expected hawk because of" in fresh(lambda: other_config("layer: hawk", "layer: lru"))
    assert main(["eval", str(folder)]) == 2
    assert "does not fit config.yaml, which describes lru of dim 16" in capfd.readouterr().err
    assert "dim is 24, expected 16 because of" in fresh(lambda: other_config("dim: 16", "dim: 24"))
    assert main(["eval", str(folder)]) == 2
    assert "does not fit config.yaml, which describes hawk of dim 24" in capfd.readouterr().err
    assert "cannot be read" in fresh(lambda: (folder / "config.yaml").write_text("a: ["))
    assert "no configuration of a training run" in fresh(lambda: (folder / "config.yaml").write_text("a: 1"))
    assert "is not a run folder: it has no config.yaml" in fresh(lambda: (folder / "config.yaml").unlink())
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match="was not written by `scanl train`"):
        read_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match="does not exist"):
        read_checkpoint(tmp_path / "none.ckpt")


def test_weights_cut_in_half_are_refused(whole, tmp_path):
    folder = RunFolder(shutil.copytree(whole[0], tmp_path / "run"))
    folder.weights.write_bytes(folder.weights.read_bytes()[:-100])
    with pytest.raises(
        CheckpointError, match=r"model.safetensors is damaged: its bytes do not fit its digest; copy it again"
    ):
        folder.load_model()
    folder.weights.unlink()
    assert torch.equal(folder.load_model().embedding.weight, RunFolder(whole[0]).load_model().embedding.weight)
    folder.checkpoint.unlink()
    with pytest.raises(CheckpointError, match=r"has no weights yet; train it: scanl train --resume"):
        folder.load_model()


def test_a_checkpoint_holds_no_objects(whole):
    """Loading with weights_only refuses anything but tensors and plain values; an object would be seen here."""
    assert torch.load(whole[0] / "checkpoint.ckpt", weights_only=True)["global_step"] == STEPS


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail():
        with written_whole(path) as temporary:
            temporary.write_text("half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "old"
    with written_whole(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_resuming_refuses_what_would_change_the_run(whole, capfd):
    folder, _ = whole
    for option, message in {
        "--dim 32": "dim is 32, expected 16 because of the run to resume",
        "--lr 1": "lr is 1.0, expected 0.003 because",
        "--batch-size 8": "batch_size * devices is 8, expected 4 because",
        "--minutes 3": "minutes is 3.0, expected none because",
    }.items():
        assert main(["train", "--resume", str(folder), *option.split()]) == 2
        assert message in capfd.readouterr().err


def test_a_used_folder_is_refused_and_untouched(whole, text, capfd):
    folder, _ = whole
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert main(["train", *options(text, folder)]) == 2
    assert f"exists and is not empty; choose another --out, or go on with it: scanl train --resume {folder}" in (
        capfd.readouterr().err
    )
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_config_round_trip(tmp_path):
    config = TrainConfig.of(
        layer="hawk,lru", layer_options={"lru": {"r_min": 0.5}}, data=["ä"], carry_state=True, dim=16
    )
    (tmp_path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert TrainConfig.from_yaml(tmp_path / "config.yaml") == config
    mixers = [
        type(block.mixer).__name__
        for block in build_model(replace(config, stack=replace(config.stack, depth=3)), Text.question).stack.blocks
    ]
    assert mixers == ["Hawk", "LRU", "Hawk"]


def test_options_are_given_by_name():
    config = TrainConfig.of(layer="lru", steps=5, data=["a"])
    parts = TrainConfig(
        stack=StackConfig(layer="lru"), source=SourceConfig(data=["a"]), training=TrainingConfig(steps=5)
    )
    assert config == parts
    assert config.options() == {**TrainConfig().options(), "layer": "lru", "data": ["a"], "steps": 5}
    with pytest.raises(ConfigError, match="unknown option of train 'lyaer'; did you mean 'layer'"):
        TrainConfig.of(lyaer="lru")


def test_a_name_of_data_comes_before_a_path(tmp_path, monkeypatch):
    """Another spelling comes after it. Readers of the user's own files are no names."""
    monkeypatch.chdir(tmp_path)
    assert [TrainConfig.of(data=[word]).entry.name for word in ("parity", "Parity", "./parity")] == [
        "parity", "parity", "text"
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="data is 'table', expected a file, a folder or a known name"):
        _ = TrainConfig.of(data=["table"]).entry
    for folder in ("parity", "Parity", "table"):
        (tmp_path / folder).mkdir()
    given = [TrainConfig.of(data=[word]).entry.name for word in ("parity", "Parity", "table")]
    assert given == ["parity", "text", "text"]
    assert TrainConfig.of(data=["table"], question="classify").entry.name == "folders"
    assert TrainConfig.of(data=["table"], question="generate").entry.name == "signals"
    assert TrainConfig.of(data=["a.csv"], question="classify").entry.name == "table"


def test_a_switch_may_be_said_to_be_off(tmp_path):
    (tmp_path / "options.yaml").write_text("source: {carry_state: true}")
    file = ["--config", str(tmp_path / "options.yaml")]
    assert [parse([*file, *more])[0].source.carry_state for more in ([], ["--carry-state", "false"])] == [True, False]
    assert parse(["--carry-state", "--dim", "8"])[0].source.carry_state is True


def test_a_file_of_options_has_parts(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("stack: {layer: lru, layer_options: {r_min: 0.5}}\ntraining: {lr: 1e-3}\nsource: {data: [a, b]}\n")
    config = TrainConfig.of(layer="lru", layer_options={"r_min": 0.5}, lr=1e-3, data=["a", "b"])
    assert parse(["--config", str(file)])[0] == config == TrainConfig.from_yaml(file)
    changed, _ = parse(["--config", str(file), "--lr", "0.1", "--layer-options.r_max", "0.7", "--data", "c"])
    assert changed.options() == {
        **config.options(), "lr": 0.1, "layer_options": {"r_min": 0.5, "r_max": 0.7}, "data": ["c"]
    }  # fmt: skip
    (tmp_path / "whole.yaml").write_text(changed.to_yaml())
    assert parse(["--config", str(tmp_path / "whole.yaml")])[0] == changed


def test_each_part_of_a_run_is_made_once(text, tmp_path, monkeypatch):
    """The source, the model and the trainer; by `train`, on resuming, and by `eval`."""
    made = []

    def counted(owner, name):
        function = getattr(owner, name)

        def counting(*args, **kwargs):
            made.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    counted(TrainConfig, "open_source")
    counted(config_module, "build_model")
    counted(pl, "Trainer")
    folder = tmp_path / "run"
    assert main(["train", *options(text, folder, 2)]) == 0
    assert sorted(made) == ["Trainer", "build_model", "open_source"]
    made.clear()
    assert main(["train", "--resume", str(folder)]) == 0
    assert sorted(made) == ["Trainer", "build_model", "open_source"]
    made.clear()
    counted(folder_module, "build_model")
    assert main(["eval", str(folder)]) == 0
    assert sorted(made) == ["build_model", "build_model", "open_source"]  # first without memory: do the sizes fit?


def test_unknown_parts_and_options_are_named(tmp_path):
    for values, odd in (
        ({"stack": {"dimm": 3}}, "'stack.dimm' is not accepted"),
        ({"stack": 3}, "stack is 3, expected the options of one of the parts source, stack, head"),
        ({"stack": {"dim": 3}, "optimiser": {"lr": 1.0}}, "'optimiser.lr' is not accepted"),
        ({"stack": {"dim": "wide"}}, "dim is wide, expected an integer"),
        ({"layer": "lru"}, "layer is 'lru', expected the options"),
        ([3], "it is [3]"),
    ):
        with pytest.raises(CheckpointError, match=rf"no configuration of a training run: .*{re.escape(odd)}"):
            TrainConfig.from_values(values, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 0}, "depth is 0, expected at least 1"),
        ({"lr": 0.0}, "lr is 0.0, expected more than 0"),
        ({"clip_value": 0.0}, "clip_value is 0.0, expected more than 0"),
        ({"minutes": -1.0}, "minutes is -1.0, expected more than 0"),
        ({"warmup": -1}, "warmup is -1, expected at least 0"),
        ({"steps": 3, "minutes": 1.0}, "steps and minutes are both given, expected one of them"),
        ({"held_out": 1.5}, "held_out is 1.5, expected less than 1"),
    ],
)
def test_numbers_out_of_range(change, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig.of(**change).check()


def test_rate_warms_up_and_falls_to_zero():
    plan = RunLength(200)
    assert rate(plan, 10, 0) == pytest.approx(1 / 11)
    assert max(range(200), key=lambda step: rate(plan, 10, step)) == 10
    assert rate(plan, 10, 100) == pytest.approx(0.5)
    assert rate(plan, 10, 200) == 0
    assert rate(plan, 100, 20) == pytest.approx(0.5 * (1 + math.cos(math.pi / 10)))  # no longer than a tenth
    assert rate(RunLength(1), 50, 0) == 1


def test_a_revised_plan_goes_on_without_a_jump():
    plan = RunLength(100).revised(40, 60)
    assert plan.progress(40) == pytest.approx(0.4)
    assert plan.progress(50) == pytest.approx(0.7)
    assert plan.progress(60) == 1
    assert plan.revised(50, 51).progress(51) == 1
    assert UNKNOWN_PLAN.revised(8, 16).progress(12) == pytest.approx(0.5)


def test_minutes_are_kept_to(text, tmp_path):
    began = time.monotonic()
    options = [*TINY, "--data", str(text), "--out", str(tmp_path / "run"), "--minutes", "0.05"]
    assert main(["train", *options]) == 0
    took = time.monotonic() - began
    stored = read_checkpoint(tmp_path / "run" / "checkpoint.ckpt")
    assert stored["scanl"]["plan"]["steps"] == stored["global_step"] > 8
    assert 2 < stored["scanl"]["seconds"] < took
    rates = [float(row["lr"]) for row in read_metrics(RunFolder(tmp_path / "run"))]
    assert rates[-1] < 0.1 * max(rates)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"clip": 5.0}, [3.0, -4.0, 0.0]),
        ({"clip": 1.0}, [0.6, -0.8, 0.0]),
        ({"clip": 9.0, "clip_value": 3.5}, [3.0, -3.5, 0.0]),
        ({"clip": 2.5, "clip_value": 3.0}, [2.5 / 2**0.5, -2.5 / 2**0.5, 0.0]),
    ],
)
def test_gradients_are_clipped_by_value_and_then_by_norm(options, expected):
    source = TrainConfig.of(data=["parity"]).open_source()
    learning = Learning(nn.Linear(3, 1, bias=False), TrainConfig.of(**options), source)
    learning.model.weight.grad = torch.tensor([[3.0, -4.0, 0.0]])
    learning.configure_gradient_clipping(None)
    torch.testing.assert_close(learning.model.weight.grad, torch.tensor([expected]))


def test_only_linear_maps_decay():
    model = build_model(TrainConfig.of(layer="mega_ema", dim=16, depth=1, norm="layernorm"), Text.question)
    decayed, rest = OPTIMIZERS["adamw"](model, 3e-3, 0.1).param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert decayed["betas"] == rest["betas"] == (0.9, 0.95)
    names = {id(p): name for name, p in model.named_parameters()}
    assert sorted(names) == sorted(id(p) for group in (decayed, rest) for p in group["params"])
    kept = {names[id(p)].rpartition("blocks.0.")[2] for p in rest["params"]}
    assert {"embedding.weight", "mixer.alpha", "mixer.gamma", "mixer_norm.weight", "mixer_norm.bias"} <= kept
    assert "channel.down.weight" not in kept
    assert "head.weight" not in kept


@pytest.mark.parametrize("length", [1, 5, 100])
def test_bits_per_byte_is_the_mean_over_every_byte(length):
    model = build_model(TrainConfig.of(dim=16, depth=1), Text.question)
    data = np.random.default_rng(0).integers(0, 256, length).astype(np.uint8)
    tokens = torch.tensor([[0, *data.tolist()]])
    with torch.no_grad():
        logits = model(tokens[:, :-1])[0]
    expected = F.cross_entropy(logits[0].double(), tokens[0, 1:]).item() / math.log(2)
    assert bits_per_byte(model, data, chunk=256) == pytest.approx(expected, rel=1e-6)


def test_bits_per_byte_in_parts_reads_each_part_with_its_state():
    model = build_model(TrainConfig.of(dim=16, depth=1), Text.question)
    data = np.random.default_rng(0).integers(0, 256, 50).astype(np.uint8)
    padded = torch.tensor([0, *data.tolist()])
    nats = 0.0
    with torch.no_grad():
        for begin in (0, 17, 34):  # three parts of 17, 17 and 16
            part = padded[begin : begin + 18]
            nats += F.cross_entropy(model(part[None, :-1])[0][0].double(), part[1:], reduction="sum").item()
    for streams in (3, 32):  # a part has at least four chunks: of 50 bytes and chunks of 4 there are three
        found = bits_per_byte(model, data, streams=streams, chunk=4)
        assert found == pytest.approx(nats / math.log(2) / 50, rel=1e-6)
    assert model.training


@pytest.mark.parametrize("fast", [False, True])
def test_precision_that_fits_the_processor(monkeypatch, fast):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert fitting_precision("cpu") == ("bf16-mixed" if fast else "32-true")
