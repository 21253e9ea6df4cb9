"""`scanl pack` and `scanl unpack`: files come back, go on where they were cut, and are refused by one line."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scanl.cli import main, text_model
from scanl.files import locked
from scanl.models import LanguageModel, Stack

COVERS = ["cli/text_model"]
TEXTS = {"one.txt": b"a text of some words " * 20, "empty": b"", "below/two.txt": bytes(range(256))}


@pytest.fixture(autouse=True)
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A small model in the place of those that come with scanl, and files in the working directory."""
    torch.manual_seed(0)
    model = LanguageModel(256, Stack(32, 1, "mingru", channel_mixer="none"))
    with torch.no_grad():  # it expects letters
        assert model.head is not None
        model.head.weight.mul_(0)
        model.embedding.weight.fill_(1)
        model.head.weight[97:123] = 1
        model.head.weight[32] = 1
    monkeypatch.setattr(text_model, "byte_model", lambda name="text": model)
    monkeypatch.setattr("scanl.packing.packing.byte_model", lambda name="text": model)
    monkeypatch.setattr("scanl.packing.packing.byte_model_names", lambda: ["text"])
    monkeypatch.chdir(tmp_path)
    for name, content in TEXTS.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    return tmp_path


def test_files_come_back(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", *TEXTS, "-o", "all.scanl", "--frame", "100"]) == 0
    assert "all.scanl: 676 bytes in " in capfd.readouterr().out
    assert main(["unpack", "all.scanl", "--list"]) == 0
    assert capfd.readouterr().out.split() == ["420", "one.txt", "0", "empty", "256", "below/two.txt"]
    assert main(["unpack", "all.scanl", "--bytes", "2:6"]) == 0
    assert capfd.readouterr().out == "text"
    assert main(["unpack", "all.scanl", "-o", "new"]) == 0
    assert {name: Path("new", name).read_bytes() for name in TEXTS} == TEXTS
    assert sorted(path.name for path in Path("new").iterdir()) == ["below", "empty", "one.txt"]
    assert main(["unpack", "all.scanl", "-o", "new"]) == 2
    assert "new/one.txt exists" in capfd.readouterr().err


def test_two_commands_do_not_write_one_archive(shipped: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with locked(shipped, ".all.scanl.partial.lock"):
        assert main(["pack", "one.txt", "-o", "all.scanl", "--fast"]) == 2
    assert "pack: all.scanl is in use by process" in capfd.readouterr().err
    assert main(["pack", "one.txt", "-o", "all.scanl", "--fast"]) == 0
    assert not list(shipped.glob(".all*"))


def test_without_a_model(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "one.txt", "-o", "fast.scanl", "--fast"]) == 0
    assert main(["unpack", "fast.scanl", "-o", "new"]) == 0
    assert Path("new/one.txt").read_bytes() == TEXTS["one.txt"]
    capfd.readouterr()
    assert main(["pack", "one.txt", "-o", "other.scanl", "--fast", "--learn"]) == 2
    assert "fast packs without a model" in capfd.readouterr().err


def test_the_model_that_packs_writes_a_text(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "text", "--prompt", "a", "--bytes", "20", "--temperature", "0.1"]) == 0
    written = capfd.readouterr().out
    assert len(written) == 22
    assert set(written[1:-1]) <= set("abcdefghijklmnopqrstuvwxyz ")
    assert main(["generate", "none"]) == 2
    assert "none is not a folder" in capfd.readouterr().err


def test_both_go_on_where_they_were_cut(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["pack", "one.txt", "-o", "whole.scanl", "--frame", "100"]) == 0
    archive = Path("whole.scanl").read_bytes()
    shipped.joinpath(".again.scanl.partial").write_bytes(archive[:200])
    assert main(["pack", "one.txt", "-o", "again.scanl", "--frame", "100"]) == 0
    assert Path("again.scanl").read_bytes() == archive
    assert not shipped.joinpath(".again.scanl.partial").exists()
    coded: list[int] = []
    monkeypatch.setattr("scanl.packing.packing.decoded", lambda *args: coded.append(1))
    Path("new").mkdir()
    Path("new", ".whole.scanl.partial").write_bytes(TEXTS["one.txt"])
    assert main(["unpack", "whole.scanl", "-o", "new"]) == 0
    assert Path("new", "one.txt").read_bytes() == TEXTS["one.txt"]
    assert not coded


def test_standard_input_and_output(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(TEXTS["one.txt"])))
    assert main(["pack", "-", "-o", "-"]) == 0
    sys.stdout.flush()
    archive = capfdbinary.readouterr().out
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(archive)))
    assert main(["unpack", "-", "-o", "-"]) == 0
    sys.stdout.flush()
    assert capfdbinary.readouterr().out == TEXTS["one.txt"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pack", "one.txt"], "pack: out is missing, expected the archive to write"),
        (["pack", "absent", "-o", "x"], "pack: absent is not a file"),
        (["pack", "one.txt", "one.txt", "-o", "x"], "pack: two files are called one.txt"),
        (["pack", "one.txt", "-o", "absent/x"], "pack: out is absent/x, whose folder does not exist"),
        (["unpack", "one.txt"], "unpack: the file is no archive of scanl"),
        (["unpack", "-", "--list"], "unpack: archive is -, expected a file"),
    ],
)
def test_what_is_wrong_is_refused(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capfd.readouterr().err
    assert message in error
    assert error.count("\n") == 1
