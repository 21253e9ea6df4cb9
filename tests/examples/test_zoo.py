"""Programs of examples/zoo on packages with random weights, in the formats that the packages have."""

import pickle
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ZOO = Path(__file__).parents[2] / "examples" / "zoo"


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return what runs a program of the zoo with the packages of a folder."""
    monkeypatch.syspath_prepend(str(ZOO))
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(name, *words):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        return runpy.run_path(str(ZOO / f"{name}.py"), run_name="__main__")

    yield run
    sys.modules.pop("packages", None)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_every_program_is_on_the_page():
    programs = {path.stem for path in ZOO.glob("*.py")} - {"packages"}
    rows = (ZOO.parents[1] / "benchmarks" / "results" / "zoo.csv").read_text("utf-8")
    assert not [name for name in programs if not re.search(rf"^{name},", rows, re.MULTILINE)]


def test_phonemes_from_an_npz(program, tmp_path, capfd):
    """Against the equations of the package's own program in numpy."""
    draw, width, letters, phonemes = np.random.default_rng(0), 256, 29, 74
    gates = 3 * width
    shapes = {"emb": None, "w_ih": (gates, width), "w_hh": (gates, width), "b_ih": (gates,), "b_hh": (gates,)}
    weights = {
        f"{part}_{name}": (draw.normal(size=shape or (count, width)) / 5).astype(np.float32)
        for part, count in (("enc", letters), ("dec", phonemes))
        for name, shape in shapes.items()
    }
    weights |= {"fc_w": draw.normal(size=(phonemes, width)).astype(np.float32), "fc_b": np.zeros(phonemes, np.float32)}
    (tmp_path / "g2p_en").mkdir()
    np.savez(tmp_path / "g2p_en" / "checkpoint20.npz", **weights)

    def cell(part, number, h):
        of_x = weights[f"{part}_w_ih"] @ weights[f"{part}_emb"][number] + weights[f"{part}_b_ih"]
        of_h = weights[f"{part}_w_hh"] @ h + weights[f"{part}_b_hh"]
        r, z = sigmoid(of_x[:width] + of_h[:width]), sigmoid((of_x + of_h)[width : 2 * width])
        return (1 - z) * np.tanh(of_x[2 * width :] + r * of_h[2 * width :]) + z * h

    known = program("phonemes", "cab")
    h, number, wanted = np.zeros(width), 2, []
    for letter in (5, 3, 4, 2):
        h = cell("enc", letter, h)
    while len(wanted) < 20 and (not wanted or number != 3):
        h = cell("dec", number, h)
        number = int((weights["fc_w"] @ h).argmax())
        wanted.append(known["NAMES"][number])
    assert capfd.readouterr().out.split() == ["cab", *[name for name in wanted if name != "</s>"]]


def test_voices_from_a_file_of_torch(program, tmp_path, capfd):
    """A file of weights is read. One that needs code is refused."""
    folder = tmp_path / "resemblyzer"
    folder.mkdir()
    encoder = runpy.run_path(str(ZOO / "voices.py"))["VoiceEncoder"]()
    torch.save({"step": 1, "model_state": encoder.state_dict()}, folder / "pretrained.pt")
    program("voices")
    assert re.search(r"after 3 s: [01]\.\d{3}$", capfd.readouterr().out.strip())
    torch.save({"model_state": encoder.lstm}, folder / "pretrained.pt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        program("voices")


def test_a_package_that_is_not_there_is_named(program):
    with pytest.raises(SystemExit, match="pip install --no-deps BeatNet"):
        program("beats")
