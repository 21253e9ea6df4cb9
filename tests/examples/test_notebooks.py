"""The code cells of each notebook run in their order, in small. Notebooks are kept without outputs."""

import json
import re
from pathlib import Path

import matplotlib
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = {"forecasters_day": ("pandas", "sklearn", "statsmodels", "river"), "students_tour": ()}


def cells(name):
    return json.loads((EXAMPLES / f"{name}.ipynb").read_text("utf-8"))["cells"]


def test_every_notebook_is_known():
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == PACKAGES.keys()


@pytest.mark.parametrize("name", PACKAGES)
def test_notebook_has_text_and_no_outputs(name):
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    assert not [cell for cell in code if cell["outputs"] or cell["execution_count"]]
    assert sum(cell["cell_type"] == "markdown" for cell in cells(name)) >= 5


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.usefixtures("registered")
def test_notebook_runs(name, tmp_path, monkeypatch):
    for package in PACKAGES[name]:
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    namespace = {}
    text = "\n".join("".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code")
    small, count = re.subn("QUICK = False", "QUICK = True", text)
    assert count == 1
    exec(compile(small, name, "exec"), namespace)
    matplotlib.pyplot.close("all")
