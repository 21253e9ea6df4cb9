"""The code cells of each notebook run in their order, in small. Notebooks are kept with the outputs of a whole run."""

import json
import re
from pathlib import Path

import matplotlib
import pytest

from making import notebooks

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = {"forecasters_day": ("pandas", "sklearn", "statsmodels", "river"), "students_tour": ()}


def cells(name):
    return json.loads((EXAMPLES / f"{name}.ipynb").read_text("utf-8"))["cells"]


def test_every_notebook_is_known():
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == PACKAGES.keys()


@pytest.mark.parametrize("name", PACKAGES)
def test_notebook_has_text_and_the_outputs_of_its_programs(name):
    notebook = json.loads((EXAMPLES / f"{name}.ipynb").read_text("utf-8"))
    assert notebook["metadata"]["ran"] == notebooks.digest(notebook), "run python docs/making/notebooks.py"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    assert [cell for cell in code if cell["outputs"]] == [
        cell for cell in code if re.search(r"print\(|plt\.|progressive", "".join(cell["source"]))
    ]
    assert sum(cell["cell_type"] == "markdown" for cell in notebook["cells"]) >= 5


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
