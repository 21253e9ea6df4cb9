"""The `scanl` command: what it prints, and one line for every mistake."""

import inspect
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import scanl
from scanl import data
from scanl.cli import COMMANDS, demo, main
from scanl.cli.layers import options_of
from scanl.cli.train import LOOP_OPTIONS, parse
from scanl.layers import get, names
from scanl.learning import RunFolder
from scanl.learning.run.config import TrainConfig, build_model
from scanl.models import LanguageModel, PromptLookup
from scanl.models.block import CHANNEL_MIXERS, NORMS
from scanl.models.decoding.drafts import ModelDraft
from scanl.models.saving import recorded

COVERS = ["cli/data", "cli/demo", "cli/layers", "cli/ops", "cli/parser", "errors"]

pytestmark = pytest.mark.cells_by_loop("name")

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
        ("train --layer-options.width wide", "hawk: width is 'wide', expected an integer or None"),
        ("train --layer mamba --layer-options.state_dim abc", "mamba: state_dim is 'abc', expected an integer"),
        ("train --channel-options.expand abc", "gated_mlp: expand is 'abc', expected a number"),
        ("train --dropout 1", "block: dropout is 1.0, expected at least 0 and below 1"),
        ("train --data parity --until 2", "until is 2, expected from 0 to 1 because parity is scored by accuracy"),
        ("train --data adding --until -1", "until is -1, expected at least 0 because adding is scored by mean squared"),
        ("help trian", "unknown command 'trian'; did you mean 'train'?"),
        ("train --channel-options.expnd 8", "'expnd'"),
        ("train --channel-mixer gated", "unknown channel mixer 'gated'; did you mean 'gated_mlp'?"),
        ("train --layer bidirectional", "bidirectional"),
        ("train --dimm 8", "unknown option of train '--dimm'; did you mean '--dim'?"),
        ("train --dim wide", "train: dim is wide, expected an integer"),
        ("train --steps few", "train: steps is few, expected an integer or none"),
        ("train --dim 0", "stack: dim is 0, expected at least 1"),
        ("train --config nothing.yaml", "train: config is nothing.yaml, which is not a file"),
        ("train --data nothing.txt", "train: data is nothing.txt, which does not exist"),
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
        ("--prompt-file nothing.txt", "prompt_file is nothing.txt, which does not exist"),
        ("--prompt a --prompt-file -", "prompt and prompt_file are both given, expected one of them"),
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


def test_generate_streams_the_prompt_and_as_many_bytes(run, monkeypatch, capfdbinary):
    def generated(*options: str) -> bytes:
        assert main(["generate", str(run), "--prompt", "añ", "--bytes", "40", *options]) == 0
        return capfdbinary.readouterr().out

    first = generated("--seed", "1")
    assert first.startswith("añ".encode())
    assert len(first) == 3 + 40 + 1
    assert generated("--seed", "1") == first
    assert generated("--seed", "2") != first
    assert generated("--temperature", "0") == generated("--top_k", "1", "--seed", "5")
    for draft, proposing in (("lookup", PromptLookup), (str(run), ModelDraft)):
        propose, calls = proposing.propose, []
        counted = lambda *given, own=propose, calls=calls: (calls.append(given), own(*given))[1]  # noqa: E731
        monkeypatch.setattr(proposing, "propose", counted)
        assert generated("--draft", draft, "--seed", "1") == first
        assert calls


def test_generate_without_a_prompt_begins_a_file(run, capfdbinary):
    assert main(["generate", str(run), "--bytes", "5"]) == 0
    assert len(capfdbinary.readouterr().out) == 6


def test_a_prompt_from_a_file_or_the_standard_input(run, tmp_path, monkeypatch, capfdbinary):
    def generated(*options: str) -> bytes:
        assert main(["generate", str(run), "--bytes", "9", "--seed", "1", *options]) == 0
        return capfdbinary.readouterr().out

    (tmp_path / "prompt").write_bytes(b"abc\xff")  # bytes, of no encoding
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc\xff")))
    assert generated("--prompt-file", str(tmp_path / "prompt")).startswith(b"abc\xff")
    assert generated("--prompt-file", "-") == generated("--prompt-file", str(tmp_path / "prompt"))
    assert generated("--prompt", "abc") != generated("--prompt-file", "-")  # which has been read to its end


def test_a_file_is_no_run_folder(tmp_path, text, capfd):
    (tmp_path / "file.txt").write_text("kept")
    line = refused(capfd, "train", "--data", str(text), "--out", str(tmp_path / "file.txt"))
    assert "file.txt, which is a file, expected a new folder; choose another --out" in line
    assert (tmp_path / "file.txt").read_text() == "kept"


def test_paths_are_data(text):
    config, _ = parse(["--data", "a", str(text)])
    assert config.source.data == ["a", str(text)]


def test_a_run_is_loaded_as_a_model(run):
    """From its folder, in Python, without a word of how it was trained."""
    model, read = LanguageModel.load(run), RunFolder.open(run).load_model()
    assert recorded(model) == recorded(read)
    tokens = torch.tensor([[97, 98, 99]])
    torch.testing.assert_close(model(tokens)[0], read(tokens)[0], rtol=0, atol=0)


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


def test_list_names_every_layer(capfd):
    assert main(["list"]) == 0
    listed = capfd.readouterr().out
    assert all(f"\n{name} " in f"\n{listed}" for name in names())
    with pytest.raises(SystemExit):
        main(["train", "--help", "model"])
    shown = capfd.readouterr().out
    assert all(name in shown for name in [*CHANNEL_MIXERS, *NORMS])


@pytest.mark.parametrize("name", names())
def test_every_option_says_what_it_means(name):
    """In its annotation, from which the docstring and `show` take it."""
    assert all(option.meaning for option in options_of(name))


def test_layers_share_the_names_of_their_options():
    """At most 150 names in all: a concept has the name that `scanl.layers.options` gives it."""
    assert len({parameter for name in names() for parameter in inspect.signature(get(name)).parameters}) <= 150


@pytest.mark.parametrize("name", names())
def test_show(name, capfd):
    assert main(["show", name, "--dim", "64"]) == 0
    shown = capfd.readouterr().out
    assert all(f"{option.name}: {option.meaning}." in " ".join(shown.split()) for option in options_of(name))
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
    assert main(["help"]) == 0
    assert capfd.readouterr().out.startswith("usage: scanl COMMAND")
    with pytest.raises(SystemExit) as done:
        main(["help", "eval"])
    assert done.value.code == 0
    assert capfd.readouterr().out.startswith("usage: scanl eval")
    assert main([]) == 0
    usage = capfd.readouterr().out
    assert all(f"  {name} " in usage for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capfd.readouterr().out.startswith("scanl 0.")


@pytest.mark.usefixtures("short_sample")
def test_print_config_is_a_config(tmp_path, text, capfd):
    out = tmp_path / "run"
    with pytest.raises(SystemExit):
        main(["train", *TINY, "--layer", "mingru", "--layer-options.expand", "1.5", "--print_config"])
    (tmp_path / "given.yaml").write_text(capfd.readouterr().out)
    given = ["--config", str(tmp_path / "given.yaml"), "--data", str(text), "--out", str(out), "--steps", "2"]
    assert main(["train", *given]) == 0
    written = yaml.safe_load((out / "config.yaml").read_text())
    assert (written["stack"]["layer"], written["stack"]["layer_options"]) == ("mingru", {"expand": 1.5})
    assert (written["training"]["steps"], written["source"]["data"]) == (2, [str(text)])
    assert main(["train", "--config", str(out / "config.yaml"), "--out", str(tmp_path / "again")]) == 0
    weights = [(folder / "model.safetensors").read_bytes() for folder in (out, tmp_path / "again")]
    assert weights[0] == weights[1]


@pytest.mark.usefixtures("short_sample")
def test_demo(tmp_path, text, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "ROUNDS", 2)
    monkeypatch.setattr(demo, "WINDOW", 20)
    calls, compressed = [], data.text.text.compressed
    monkeypatch.setattr("scanl.data.text.text.compressed", lambda text: calls.append(text) or compressed(text))
    assert main(["demo", "--minutes", "0.001", "--data", str(text), "--dim", "8", "--marks", "[100, 600]"]) == 0
    assert len(calls) == 1  # for the table and for the picture: it takes seconds
    shown = capfd.readouterr().out
    for expected in ("this model", "gzip -9", "xz", "def ", "100 bytes of context", "600 bytes of context", "resident"):
        assert expected in shown
    assert (tmp_path / "runs" / "demo-1" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_measuring_reads_each_mark_in_chunks(monkeypatch):
    monkeypatch.setattr(demo, "WINDOW", 2)
    monkeypatch.setattr(demo, "ROUNDS", 3)
    model = build_model(TrainConfig.of(dim=8, depth=1), data.Text.question).eval()
    measured = demo.measure(model, np.arange(90, dtype=np.uint8), [50, 700])
    assert [at.context for at in measured] == [50, 700]
    assert all(len(at.speeds) == 3 and at.speed > 0 for at in measured)
    assert 10 < demo.resident_memory() < 1e6


HEAVY = {"lightning", "matplotlib", "transformers", "numba", "triton", "torch._dynamo", "sympy"}
# One after the other, in one process: what may not be imported yet becomes less.
WAITING = [
    (
        "import scanl; from scanl.cli import main; main(['--help']); main(['--version']); main(['trian']); "
        "main(['forecast', 'none']); main(['train', '--data', 'none.csv', '--question', 'forecast', '--target', 'y'])",
        HEAVY | {"torch", "numpy", "jsonargparse", "yaml"},
    ),
    ("scanl.ops, scanl.layers, scanl.models, scanl.tasks", HEAVY | {"jsonargparse"}),
    (
        "scanl.learning, scanl.hub; main(['list']); main(['ops']); "
        "main(['train', '--layer', 'hwak']); main(['train', '--data', 'party']); main(['show', 'lur'])",
        HEAVY,
    ),
]


def test_what_is_refused_or_listed_waits_for_nothing_heavy():
    """Measured in modules, because seconds depend on the machine: torch takes the most, lightning as long again."""
    checks = [f"{code}; print('imported:', sorted({heavy} & sys.modules.keys()))" for code, heavy in WAITING]
    command = [sys.executable, "-c", "\n".join(["import sys", *checks])]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=True)
    assert [line for line in done.stdout.splitlines() if line.startswith("imported:")] == ["imported: []"] * 3


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


def test_options_of_the_training_loop_leave_out_those_that_backtests_read():
    assert {"steps", "pretrain", "algorithm", "clip", "devices", "until", "recursive"} <= LOOP_OPTIONS
    assert not LOOP_OPTIONS & {"minutes", "lr", "out", "seed", "dim", "horizon", "split"}
