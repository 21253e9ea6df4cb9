"""Every command and every block of Python in the README and the pages runs, in small where it would take long.

Those of a page run in their order, in one folder and one namespace, as a newcomer would type them. A command of a kind
that is not known here fails, so that none goes untried.
"""

import argparse
import csv
import functools
import importlib
import importlib.util
import itertools
import re
import shlex
import shutil
import sys
import tomllib
import warnings
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pytest
import torch
from PIL import Image

import published
from making import filling
from scanl.cli import COMMANDS, main
from scanl.cli.train import parse
from scanl.data import sources
from scanl.data.files import folders
from scanl.learning import build_model
from scanl.models import LanguageModel, Stack
from scanl.ops import registry

pytestmark = pytest.mark.usefixtures("short_sample")

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
PAGES = {
    str(path.relative_to(ROOT)): filling.filled(path.read_text(encoding="utf-8"))
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *filling.pages()]
}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

TINY = "--accelerator cpu --dim 16 --depth 1 --batch-size 2"
TEXT = "--sequence-length 16 --eval-bytes 64"
TASK = "--data-options.length 10 --eval-examples 4"
MNIST = "--data-options.aside 4 --eval-examples 2"
TABLE = "--sequence-length 16 --horizon 3"
PICTURE = "--prompt-file seven.png --prompt-steps 780"  # of 784
INSPECTED = "--dim 16 --steps 32"  # a run has its own width
KERNELS = "--dim 8 --steps 3 --heads 1 --key 3 --value 3"


def blocks(page: str) -> list[tuple[str, str]]:
    """What a reader would run, in order, each with its language."""
    return [(language, text) for language, text in FENCE.findall(PAGES[page]) if language not in ("text", "toml")]


def commands(page: str) -> list[list[str]]:
    """Every command of a page, as words."""
    return [words for language, text in blocks(page) if language == "console" for words in lines(text)]


def lines(text: str) -> list[list[str]]:
    """The commands of a block, as words."""
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def spans(page: str) -> list[str]:
    """What stands in the running text as code."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", PAGES[page]))]


def shortened(words: list[str]) -> list[str]:
    """A command of scanl with what makes it short after it, where the later option counts."""
    command, options = words[0], words[1:]
    more = ""
    if command == "train" and "pretrained" in options:
        more = "--horizon 3"
    elif command == "train" and "--resume" not in options:
        named = "--data" in options and options[options.index("--data") + 1] in sources.names()
        own = TASK if named else TABLE if "--question" in options else TEXT
        own = MNIST if {"mnist", "mnist_pixels"} & {*options} else "" if "letters" in options else own
        own = own.removesuffix(" --horizon 3") if "generate" in options else own
        more = f"{TINY} {own}"
        more += " --minutes 0.001" if "--minutes" in options else " --steps 2"
        if own == TEXT and "--data" not in options:
            more += " --data book.txt"  # in place of the standard library
    elif command == "generate":
        most = {"runs/pixels": PICTURE, "runs/co2-next": "--steps 3", "runs/songs": "--steps 3"}
        more = most.get(options[0], "--bytes 3")
    elif command == "inspect" and "--list" not in options:
        more = INSPECTED
    elif command == "learn" and "--resume" not in options:
        more = "--dim 4 --channel-mixer none --samples 20"
    elif command == "lr":
        more = f"{TINY} {TEXT} --trials 20"
    elif command == "eval" and "--length" in options:
        more = "--length 20 --count 2"
    elif command == "warmup" and not torch.cuda.is_available():
        more = KERNELS + (" --dtype float32" if "--autocast" not in options else "")
    return [*words, *more.split()]


class Parsed(Exception):
    """A benchmark's options have been read."""


def parse_benchmark(words: list[str], monkeypatch) -> None:
    """Read the options of `python benchmarks/NAME.py ...` with its own parser, and go no further."""
    script = ROOT / words[1]
    assert script.is_file(), words
    if script.stem == "ahead_of_time":
        pytest.importorskip("triton")
    read = argparse.ArgumentParser.parse_args

    def parse_args(self, *given):
        read(self, *given)
        raise Parsed

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patched.setattr(sys, "argv", words[1:])
        patched.delenv("TRITON_INTERPRET", raising=False)
        with pytest.raises(Parsed):
            importlib.import_module(".".join(script.relative_to(ROOT / "benchmarks").with_suffix("").parts)).main()


def try_command(words: list[str], monkeypatch) -> None:
    words = list(itertools.dropwhile(re.compile(r"[A-Z_]+=").match, words))  # the environment
    program = words[0].removeprefix(".venv/bin/")
    if program == "make":
        assert re.search(rf"^{words[1]}:", MAKEFILE, re.MULTILINE), words
    elif program == "python":
        parse_benchmark(words, monkeypatch)
    elif program == "pytest":
        assert (ROOT / words[1]).is_file(), words
    elif program == "pip" and "--target" in words:
        assert re.fullmatch(r"triton==\d\.\d+\.\*", words[-1]), words  # another triton, to one side
    elif program == "pip":
        extra = re.fullmatch(r"install -e \.(?:\[([\w,]+)\])?", " ".join(words[1:]))
        assert extra is not None, words
        assert set((extra[1] or "").split(",")) <= {"", *EXTRAS}, words
    elif words[:3] == ["scanl", "data", "get"]:
        assert words[3] in folders, words  # a test downloads nothing
    elif program == "scanl":
        assert main(shortened(words[1:])) == 0, words
    else:
        pytest.fail(f"nobody knows how to try {shlex.join(words)}")


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_of_known_kinds(page):
    assert {language for language, _ in FENCE.findall(PAGES[page])} <= {"python", "console", "text", "toml"}


def test_records_are_tried_by_the_tests_of_their_pages():
    """Tests of `data.published.get` read those of CONTRIBUTING.md, tests of its records those of docs/data.md."""
    pages = {page for page in PAGES for language, _ in FENCE.findall(PAGES[page]) if language == "toml"}
    assert pages == {"CONTRIBUTING.md", "docs/data.md"}


@pytest.fixture
def kernels(monkeypatch):
    """Without a GPU the references run in the place of Triton's kernels."""
    for op in () if torch.cuda.is_available() else registry.every():
        if "triton" in op.backends:

            def run(*operands, op=op, cu_seqlens=None, **more):
                y_shape = op.output_shape(op.sizes(dict(zip(op.names, operands, strict=True)), cu_seqlens))
                return op.evaluate("reference", operands, y_shape, cu_seqlens=cu_seqlens, **more)

            monkeypatch.setitem(op.backends, "triton", replace(op.backends["triton"], run=run))


# What makes the Python of a page small: the text that is replaced must be there.
SMALLER = {
    "docs/hub.md": {
        "hidden_size=768": "hidden_size=32",
        "vocab_size=8192": "vocab_size=64",
        "8192, (1, 1024)": "64, (1, 32)",
    }
}
NEEDS = {
    "import Trainer": "accelerate",
    "import onnxruntime": "onnxruntime",
    "sb3_contrib": "sb3_contrib",
    "RecurrentPPO": "sb3_contrib",
    "torchrl": "torchrl",
}  # what a block says: a package without which it does not run
OWN_TEST = {"CONTRIBUTING.md"}  # tests/docs/test_contributing.py follows this page


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and page not in OWN_TEST])
@pytest.mark.usefixtures("kernels", "registered")
def test_examples_run(page, tmp_path, monkeypatch, capfd):
    """As a reader runs them who has some notes, a book and recordings."""
    if page == "docs/start.md":
        pytest.importorskip("statsmodels", reason="statsmodels is not installed: pip install 'scanl[statsmodels]'")
    if page in ("docs/forecasting.md", "docs/forecasts.md", "docs/forecasters.md", "docs/start.md"):
        pytest.importorskip("pandas", reason="pandas is not installed: pip install 'scanl[series]'")
        pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'scanl[sklearn]'")
    if page == "docs/streams.md":
        pytest.importorskip("river", reason="river is not installed: pip install 'scanl[online]'")
    if any(language == "python" and "transformers" in text for language, text in blocks(page)):
        pytest.importorskip("transformers", reason="transformers is not installed: pip install 'scanl[hub]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "today.txt").write_text("Once more, then. " * 40)
    (tmp_path / "book.txt").write_text("Once upon a time there was a state. " * 40)
    for number in range(24):
        (letter := tmp_path / "letters" / "ab"[number % 2] / f"{number}.txt").parent.mkdir(parents=True, exist_ok=True)
        letter.write_text("Dear " + "AB"[number % 2] + ", " * number)
    (tmp_path / "songs").mkdir()
    for number in range(6):
        published.wav(tmp_path / "songs" / f"{number}.wav", bytes(range(80)))
    saturdays = [date(1958, 3, 29) + timedelta(weeks=week) for week in range(48)]
    weeks = [f"{day:%Y%m%d},{week % 13}" for week, day in enumerate(saturdays)]
    (tmp_path / "co2.csv").write_text("\n".join(["date,co2", *weeks]))
    if page in ("README.md", "docs/untrained.md"):
        pandas = pytest.importorskip("pandas", reason="pandas is not installed: pip install 'scanl[series]'")
        days = {"day": pandas.date_range("2024-01-01", periods=48), "sold": [day % 13 for day in range(48)]}
        pandas.DataFrame(days).to_csv(tmp_path / "sales.csv", index=False)
        (tmp_path / "sales").mkdir()
        pandas.DataFrame({**days, "item": "one"}).to_parquet(tmp_path / "sales" / "one.parquet", index=False)
    if page in ("docs/data.md", "docs/own_files.md"):
        monkeypatch.setenv("SCANL_DATA", str(tmp_path / "downloads"))
        monkeypatch.setattr(folders["mnist"], "sha256", {})
        monkeypatch.setattr(folders["mnist"], "counts", {})
        (tmp_path / "downloads" / "mnist").mkdir(parents=True)
        published.WRITERS["mnist"](tmp_path / "downloads" / "mnist")
        Image.new("L", (28, 28)).save(tmp_path / "seven.png")
    if page == "docs/training_loop.md":  # what Lightning and Trainer say of themselves is theirs
        warnings.simplefilter("default")
    if page == "docs/cpu_kernels.md":
        monkeypatch.setenv("NUMBA_CACHE_DIR", "")  # the page sets it; the test sets it back
    if page == "docs/checkpoints.md":
        _checkpoint("state-spaces/mamba-130m-hf")
        shutil.copyfile(ROOT / "tests/hub/originals/rwkv6/rwkv.pth", "RWKV-x060-World-1B6.pth")
        shutil.copytree(ROOT / "tests/hub/forecasters/flowstate", "ibm-granite/granite-timeseries-flowstate-r1")
        shutil.copytree(ROOT / "tests/hub/forecasters/tirex2", "NX-AI/TiRex-2")
    smaller = dict(SMALLER.get(page, {}))
    namespace: dict = {}
    for language, text in blocks(page):
        if language == "console":
            for words in lines(text):
                try_command(words, monkeypatch)
            continue
        if file := re.match(r"# (\w+\.py)\n", text):  # a file of the reader's own
            (tmp_path / file[1]).write_text(text)
            continue
        if any(words in text and importlib.util.find_spec(package) is None for words, package in NEEDS.items()):
            continue
        for long in [long for long in smaller if long in text]:
            text = text.replace(long, smaller.pop(long))
        exec(compile(text, page, "exec"), namespace)
    assert not smaller
    out = capfd.readouterr().out
    if page == "README.md":
        assert [words[:2] for words in commands(page) if words[0] != "make"][:3] == [
            ["pip", "install"],
            ["scanl", "train"],
            ["scanl", "generate"],
        ]
        assert namespace["logits"].shape == (1, 35, 256)
        assert "Once " in out
    if page == "docs/index.md":
        assert [out] == [text for language, text in FENCE.findall(PAGES[page]) if language == "text"]
    if page == "docs/start.md":
        assert "cpu: can run" in out
        assert (tmp_path / "future.png").is_file()
    if page == "docs/cpu_kernels.md":
        assert "define " in out
    if page == "docs/hub.md":
        assert re.search(r"MambaMixer .*selective_scan.* s before, .* times as fast", out, re.DOTALL)
    if page == "docs/checkpoints.md":
        assert (tmp_path / "tuned" / "model.safetensors").is_file()


def _checkpoint(path: str) -> None:
    """A tiny Mamba, where the page names one of the hub."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=1, vocab_size=64)
    MambaForCausalLM(config).save_pretrained(path)


def test_parity_is_learnt_for_any_length(tmp_path, monkeypatch, capfd):
    """The first example of docs/tasks.md as it stands, but for the number of examples that are scored: seconds."""
    monkeypatch.chdir(tmp_path)
    train, evaluate = commands("docs/tasks.md")
    assert main([*train[1:], "--accelerator", "cpu"]) == 0
    assert "the score is as good as --until 0.99 after step" in capfd.readouterr().err
    assert main([*evaluate[1:], "--count", "20"]) == 0
    title, score, _, _ = capfd.readouterr().out.splitlines()
    assert "length=10000" in title
    assert float(score.split()[-1]) >= 0.99


def test_commands_in_the_text_are_right(tmp_path, monkeypatch, capfd):
    """Those between the lines stand for many, with NAME and PATH in them: their names and options are there."""
    helps = {}
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            main([name, "--help", "all"])
        helps[name] = {"--help", *re.findall(r"--[\w-]+", capfd.readouterr().out)}
    of_benchmarks = {option for path in (ROOT / "benchmarks").rglob("*.py") for option in _options(path)}
    tried = 0
    for page in PAGES:
        for span in spans(page):
            words = span.split()
            program = words[0].removeprefix(".venv/bin/")
            if program == "scanl" and words[1:2] and words[1] != "COMMAND":
                known = {"--help", "--version"} if words[1].startswith("-") else helps[words[1]]
                assert {_stem(word) for word in words if word.startswith("--")} <= known, (page, span)
            elif program == "make" and words[1:]:
                try_command(words, monkeypatch)
            elif program == "python" and words[1:2] and words[1].startswith("benchmarks/"):
                parse_benchmark([word.replace("NAME", "mqar-gated_deltanet") for word in words], monkeypatch)
            elif re.fullmatch(r"benchmarks/[\w/]+\.py", program):
                assert (ROOT / program).is_file(), (page, span)
            elif program.startswith("--"):
                assert _stem(program) in of_benchmarks.union(*helps.values()), (page, span)
            elif words[0] != program:
                assert program in ("pre-commit", "pytest"), (page, span)
            else:
                continue
            tried += 1
    assert tried > 40


ELSEWHERE = {  # where a benchmark runs that needs a GPU, data or a compiler, or is no program
    "ahead_of_time": "tests/benchmarks/test_ahead_of_time.py",
    "byte_model": "tests/models/test_byte_models.py",
    "classify": "tests/benchmarks/test_evidence.py",
    "cost": "tests/benchmarks/test_plans.py",
    "divided": "tests/benchmarks/test_divided.py",
    "gpu": "tests/benchmarks/test_benchmarks.py",
    "layers": "tests/benchmarks/test_benchmarks.py",
    "long_sequences": "tests/benchmarks/test_evidence.py",
    "online": "tests/benchmarks/test_benchmarks.py",
    "ops": "tests/benchmarks/test_benchmarks.py",
    "originals": "tests/benchmarks/test_originals.py",
    "plans": "tests/benchmarks/test_plans.py",
    "pretrained": "tests/benchmarks/test_tables.py",
    "recall": "tests/benchmarks/test_benchmarks.py",
    "sharded": "tests/benchmarks/test_sharded.py",
    "tables": "tests/benchmarks/test_tables.py",
    "translation": "tests/benchmarks/test_translation.py",
    "tuned": "tests/benchmarks/test_tables.py",
    "unseen_tables": "tests/benchmarks/test_tables.py",
    "zoo": "tests/examples/test_zoo.py",
}


def absent(*_):
    """A program that is not timed."""
    from harness import Contender

    return Contender(None)


BESIDE_ATTENTION = {  # in this process, without programs that compile for seconds
    "in_process": lambda function, *arguments: function(*arguments),
    "torch_associative": absent,
    "in_jax": lambda _: absent,
}


def train_here(words: list[str], out: Path, threads: int) -> float:
    """`trained` of benchmarks/quality/source.py in this process, on a short text."""
    assert main([*words, "--data", str(ROOT / "CONTRIBUTING.md"), "--eval-bytes", "64", "--accelerator", "cpu"]) == 0
    return 0.0


def train_rows_here(words: list[str], out: Path, threads: int) -> float:
    """`trained` of benchmarks/quality/source.py in this process."""
    assert main([*words, "--accelerator", "cpu"]) == 0
    return 0.0


HERE = {  # the words after `--quick`, what is made smaller still, and the package that is needed
    "speed.algorithms": ("bptt diagonal_rtrl", {"LENGTHS": (16, 32)}, "torch"),
    "speed.beside_attention": (
        "",
        {"DIM": 64, "WIDTH": 64, "DEPTH": 1, "DTYPES": (torch.float32,), **BESIDE_ATTENTION},
        "torch",
    ),
    "speed.cells": ("ornn_cell indrnn", {}, "torch"),
    "speed.hub": ("short_convolution GRU", {}, "transformers"),
    "speed.compiled_step": ("gru", {}, "numba"),
    "speed.forecasters": ("one", {}, "tirex2"),
    "speed.first_tokens": ("gru", {}, "numba"),
    "speed.quantized": ("layers", {"LAYERS": {"gru": 1}, "WEIGHTS": ("int8",)}, "numba"),
    "speed.endless": ("lru", {}, "river"),
    "speed.restarts": ("gru", {}, "torch"),
    "speed.segments": ("block_recurrent", {}, "block_recurrent_transformer_pytorch"),
    "speed.exact": ("gru hawk", {}, "torch"),
    "speed.follow": ("at_once", {"TRAINING": 300}, "pandas"),
    "speed.long_attention": ("rmt", {}, "torch"),
    "speed.memories": ("rdn|linear attention, 4096 steps", {"LOOP": (1, 5, 8), "LONG": (1, 20, 2, 4)}, "torch"),
    "speed.sessions": ("drafts", {}, "torch"),
    "speed.forms": ("", {"GPUS": (8, 32)}, "torch"),
    "speed.shards": ("jsonl", {}, "pyarrow"),
    "speed.stages": ("", {}, "numba"),
    "speed.stream": ("--layers lru", {}, "torch"),
    "speed.recurrent": ("GRU --shapes 1", {}, "torch"),
    "speed.floors": ("gru", {}, "torch"),
    "speed.first_calls": ("gru", {}, "numba"),
    "quality.agents": ("control --models gru", {}, "popgym"),
    "quality.offline": ("recall --layers lru", {}, "popgym"),
    "quality.adapting": ("gated_deltanet", {}, "peft"),
    "quality.packing": ("text=README.md", {"SIZE": 4000}, "torch"),
    "quality.portable": ("time", {"shipped": lambda: LanguageModel(256, Stack(8, 1, "mingru")), "STEPS": 2}, "numba"),
    "quality.needs": ("hidden", {}, "sklearn"),
    "quality.serve": ("mistakes", {}, "fastapi"),
    "quality.capacity": ("", {"STEPS": 2}, "torch"),
    "quality.conditioning": ("columnar", {}, "torch"),
    "quality.small_c": ("digits", {}, "sklearn"),
    "quality.exports": ("indrnn", {}, "onnxruntime"),
    "quality.forward_learning": ("adding", {}, "torch"),
    "quality.lorenz": ("", {}, "torch"),
    "quality.online_memory": ("diagonal_rtrl", {}, "torch"),
    "quality.forecast": ("spacetime", {"SPACETIME": {"dim": 16, "depth": 1, "num_groups": 16}}, "statsmodels"),
    "quality.arena": ("listops", {"LAYERS": {"linear_rnn": {}}, "trained": train_rows_here}, "torch"),
    "quality.sizes": ("width", {}, "torch"),
    "quality.source": ("hawk", {"trained": train_here}, "torch"),
    "quality.settling": ("bptt penalty", {}, "torch"),
    "quality.tasks": ("elman --short --tasks parity", {"COUNT": 4}, "torch"),
}


# More than a second and a half:
LONG = {"speed.endless", "speed.first_calls", "speed.first_tokens", "speed.follow", "speed.memories"}
LONG |= {"quality.conditioning", "quality.lorenz", "quality.packing", "quality.sizes"}
LONG |= {"quality.small_c", "quality.source"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in HERE])
def test_benchmarks_run(name, tmp_path, monkeypatch, capfd):
    """Each adds its rows; a second run measures nothing again."""
    words, sizes, package = HERE[name]
    pytest.importorskip(package, reason=f"{package} is not installed")
    benchmark = importlib.import_module(name)
    for key, size in sizes.items():
        monkeypatch.setattr(benchmark, key, size)
    if name == "speed.memories":  # its default argument was read before
        small = functools.partial(benchmark.versus_attention, shape=sizes["LONG"])
        monkeypatch.setitem(benchmark.CASES, "linear attention, 4096 steps", small)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # it would hold for all later tests
    arguments = words.split("|") if "|" in words else words.split()
    monkeypatch.setattr(sys, "argv", [name, *arguments, "--quick", "--results", str(tmp_path)])
    texts = []
    for _ in range(2):
        benchmark.main()
        (path,) = (tmp_path / "quick").glob("*.csv")
        texts.append(path.read_text(encoding="utf-8"))
    assert texts[0].count("\n") > 1
    assert texts[0] == texts[1]
    if name == "speed.beside_attention":
        assert {row["part"] for row in csv.DictReader(texts[0].splitlines())} == benchmark.PARTS.keys()
    if name == "speed.stream":
        for row in csv.DictReader(texts[0].splitlines()):
            assert float(row["error"]) <= 1e-5, row


@pytest.mark.parametrize(("name", "table"), [("seen_to_learn", "SEEN"), ("memory_claims", "CLAIMS")])
def test_commands_of_what_was_seen(name, table, tmp_path, monkeypatch):
    """Their training takes long: they are read, and their models built. All score the same."""
    benchmark = importlib.import_module(f"quality.{name}")

    def scanl(command, *arguments):
        if command == "train":
            config, _ = parse(arguments)
            config.check()
            build_model(config, config.open_source().question)
        return "  this model  0.5\n"

    monkeypatch.setattr(benchmark, "scanl", scanl)
    if name == "seen_to_learn":
        monkeypatch.setattr(benchmark, "nrmse", lambda *given: 0.5)
    else:
        monkeypatch.setattr(benchmark, "FOLDER", tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--results", str(tmp_path)])
    assert benchmark.main() == 1
    rows = list(csv.DictReader((tmp_path / f"{name}.csv").read_text().splitlines()))
    assert {row["name"] for row in rows} == set(getattr(benchmark, table))


def test_every_benchmark_of_the_pages_runs():
    named = set(re.findall(r"benchmarks/(?:\w+/)?(\w+)\.py", "\n".join(PAGES.values())))
    here = {name.partition(".")[2] for name in HERE}
    assert named <= here | ELSEWHERE.keys() | {"memory_claims", "seen_to_learn"}
    for name, test in ELSEWHERE.items():
        assert name in (ROOT / test).read_text(encoding="utf-8")


def _options(path: Path) -> list[str]:
    return re.findall(r'add_argument\("(--[\w-]+)"', path.read_text(encoding="utf-8"))


def _stem(option: str) -> str:
    return re.split(r"[=.]", option)[0]
