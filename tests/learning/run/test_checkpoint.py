"""Files that a run reads back: whole, or refused in one line."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from scanl import layers
from scanl.cli import main
from scanl.digests import load_tensors, save_tensors
from scanl.errors import CheckpointError
from scanl.layers import state as states
from scanl.learning import RunFolder
from scanl.learning.run.checkpoint import OWN_PARTS, PARTS, read_checkpoint, write_checkpoint

COVERS = ["digests"]

TINY = "--accelerator cpu --dim 8 --depth 1 --sequence-length 16 --eval-bytes 64 --steps 3".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    folder = tmp_path_factory.mktemp("checkpoints")
    text = folder / "text.txt"
    text.write_bytes(np.random.default_rng(0).integers(97, 105, 2000).astype(np.uint8).tobytes())
    assert main(["train", *TINY, "--data", str(text), "--out", str(folder / "run")]) == 0
    return RunFolder(folder / "run")


@pytest.fixture(scope="module")
def state_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("state") / "state.safetensors"
    states.save(layers.build("hawk", 4).init_state(1), path)
    return path


def flip(path: Path, place: int, bit: int) -> None:
    with path.open("rb+") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


def refused(read, path: Path, place: int, bit: int) -> None:
    """The file with one flipped bit; it is put right again afterwards."""
    flip(path, place, bit)
    try:
        with pytest.raises(CheckpointError) as caught:
            read()
    finally:
        flip(path, place, bit)
    assert len(str(caught.value).splitlines()) == 1, f"byte {place}, bit {bit}: {caught.value}"


@pytest.mark.parametrize("name", ["checkpoint", "weights", "state"])
def test_one_flipped_bit_is_refused(name, run, state_file):
    """A third of the flips in the first bytes, a third in the last, a third anywhere: 108 over the three files."""
    path, read = {
        "checkpoint": (run.checkpoint, lambda: read_checkpoint(run.checkpoint)),
        "weights": (run.weights, run.load_model),
        "state": (state_file, lambda: states.load(state_file, layers.build("hawk", 4).init_state(1))),
    }[name]
    read()
    size, random = path.stat().st_size, np.random.default_rng(0)
    near = min(size, 512)
    for places in (random.integers(0, near, 12), random.integers(size - near, size, 12), random.integers(0, size, 12)):
        for place in places:
            refused(read, path, int(place), int(random.integers(8)))
    read()


def test_every_bit_of_a_header_counts(tmp_path):
    """The length, the names, the digest and its key, the blanks that fill up: none may be other than it was written."""
    path = tmp_path / "one.safetensors"
    save_tensors({"a": torch.arange(3)}, path, {"more": [1, "ä"]})
    tensors, about = load_tensors(path, "test")
    assert tensors["a"].tolist() == [0, 1, 2]
    assert about["more"] == [1, "ä"]
    for place in range(path.stat().st_size):
        for bit in range(8):
            refused(lambda: load_tensors(path, "test"), path, place, bit)


def test_a_flipped_bit_is_one_line_of_the_command(run, tmp_path, capfd):
    for path, command in ((run.checkpoint, "train --resume"), (run.weights, "eval")):
        middle = path.stat().st_size // 2
        flip(path, middle, 3)
        capfd.readouterr()
        assert main([*command.split(), str(run.path)]) == 2
        flip(path, middle, 3)
        (line,) = capfd.readouterr().err.splitlines()
        assert "damaged" in line
        assert str(path) in line


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_weights_and_states_of_other_programs_are_read(metadata, run, state_file, tmp_path):
    own = load_file(run.weights)
    kept = run.weights.read_bytes()
    try:
        save_file(own, run.weights, metadata=metadata)
        assert torch.equal(run.load_model().embedding.weight, own["embedding.weight"])
    finally:
        run.weights.write_bytes(kept)
    like = layers.build("hawk", 4).init_state(1)
    foreign = tmp_path / "foreign.safetensors"
    save_file(load_file(state_file), foreign, metadata=metadata)
    for (_, found), (_, expected) in zip(states.leaves(states.load(foreign, like)), states.leaves(like), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("part", [*PARTS, *OWN_PARTS])
def test_a_checkpoint_that_lacks_a_part_is_refused(part, run, tmp_path):
    stored = read_checkpoint(run.checkpoint)
    del (stored if part in PARTS else stored["scanl"])[part]
    write_checkpoint(stored, tmp_path / "checkpoint.ckpt")
    with pytest.raises(CheckpointError, match=rf"lacks {part}; another version of scanl wrote it"):
        read_checkpoint(tmp_path / "checkpoint.ckpt")


def test_a_checkpoint_with_an_option_of_another_version_is_refused(run, tmp_path, capfd):
    folder = RunFolder(shutil.copytree(run.path, tmp_path / "run"))
    stored = read_checkpoint(folder.checkpoint)
    stored["scanl"]["config"]["momentum"] = 0.9
    write_checkpoint(stored, folder.checkpoint)
    assert main(["train", "--resume", str(folder.path)]) == 2
    assert "checkpoint.ckpt is no configuration of a training run: momentum is 0.9, expected" in capfd.readouterr().err


def test_no_part_of_a_checkpoint_is_unknown(run):
    """What Lightning adds is named here; whatever else is written must be among the parts that reading asks for."""
    stored = read_checkpoint(run.checkpoint)
    assert stored.keys() - set(PARTS) == {"pytorch-lightning_version"}
    assert stored["scanl"].keys() == set(OWN_PARTS)
