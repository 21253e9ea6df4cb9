"""CONTRIBUTING.md, followed as a stranger would: its model is the one new file of a copy of the project."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAWS = "tokens_equal or any_cut or packed or declares or refused or gradients_are"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project with the page's model in it, and nothing else changed."""
    copy = tmp_path_factory.mktemp("stranger")
    for folder in ("src", "tests", "docs", "benchmarks"):
        # What is compiled already need not be compiled again: Python and numba know it by the time of its file.
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("_build", "made"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy)
    block, _source = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)
    file = re.match(r"# (src/\S+)\n", block)
    assert file is not None
    assert not (copy / file[1]).exists()
    (copy / file[1]).write_text(block, "utf-8")
    return copy


def run(folder, *arguments):
    """The output of `python ...` there; fails with all that it said."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_model_of_the_page_passes_lint(project):
    run(project, "-m", "ruff", "check", "--no-cache", "src")
    run(project, "-m", "ruff", "format", "--check", "--no-cache", "src")


def test_the_model_of_the_page_is_a_layer_like_the_others(project, tmp_path):
    """It passes laws, of which each names it; it has a page; commands know it.

    `scanl list` prints it, `scanl train` takes a step with it. One process imports torch once.
    """
    (tmp_path / "book.txt").write_text("Once upon a time there was a state. " * 40)
    tiny = "--accelerator cpu --dim 16 --depth 1 --batch-size 2 --sequence-length 16 --eval-bytes 64 --steps 1"
    train = ["train", "--data", str(tmp_path / "book.txt"), "--layer", "moving_average", *tiny.split()]
    train += ["--out", str(tmp_path / "run")]
    words = ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider", "-q", "-rA"]
    words += ["tests/test_layers.py", "-k", f"({LAWS}) and moving_average"]
    code = (
        "import sys; sys.path.append('docs'); from making.models import page; from scanl.layers import get",
        "print(page(get('moving_average'), None))",
        "from scanl.cli import main; from scanl.learning.questions import next_token; next_token.SAMPLE_BYTES = 20",
        f"import pytest; raise SystemExit(main(['list']) or main({train}) or pytest.main({words}))",
    )
    said = run(project, "-c", "\n".join(code))
    assert said.startswith("# MovingAverage\n")
    assert "arXiv:0000.00000" in said[: said.index("\nmoving_average ")]
    assert (tmp_path / "run" / "model.safetensors").is_file()
    for law in ("tokens_equal_the_whole", "packed_sequences_equal_each_alone", "every_layer_declares_what_it_is"):
        assert re.search(rf"PASSED \S+::test_{law}\[\S*moving_average\S*\]", said), said
