"""CONTRIBUTING.md, followed as a stranger would: its model is written into a copy of the project and tested there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAWS = "tokens_equal or any_cut or packed or declares or refused or gradients_are"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project with the page's model in it, and in the README as the page says."""
    copy = tmp_path_factory.mktemp("stranger")
    for folder in ("src", "tests", "docs"):
        # Kernels that are compiled already need not be compiled again: numba knows them by the time of their file.
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("*.pyc"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)
    place = re.match(r"# (src/\S+)\n", block)
    assert place is not None
    assert not (copy / place[1]).exists()
    (copy / place[1]).write_text(block, "utf-8")
    readme = (copy / "README.md").read_text("utf-8")
    table = re.compile(r"\| layer \|.*?\n(?=\n)", re.DOTALL)
    (copy / "README.md").write_text(table.sub(lambda _: run(copy, "scanl.cli", "list", "--table"), readme), "utf-8")
    return copy


def run(folder, module, *arguments):
    """The output of `python -m module` there; fails with all that it said."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_model_of_the_page_passes_lint(project):
    run(project, "ruff", "check", "--no-cache", "src")
    run(project, "ruff", "format", "--check", "--no-cache", "src")


def test_the_model_of_the_page_passes_the_laws(project):
    """Some of them; a law that never names it would be no law over it."""
    said = run(
        project, "pytest", "-p", "no:cacheprovider", "-q", "-rA", "tests/test_layers.py", "tests/test_docs.py",
        "-k", f"({LAWS}) and moving_average or readme_table",
    )  # fmt: skip
    for law in ("tokens_equal_the_whole", "packed_sequences_equal_each_alone", "every_layer_declares_what_it_is"):
        assert re.search(rf"PASSED \S+::test_{law}\[\S*moving_average\S*\]", said), said
    assert "PASSED tests/test_docs.py::test_readme_table_is_the_registry" in said


def test_the_command_line_knows_the_model_of_the_page(project):
    """`scanl show` prints its section of docs/layers.md."""
    assert "parameters" in run(project, "scanl.cli", "show", "moving_average")
