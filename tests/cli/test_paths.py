"""Wrong commands, each refused in one line before any work. They stand with what is said in wrong_commands.txt."""

import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from scanl.cli import main
from scanl.cli.paths import check_paths
from scanl.errors import ConfigError

ASK = {
    "FORECAST": "--question forecast --target y --time ds",
    "CLASSIFY": "--question classify --target kind --series id --time t",
}
LINES = Path(__file__).with_name("wrong_commands.txt").read_text("utf-8").splitlines()
HAS_GPU = torch.cuda.is_available()
TINY = ["--accelerator", "cpu", "--dim", "8", "--depth", "1", "--steps", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of tables, texts and runs."""
    draw, path = np.random.default_rng(0), tmp_path_factory.mktemp("wrong")
    days = pd.date_range("2024-01-01", periods=200).strftime("%Y-%m-%d")
    y = 10 + np.sin(2 * np.pi * np.arange(200) / 7) + 0.1 * draw.normal(size=200)
    table = pd.DataFrame({"ds": days, "y": y, "u": 0.5 * y})
    two = pd.concat([table[["ds", "y"]].assign(shop=shop) for shop in "ab"])
    kinds = {"id": np.repeat(range(12), 10), "t": np.tile(range(10), 12), "x": draw.normal(size=120)}
    tables = {
        "ok": table,
        "two": two,
        "two_mixed": two.sort_values("ds"),
        "unsorted": table[["ds", "y"]][::-1],
        "words": table.assign(y="x"),
        "ambiguous": table.assign(ds="01/02/2024"),
        "kinds": pd.DataFrame(kinds).assign(kind=np.repeat(["a", "b"] * 6, 10)),
    }
    for name, frame in tables.items():
        frame.to_csv(path / f"{name}.csv", index=False)
    texts = {
        "empty.csv": "",
        "head.csv": "ds,y\n",
        "semicolon.csv": "ds;y\n" + "".join(f"{day};1,5\n" for day in days),
        "ragged.csv": "ds,y\n2024-01-01,1\n2024-01-02,2,3,4\n",
        "short.txt": "short",
        "notes.pdf": "%PDF",
        "bad.yaml": "stack:\n  dim: [\n",
        "badrun/config.yaml": "stack: 3\n",
        "full/file": "x",
    }
    for name in ("folder", "full", "badrun"):
        (path / name).mkdir()
    for name, text in texts.items():
        (path / name).write_text(text)
    (path / "latin.csv").write_bytes("ds,y\n2024-01-01,é\n".encode("latin-1"))
    (path / "broken.parquet").write_bytes(b"PAR1 no")
    (path / "text.txt").write_bytes(draw.integers(97, 105, 4000).astype(np.uint8).tobytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        runs = {
            "r_text": [*TINY, "--data", "text.txt", "--sequence-length", "16", "--eval-bytes", "64"],
            "r_task": [*TINY, "--data", "parity", "--eval-examples", "8"],
            "r_fc": ["--data", "ok.csv", *ASK["FORECAST"].split(), "--start", "seasonal", "--minutes", "0.05"],
            "r_cl": [*TINY, "--data", "kinds.csv", *ASK["CLASSIFY"].split()],
        }
        for name, options in runs.items():
            assert main(["train", *options, "--out", name]) == 0
    return path


@pytest.fixture
def workless(folder, monkeypatch):
    """In the folder, where nothing is chosen, trained or measured."""

    def work(*_, **__):
        raise AssertionError("the work began")

    for name in ("run.train.train", "forecasting.choose._simple", "series.choose._Trial", "evaluation.measures"):
        monkeypatch.setattr(f"scanl.learning.{name}", work)
    monkeypatch.chdir(folder)


@pytest.mark.usefixtures("workless")
@pytest.mark.parametrize("line", [line for line in LINES if not (HAS_GPU and "accelerator gpu" in line)])
def test_a_wrong_command_is_refused_in_one_line(line, folder, capfd):
    command, expected = line.split(" => ")
    for name, words in ASK.items():
        command = command.replace(name, words)
    before = sorted(folder.iterdir())
    assert main(shlex.split(command)) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("scanl: ")
    assert any(words in err for words in expected.split("|")), err
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["--data", "none.csv"], "none.csv"),
        (["--data=none.csv"], "none.csv"),
        (["--steps", "3", "--data", "a b", "none/file", "--lr", "0.1"], "none/file"),
        (["--data", "parity"], None),
        (["--data", "none-*.csv", "s3://none/a.parquet"], None),
        (["--data", "none.csv", "--help"], None),
        (["--layer", "none.csv"], None),
    ],
)
def test_paths_are_told_from_names(words, missing):
    if missing is None:
        check_paths("train", words)
    else:
        with pytest.raises(ConfigError, match=f"^train: data is {missing}, which does not exist$"):
            check_paths("train", words)
