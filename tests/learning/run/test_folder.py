"""A run folder in other hands: two processes, edited files, moved texts, full disks, numbers that are not finite."""

import csv
import errno
import math
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file

from forked import begun
from scanl.cli import main
from scanl.data import IGNORED, Corpus, Text
from scanl.digests import save_tensors
from scanl.errors import CheckpointError
from scanl.learning import RunFolder, TrainConfig, bits_per_byte, spread
from scanl.learning.algorithms import BPTT
from scanl.learning.run.checkpoint import read_checkpoint, write_checkpoint
from scanl.learning.run.module import Learning
from scanl.learning.run.picture import draw_calibration, draw_confusion, save_figure

COVERS = ["learning/run/callbacks", "learning/run/picture"]

pytestmark = pytest.mark.usefixtures("short_sample")

TINY = "--accelerator cpu --dim 8 --depth 1 --sequence-length 16 --eval-bytes 64".split()  # noqa: SIM905
STEPS = ["--steps", "12", "--log-every", "5", "--eval-every", "4"]


def letters(seed: int, count: int = 3000) -> bytes:
    return np.random.default_rng(seed).integers(97, 105, count).astype(np.uint8).tobytes()


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(letters(0))
    return path


@pytest.fixture(scope="module")
def ended(text, tmp_path_factory) -> Path:
    """A run that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("ended") / "run"
    assert main(["train", *TINY, *STEPS, "--data", str(text), "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def copy(ended, tmp_path) -> Path:
    return shutil.copytree(ended, tmp_path / "run")


def train(text: Path, folder: Path, *more: str) -> int:
    return main(["train", *TINY, *STEPS, "--data", str(text), "--out", str(folder), *more])


def interrupted(begin, after: int) -> None:
    """Run `begin`, sent a signal in the step after so many."""
    step = Learning.training_step

    def interrupted_step(self, batch, batch_idx):
        if self.global_step == after:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learning, "training_step", interrupted_step)
        assert begin() == 130


def refusal(capfd, *argv: str) -> str:
    """The one line of a command that refuses."""
    capfd.readouterr()
    assert main(argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    return err.strip()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rows(folder: Path) -> list[dict[str, str]]:
    """Of metrics.csv, without the speed, which differs from run to run."""
    with (folder / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in csv.DictReader(file)]


def assert_same_weights(one: Path, other: Path) -> None:
    expected, found = (load_file(path / "model.safetensors") for path in (one, other))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# Two processes


def test_a_second_process_is_refused_by_name(text, tmp_path, capfd):
    folder = tmp_path / "run"
    options = [*TINY, "--data", str(text), "--out", str(folder), "--steps", "100000", "--save-seconds", "0.05"]
    process = begun("train", *options)
    try:
        while not (folder / "checkpoint.ckpt").exists() and process.is_alive():
            time.sleep(0.02)
        (folder / ".metrics.csv.1.tmp.csv").write_text("half of a file that the first is writing")
        line = refusal(capfd, "train", "--resume", str(folder))
        assert f"{folder} is in use by process {process.pid} on {socket.gethostname()}; wait until it" in line
        assert (folder / ".metrics.csv.1.tmp.csv").exists()
    finally:
        process.kill()
        process.join()
    with RunFolder(folder).locked():  # the system has let go of it
        assert f"process {os.getpid()}" in (folder / ".lock").read_text()
        with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()}"), RunFolder(folder).locked():
            pass
    assert not (folder / ".lock").exists()


def test_a_folder_is_made_by_one_of_two(tmp_path):
    """The second finds it empty, and the first holds it."""
    config = TrainConfig.of(out=str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    with RunFolder(tmp_path / "run").locked(), pytest.raises(CheckpointError, match="is in use by process"):
        RunFolder.fresh(config).create(config)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_lock_whose_file_has_just_been_removed_is_taken_again(tmp_path, monkeypatch):
    """Between opening and locking it, its holder has ended: another process would lock the next file of that name."""
    from scanl import files

    lock, calls = files._lock, []

    def slow(descriptor, folder):
        calls.append(descriptor)
        if len(calls) == 1:
            (tmp_path / ".lock").unlink()
        return lock(descriptor, folder)

    monkeypatch.setattr(files, "_lock", slow)
    with files.locked(tmp_path):
        assert len(calls) == 2
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}"


def test_a_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl", reason="the system has no flock")

    def no_locks(*_args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    message = r"cannot be locked \(No locks available\): do not start a second run in it"
    with pytest.warns(UserWarning, match=message), RunFolder(tmp_path).locked():
        pass


# Files that were edited


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lr: 0.003", "lr: 0.01", "lr is 0.01, expected 0.003 because of"),
        ("seed: 0", "seed: 1", "seed is 1, expected 0 because of"),
        ("log_every: 5", "log_every: 6", "log_every is 6, expected 5 because of"),
        ("held_out: 0.05", "held_out: 0.06", "held_out is 0.06, expected 0.05 because of"),
        ("batch_size: 8", "batch_size: 4", "batch_size * devices is 4, expected 8 because of"),
        ("dim: 8", "dim: eight", "dim is eight, expected an integer"),
        ("dim: 8", "dim: 8.5", "dim is 8.5, expected an integer"),
        ("depth: 1", "depth: true", "depth is True, expected an integer"),
        ("carry_state: false", "carry_state: 0", "carry_state is 0, expected true or false"),
        ("lr: 0.003", "lr: fast", "lr is fast, expected a number"),
        ("lr: 0.003", "lr: .nan", "lr is nan, expected a finite number"),
        ("clip: 1.0", "clip: .inf", "clip is inf, expected a finite number"),
        ("save_seconds: 30.0", "save_seconds: nan", "save_seconds is nan, expected a number"),
        ("seed: 0", "seed: 12345678901234567890123", "expected less than 2**63"),
        ("layer_options: {}", "layer_options: 3", "layer_options is 3, expected a mapping"),
        ("layer_options: {}", "layer_options: {1: 2}", "layer_options is {1: 2}, expected a mapping"),
        ("layer: hawk", "layer: [hawk]", "layer is ['hawk'], expected text"),
        ("minutes: null", "minutes: soon", "minutes is soon, expected a number or none"),
    ],
)
def test_an_edited_config_is_compared_like_options(old, new, message, copy, capfd):
    path = copy / "config.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    before = contents(copy)
    assert message in refusal(capfd, "train", "--resume", str(copy))
    assert contents(copy) == before


def test_what_may_be_edited_may(ended, copy):
    path = copy / "config.yaml"
    changed = path.read_text().replace("save_seconds: 30.0", "save_seconds: 3").replace("lr: 0.003", "lr: 3e-3")
    path.write_text(changed)
    assert main(["train", "--resume", str(copy)]) == 0
    assert_same_weights(ended, copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(b"\xff" + path.read_bytes()), "metrics.csv is damaged"),
        (lambda path: path.write_text(path.read_text().replace("12,", "13,")), "metrics.csv is damaged"),
        (lambda path: path.write_text(path.read_text()[:-30]), "metrics.csv is damaged"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\xff\n"), "metrics.csv cannot be read as metrics"),
        (lambda path: path.write_text(path.read_text() + "x,y\n"), "metrics.csv cannot be read as metrics"),
        (lambda path: (path.unlink(), path.mkdir()), "metrics.csv cannot be read: Is a directory"),
    ],
)
def test_damaged_metrics_are_refused(change, message, copy, capfd):
    change(copy / "metrics.csv")
    capfd.readouterr()
    assert main(["train", "--resume", str(copy)]) == 2
    error = capfd.readouterr().err.splitlines()
    assert message in error[-1]
    assert not any("Traceback" in line for line in error)


def test_a_run_goes_on_without_its_metrics(text, tmp_path):
    folder = tmp_path / "run"
    interrupted(lambda: train(text, folder), 6)
    (folder / "metrics.csv").unlink()
    assert main(["train", "--resume", str(folder)]) == 0
    assert [row["step"] for row in rows(folder)] == ["8", "10", "12"]


@pytest.mark.parametrize("after", [6, 7])
def test_a_resumed_run_has_the_rows_of_an_uninterrupted_one(after, ended, text, tmp_path):
    """Every value of every row: the loss is a mean over steps before and after the interruption."""
    folder = tmp_path / "run"
    interrupted(lambda: train(text, folder), after)
    assert [row["step"] for row in rows(folder)][-1] == ("5" if after == 6 else "8")
    assert main(["train", "--resume", str(folder)]) == 0
    assert rows(folder) == rows(ended)
    assert [row["step"] for row in rows(ended)] == ["4", "5", "8", "10", "12"]
    assert_same_weights(ended, folder)


def test_the_time_of_a_run_is_counted_on(text, tmp_path):
    """A budget of minutes is that of the whole run, not of what follows an interruption."""
    folder = tmp_path / "run"
    interrupted(lambda: train(text, folder), 6)
    checkpoint = read_checkpoint(folder / "checkpoint.ckpt")
    checkpoint["scanl"]["seconds"] += 1000
    write_checkpoint(checkpoint, folder / "checkpoint.ckpt")
    assert main(["train", "--resume", str(folder)]) == 0
    assert read_checkpoint(folder / "checkpoint.ckpt")["scanl"]["seconds"] > checkpoint["scanl"]["seconds"]


# Texts that change and move


def test_a_changed_text_is_not_split_anew(text, copy, tmp_path, capfd):
    """What was trained on would be among what is held out."""
    kept = text.read_bytes()
    try:
        text.write_bytes(kept[1000:] + letters(1, 100))
        line = refusal(capfd, "eval", str(copy))
        assert "or its split, has changed since training" in line
        assert "measure another text: --data PATH" in line
        assert line == refusal(capfd, "eval", str(copy), "--data", str(text))
        text.write_bytes(kept[:-10] + kept[-9:] + b"a")  # in what is held out alone
        assert "has changed since training" in refusal(capfd, "eval", str(copy))
    finally:
        text.write_bytes(kept)
    assert main(["eval", str(copy)]) == 0
    shown = capfd.readouterr().out
    assert shown.startswith("bits per byte on 150 held-out bytes:")
    moved = tmp_path / "elsewhere" / text.name
    moved.parent.mkdir()
    moved.write_bytes(kept)
    assert main(["eval", str(copy), "--data", str(moved)]) == 0
    assert capfd.readouterr().out == shown


def test_another_text_is_measured_whole(ended, tmp_path, capfd):
    other = tmp_path / "other.txt"
    other.write_bytes(letters(1, 500))
    assert main(["eval", str(ended), "--data", str(other)]) == 0
    expected = bits_per_byte(RunFolder(ended).load_model(), np.frombuffer(other.read_bytes(), np.uint8))
    lines = capfd.readouterr().out.splitlines()
    assert lines[:2] == [
        "another text than the run's: bits per byte on 500 held-out bytes:", f"  this model  {expected:.3f}"
    ]  # fmt: skip


def test_a_run_goes_on_with_its_text_elsewhere(ended, tmp_path, capfd):
    folder, first, second = tmp_path / "run", tmp_path / "a" / "text.txt", tmp_path / "b" / "text.txt"
    for path in (first, second):
        path.parent.mkdir()
        path.write_bytes(letters(0))
    interrupted(lambda: train(first, folder), 6)
    first.unlink()
    assert "does not exist" in refusal(capfd, "train", "--resume", str(folder))
    (tmp_path / "other.txt").write_bytes(letters(1))
    before = contents(folder)
    line = refusal(capfd, "train", "--resume", str(folder), "--data", str(tmp_path / "other.txt"))
    assert "has changed since the checkpoint; put it back to resume" in line
    assert "--data PATH" in line
    assert contents(folder) == before
    other = shutil.copytree(folder, tmp_path / "other")
    for run, argv in ((folder, ["--data", str(second)]), (other, ["--data", str(second)])):
        assert main(["train", "--resume", str(run), *argv]) == 0
        assert_same_weights(ended, run)
        assert RunFolder(run).config().source.data == [str(second)]


# What the curve shows


def test_measurements_read_a_sample_spread_over_all_that_is_held_out():
    """Of a text whose end is harder than its beginning, the sample has as much of either as the text."""
    held_out = np.concatenate([np.full(9_000, 97), np.random.default_rng(0).integers(0, 256, 1_000)]).astype(np.uint8)
    source = Text(eval_bytes=1000)
    source.corpus = Corpus(held_out, held_out)
    (group,) = source.unseen(1)
    data = group.targets[group.targets != IGNORED]
    assert 900 < len(data) <= 1000
    assert 0.05 < (data != 97).mean() < 0.15


@pytest.mark.parametrize(("size", "count"), [(100, 100), (100, 200), (100, 99), (1000, 64), (1000, 7), (33, 32)])
def test_a_sample_is_of_parts_at_equal_distances(size, count):
    data = (np.arange(size) % 256).astype(np.uint8)
    found = spread(data, count)
    assert len(found) <= count
    if count >= size:
        assert found is data
        return
    parts = min(32, count)
    starts = [part * size // parts for part in range(parts)]
    assert found.tolist() == [data[start + i] for start in starts for i in range(count // parts)]


def test_a_sample_is_called_one(text, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("scanl.data.text.text.MAX_HELD_BYTES", 64)
    assert train(text, tmp_path / "run") == 0
    out, err = capfd.readouterr()
    assert "  held-out sample " in err.splitlines()[-2]
    assert out.startswith("bits per byte on 64 bytes, a sample of 150 held out:")


# Disks


def no_space(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", ["config.yaml", "checkpoint.ckpt", "model.safetensors", "loss.png", "sample.txt"])
def test_a_full_disk_is_one_line(name, text, tmp_path, monkeypatch, capfd):
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: no_space() if Path(b).name == name else replace(a, b))
    assert train(text, tmp_path / "run") == 2
    error = capfd.readouterr().err
    assert f"{name} cannot be written: No space left on device" in error.splitlines()[-1]
    assert "Traceback" not in error
    assert not list((tmp_path / "run").glob(".*"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
@pytest.mark.parametrize("write", [save_figure, write_checkpoint])
def test_a_device_that_is_full_is_named_as_the_reason(write, tmp_path, monkeypatch):
    """Not what a library makes of it: torch complains about its archive."""
    path, temporary = tmp_path / "file.png", tmp_path / ".file.png.tmp.png"
    temporary.symlink_to("/dev/full")
    monkeypatch.setattr("scanl.files.temporary_path", lambda path: temporary)
    content = Figure() if write is save_figure else {"weights": torch.zeros(1000)}
    with pytest.raises(CheckpointError, match=r"file.png cannot be written: No space left on device"):
        write(content, path)
    assert list(tmp_path.iterdir()) == []


def test_tensors_for_a_folder_that_is_not_there_are_one_line(tmp_path):
    with pytest.raises(CheckpointError, match=r"a.safetensors cannot be written: .*No such file or directory"):
        save_tensors({"a": torch.zeros(1)}, tmp_path / "no" / "a.safetensors")


def test_a_full_disk_for_the_metrics_is_one_line(text, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("scanl.learning.run.callbacks.as_csv", no_space)
    assert train(text, tmp_path / "run") == 2
    error = capfd.readouterr().err
    assert "metrics.csv cannot be written: No space left on device" in error.splitlines()[-1]
    assert "Traceback" not in error


def test_a_folder_that_may_only_be_read_is_one_line(copy, monkeypatch, capfd):
    """It can be measured all the same."""
    opened = os.open

    def read_only(path, flags, *more, **options):
        if flags & os.O_CREAT and Path(path).parent == copy:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", read_only)
    assert "cannot be written: Read-only file system" in refusal(capfd, "train", "--resume", str(copy))
    assert main(["eval", str(copy)]) == 0


# Numbers that are not finite


def measured(monkeypatch, measure) -> None:
    """Let the measurement after a step be `measure(model, step)`."""
    monkeypatch.setattr(Text, "unseen", lambda self, step: step)
    monkeypatch.setattr("scanl.learning.run.callbacks.measure", lambda model, source, step: measure(model, step))


def test_after_nan_in_the_first_step_the_folder_can_be_used(ended, text, tmp_path, monkeypatch, capfd):
    folder, update = tmp_path / "run", BPTT.update
    with monkeypatch.context() as patch:
        patch.setattr(BPTT, "update", lambda *args: (update(*args)[0] * math.nan, update(*args)[1]))
        assert train(text, folder) == 2
    assert "loss is nan at step 1; first not finite: " in (error := capfd.readouterr().err.splitlines()[-1])
    assert "The last checkpoint is from before" in error
    assert read_checkpoint(folder / "checkpoint.ckpt")["global_step"] == 0
    assert main(["eval", str(folder)]) == 0
    assert main(["train", "--resume", str(folder)]) == 0
    assert_same_weights(ended, folder)
    assert rows(folder) == rows(ended)


def test_nan_that_is_measured_stops_the_run(text, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "run"
    measured(monkeypatch, lambda model, step: math.nan if step == 8 else 3.0)
    assert train(text, folder, "--save-seconds", "0") == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert "held_out_bits_per_byte is nan after step 8; the last checkpoint is from before" in error
    assert read_checkpoint(folder / "checkpoint.ckpt")["global_step"] == 7
    assert [row["step"] for row in rows(folder)] == ["4", "5"]


# Early stopping


@pytest.mark.parametrize("cut", [None, 6])
def test_patience_ends_a_run_and_keeps_the_best_weights(cut, text, tmp_path, monkeypatch, capfd):
    """Measured after 2, 4, ... steps; the best is the second, and two more are not better."""
    folder, seen = tmp_path / "run", {}
    values = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.0, 10: 1.0, 12: 1.0}

    def measure(model, step):
        seen[step] = {name: value.clone() for name, value in model.state_dict().items()}
        return values[step]

    measured(monkeypatch, measure)

    def begin() -> int:
        return train(text, folder, "--eval-every", "2", "--patience", "2")

    if cut == 6:
        interrupted(begin, cut)
        assert "has the weights of step 4, the best measured" in capfd.readouterr().err
        seen.clear()
        assert main(["train", "--resume", str(folder)]) == 0
    else:
        assert begin() == 0
    err = capfd.readouterr().err
    assert "scanl: 2 measurements without a better one; ended after step 8" in err
    assert f"{folder / 'model.safetensors'} has the weights of step 4, the best measured" in err
    found = load_file(folder / "model.safetensors")
    if cut is None:
        for name, value in seen[4].items():
            assert torch.equal(found[name], value)
        assert not all(torch.equal(found[name], value) for name, value in seen[8].items())
    kept = (folder / "model.safetensors").read_bytes()
    assert main(["train", "--resume", str(folder)]) == 0  # a run that has ended stays as it is
    assert (folder / "model.safetensors").read_bytes() == kept
    assert rows(folder)[-1]["step"] == "8"


@pytest.mark.parametrize(("options", "message"), [("--patience 0", "patience is 0, expected more than 0")])
def test_patience_refuses(options, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(capfd, "train", *options.split())


# TensorBoard


def test_tensorboard_that_is_not_installed_is_named(text, tmp_path, monkeypatch, capfd):
    def missing(*_args, **_kwargs):
        raise ModuleNotFoundError

    monkeypatch.setattr("scanl.learning.run.trainer.TensorBoardLogger", missing)
    argv = ["train", *TINY, *STEPS, "--data", str(text), "--out", str(tmp_path / "run"), "--tensorboard"]
    assert "tensorboard is not installed: pip install 'scanl[tensorboard]'" in refusal(capfd, *argv)
    assert not (tmp_path / "run").exists()


def test_tensorboard_has_the_rows_of_the_metrics(ended, text, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'scanl[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    assert train(text, folder, "--tensorboard") == 0
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    for column in ("loss", "bits_per_byte", "lr", "held_out_bits_per_byte"):
        expected = [(int(row["step"]), np.float32(row[column])) for row in rows(folder) if row[column]]
        assert [(event.step, np.float32(event.value)) for event in events.Scalars(column)] == expected
    assert_same_weights(ended, folder)


def test_the_picture_of_classes():
    """Counts by true and predicted class, and the accuracy of predictions by their probability."""
    confusion, calibration = Figure().subplots(1, 2)
    draw_confusion(confusion, torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 1, 1]), ["sun", "rain"])
    numbers = {text.get_position(): text.get_text() for text in confusion.texts}
    assert numbers == {(0, 0): "1", (0, 1): "1", (1, 1): "2"}  # column, row
    assert [label.get_text() for label in confusion.get_yticklabels()] == ["sun", "rain"]
    probabilities = torch.tensor([[0.92, 0.08], [0.98, 0.02], [0.6, 0.4], [1.0, 0.0]])
    draw_calibration(calibration, probabilities, torch.tensor([0, 1, 1, 0]))
    x, y = calibration.lines[1].get_data()
    np.testing.assert_allclose(x, [0.6, (0.92 + 0.98 + 1) / 3], rtol=1e-6)
    np.testing.assert_allclose(y, [0, 2 / 3])
