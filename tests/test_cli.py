"""The `scanl` command: what it prints, and one line for every mistake."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

import scanl
from scanl.cli import COMMANDS, demo, main
from scanl.cli.layers import options_of
from scanl.layers import names
from scanl.learning.config import TrainConfig, build_model

TINY = "--accelerator cpu --dim 16 --depth 1 --sequence-length 16 --eval-bytes 64 --steps 3".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    text = folder / "text.txt"
    text.write_bytes(np.random.default_rng(0).integers(97, 105, 2000).astype(np.uint8).tobytes())
    assert main(["train", *TINY, "--data", str(text), "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def text(run) -> Path:
    return run.parent / "text.txt"


def refused(capfd, *argv: str) -> str:
    """The one line that a mistake gives."""
    assert main(argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("scanl: ")
    return lines[0]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("trian", "unknown command 'trian'; did you mean 'train'?"),
        ("train --layer hwak", "unknown layer 'hwak'; did you mean 'hawk'?"),
        ("train --layer hawk,lur", "unknown layer 'lur'; did you mean 'lru'?"),
        ("train --layer-options.widht 8", "unknown option of hawk 'widht'; did you mean 'width'?"),
        ("train --layer-options.width wide", "options {'width': 'wide'} do not fit hawk"),
        ("train --channel-options.expnd 8", "'expnd'"),
        ("train --channel-mixer gated", "unknown channel mixer 'gated'; did you mean 'gated_mlp'?"),
        ("train --layer bidirectional", "bidirectional"),
        ("train --dimm 8", "unknown option of train '--dimm'; did you mean '--dim'?"),
        ("train --dim wide", "train: dim is wide, expected int"),
        ("train --steps few", "train: steps is few, expected int or none"),
        ("train --dim 0", "train: dim is 0, expected at least 1"),
        ("train --config nothing.yaml", "File does not exist"),
        ("train --data nothing.txt", "corpus: nothing.txt does not exist; name a file or a folder"),
        ("train --strategy dpp", "invalid strategy name: `strategy='dpp'`"),
        ("train --accelerator gup", "invalid accelerator name"),
        ("train --resume nothing", "run: nothing is not a folder; name one that `scanl train` has written"),
        ("generate nothing", "run: nothing is not a folder"),
        ("eval .", "is not a run folder: it has no config.yaml"),
        ("show lur", "unknown layer 'lur'; did you mean 'lru'?"),
        ("show lru --dim 0", "expected at least 1"),
        ("show", "show:"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(command, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capfd, *command.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--temperature -1", "temperature is -1.0, expected at least 0"),
        ("--top-k 0", "top_k is 0, expected at least 1"),
        ("--top-p 2", "top_p is 2.0, expected in (0, 1]"),
        ("--bytes -1", "bytes is -1, expected at least 0"),
    ],
)
def test_generate_refuses(run, capfd, option, message):
    assert message in refused(capfd, "generate", str(run), *option.split())


def test_short_text_is_refused(tmp_path, capfd):
    (tmp_path / "a").write_text("short")
    out = tmp_path / "run"
    line = refused(capfd, "train", "--data", str(tmp_path / "a"), "--out", str(out), "--accelerator", "cpu")
    assert "5 bytes to train on, expected more than 256 because of the sequence length" in line
    assert not out.exists()


def test_generate_streams_the_prompt_and_as_many_bytes(run, capfdbinary):
    def generated(*options: str) -> bytes:
        assert main(["generate", str(run), "--prompt", "añ", "--bytes", "40", *options]) == 0
        return capfdbinary.readouterr().out

    first = generated("--seed", "1")
    assert first.startswith("añ".encode())
    assert len(first) == 3 + 40 + 1
    assert generated("--seed", "1") == first
    assert generated("--seed", "2") != first
    assert generated("--temperature", "0") == generated("--top_k", "1", "--seed", "5")


def test_generate_without_a_prompt_begins_a_file(run, capfdbinary):
    assert main(["generate", str(run), "--bytes", "5"]) == 0
    assert len(capfdbinary.readouterr().out) == 6


def test_generate_ends_quietly_when_its_reader_leaves(run):
    process = subprocess.Popen(
        [sys.executable, "-m", "scanl.cli", "generate", str(run), "--bytes", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0


def test_eval_compares_with_compressors(run, capfd):
    assert main(["eval", str(run)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "bits per byte on 100 held-out bytes:"
    table = {line[2:14].strip(): float(line[14:]) for line in lines[1:]}
    assert table.keys() == {"this model", "gzip -9", "xz"}
    assert 2 < table["this model"] < 9


def test_list_and_help_name_every_layer_and_option(capfd):
    assert main(["list"]) == 0
    listed = capfd.readouterr().out
    with pytest.raises(SystemExit) as done:
        main(["train", "--help"])
    assert done.value.code == 0
    shown = capfd.readouterr().out
    for name in names():
        assert f"\n{name} " in f"\n{listed}"
        if name != "bidirectional":
            assert f"\n  {name}: " in shown
            assert all(f"{option}=" in shown for option in options_of(name))


@pytest.mark.parametrize("name", names())
def test_show(name, capfd):
    assert main(["show", name]) == 0
    shown = capfd.readouterr().out
    for title in ("equation", "source", "options", "parameters", "state", "step", "op"):
        assert f"\n{title}" in shown


def test_show_counts(capfd):
    assert main(["show", "lru", "--dim", "16"]) == 0
    shown = capfd.readouterr().out
    # B and C: 2 x 16 x 16 complex; D: 16; nu, theta, gamma: 16 each.   State: 16 complex numbers.
    assert f"{4 * 16 * 16 + 4 * 16:,} at dim 16" in shown
    assert "32 floats a sequence" in shown
    assert "            reference: any device" in shown


def test_help_and_version(capfd):
    assert main(["--help"]) == 0
    assert all(f"  {name} " in capfd.readouterr().out for name in ["train"])
    assert main([]) == 0
    usage = capfd.readouterr().out
    assert all(f"  {name} " in usage for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capfd.readouterr().out.startswith("scanl 0.")


def test_print_config_is_a_config(tmp_path, text, capfd):
    out = tmp_path / "run"
    with pytest.raises(SystemExit):
        main(["train", *TINY, "--layer", "mingru", "--layer-options.expand", "1.5", "--print_config"])
    (tmp_path / "given.yaml").write_text(capfd.readouterr().out)
    given = ["--config", str(tmp_path / "given.yaml"), "--data", str(text), "--out", str(out), "--steps", "2"]
    assert main(["train", *given]) == 0
    written = yaml.safe_load((out / "config.yaml").read_text())
    assert (written["layer"], written["layer_options"], written["steps"]) == ("mingru", {"expand": 1.5}, 2)
    assert main(["train", "--config", str(out / "config.yaml"), "--out", str(tmp_path / "again")]) == 0
    weights = [(folder / "model.safetensors").read_bytes() for folder in (out, tmp_path / "again")]
    assert weights[0] == weights[1]


def test_demo(tmp_path, text, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "ROUNDS", 2)
    assert main(["demo", "--minutes", "0.001", "--data", str(text), "--dim", "8", "--marks", "[100, 600]"]) == 0
    shown = capfd.readouterr().out
    for expected in ("this model", "gzip -9", "xz", "def ", "100 bytes of context", "600 bytes of context", "resident"):
        assert expected in shown
    assert (tmp_path / "runs" / "demo-1" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_measuring_reads_each_mark_in_chunks(monkeypatch):
    monkeypatch.setattr(demo, "WINDOW", 2)
    monkeypatch.setattr(demo, "ROUNDS", 3)
    model = build_model(TrainConfig(dim=8, depth=1)).eval()
    measured = demo.measure(model, np.arange(90, dtype=np.uint8), [50, 700])
    assert [at.context for at in measured] == [50, 700]
    assert all(len(at.speeds) == 3 and at.speed > 0 for at in measured)
    assert 10 < demo.resident_memory() < 1e6


HEAVY = {"lightning", "matplotlib", "transformers", "numba", "triton", "torch._dynamo", "sympy"}


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (
            "import scanl; from scanl.cli import main; main(['--help']); main(['--version']); main(['trian'])",
            HEAVY | {"torch", "numpy", "jsonargparse", "yaml"},
        ),
        ("import scanl; scanl.ops, scanl.layers, scanl.models, scanl.tasks", HEAVY | {"jsonargparse"}),
        (
            "import scanl; scanl.learning, scanl.hub; from scanl.cli import main; main(['list']); main(['ops']); "
            "main(['train', '--layer', 'hwak']); main(['train', '--task', 'party']); main(['show', 'lur'])",
            HEAVY,
        ),
    ],
    ids=["help", "import", "names"],
)
def test_what_is_refused_or_listed_waits_for_nothing_heavy(code, heavy):
    """Measured in modules, because seconds depend on the machine: torch takes the most, lightning as long again."""
    check = f"{code}; import sys; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_packages_are_imported_when_touched():
    """And none is missing from what `dir` and a misspelt name say."""
    packages = {path.parent.name for path in Path(scanl.__file__).parent.glob("*/__init__.py")} - {"cli"}
    assert packages <= set(dir(scanl))
    for name in packages:
        assert scanl.__getattr__(name).__name__ == f"scanl.{name}"
    with pytest.raises(AttributeError, match="module 'scanl' has no attribute 'layer'"):
        _ = scanl.layer


def test_python_m():
    done = subprocess.run([sys.executable, "-m", "scanl.cli", "show", "lur"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "scanl: unknown layer 'lur'; did you mean 'lru'?\n"
