"""`scanl inspect` prints tables, and writes pictures and CSV files."""

import csv

import pytest

from scanl.cli import main
from scanl.inspect import inspectors


def test_the_list_has_every_inspector(capsys):
    assert main(["inspect", "--list"]) == 0
    out = capsys.readouterr().out
    for one in map(inspectors.get, inspectors.names()):
        assert f"{one.name}: {one.title}. For {one.takes}." in out
        assert one.equation in out
        assert one.source in out


def test_a_layer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["inspect", "LRU", "--dim", "4", "--layer-options.r_min", "0.9", "--steps", "6", "--what"]
    assert main([*words, "eigenvalues", "impulse_response"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Eigenvalues of a step (eigenvalues)"
    assert lines[1].split() == ["layer", "numbers", "largest", "|λ|", "median", "|λ|", "longest", "half-life,", "steps"]
    assert lines[2].split()[:2] == ["lru", "8"]
    assert 0.9 <= float(lines[2].split()[2]) <= 1
    rows = list(csv.DictReader((tmp_path / "inspect/lru/eigenvalues.csv").read_text("utf-8").splitlines()))
    assert len(rows) == 2 * 8
    assert {name.name for name in (tmp_path / "inspect/lru").iterdir()} == {
        "eigenvalues.csv", "eigenvalues.png", "impulse_response.csv", "impulse_response.png",
    }  # fmt: skip


def test_a_whole_model_has_a_line_for_each_layer(tmp_path, capsys):
    words = ["inspect", "griffin", "--dim", "32", "--steps", "8", "--what", "gradient_norms", "--out", str(tmp_path)]
    assert main(words) == 0
    layers = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[2:5]]
    assert layers == [["0", "hawk"], ["1", "hawk"], ["2", "window_attention"]]


def test_a_run_and_a_layer_that_an_inspector_refuses(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train = "train --data parity --layer lru,gru --dim 8 --depth 2 --steps 1 --batch-size 2 --accelerator cpu"
    assert main([*train.split(), "--data-options.length", "10", "--eval-examples", "4", "--out", "r"]) == 0
    capsys.readouterr()
    assert main(["inspect", "r", "--steps", "8", "--what", "mixing_matrix"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:2] == ["0", "lru"]
    assert lines[3].startswith("  1 gru: mixing_matrix: the ops that gru calls are gru, expected one over all 8 steps")
    assert lines[4].split() == ["r/inspect/mixing_matrix.png,", "mixing_matrix.csv"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("inspect", "inspect: no run or layer is named, expected one; `scanl list` prints the layers"),
        ("inspect lur", "unknown layer 'lur'; did you mean 'lru'?"),
        ("inspect lru --what orbit", "unknown inspector 'orbit'; did you mean 'orbits'?"),
        ("inspect lru --what orbits", "orbits: layer is a LRU, expected a PLRNN or a ShallowPLRNN"),
        ("inspect lru --dim 0", "inspect: dim is 0, expected at least 1"),
        ("inspect lru --steps 0", "inspect: steps is 0, expected at least 1"),
    ],
)
def test_what_is_refused(words, message, capsys):
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"scanl: {message}\n"


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    words = [
        "inspect",
        "lru",
        "--dim",
        "4",
        "--steps",
        "4",
        "--what",
        "gradient_norms",
        "--out",
        str(tmp_path / "file"),
    ]
    assert main(words) == 2
    assert "file, which is a file, expected a new folder" in capsys.readouterr().err
