"""Models as pages of a browser: what a page computes in node, against the models."""

import importlib.util
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

from scanl.errors import ConfigError
from scanl.export import write_page
from scanl.layers import build
from scanl.models import Forecaster, LanguageModel, Stack
from tests.export.test_c import NUMBERS, Functions

# The page's own script, up to where it draws; its document has texts alone.
RUN = """
const texts = {texts}, document = {{ getElementById: id => ({{ textContent: texts[id] }}) }};
{script}
opened().then(model => console.log(JSON.stringify({steps}.map(step => Array.from(model.step(step))))));
"""


def part(page, name):
    return re.search(rf'id="{name}">(.*?)</script>', page, re.DOTALL)[1]


def test_a_page_equals_its_model(tmp_path):
    """With functions that WebAssembly lacks, with numbers of two widths, and with tokens."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed: pip install 'scanl[page]'")
    if shutil.which("node") is None:
        pytest.skip("no node is there")
    torch.manual_seed(0)
    tokens = LanguageModel(7, Stack(6, 2, ["gru", "mingru"]))
    series = Forecaster(3, Stack(4, 1, "hawk"))
    for model, x in ((Functions(), NUMBERS), (tokens, torch.tensor([[3, 1, 6, 2, 0]])), (series, torch.randn(1, 5, 1))):
        write_page(model.eval(), tmp_path / "cell.html", x, title="</script> & <b>")
        page = (tmp_path / "cell.html").read_text("utf-8")
        script = page[page.index('"use strict"') : page.index("// The state")]
        texts = {name: part(page, name) for name in ("about", "program")}
        assert json.loads(texts["about"])["title"] == "</script> & <b>"
        steps = [step.flatten().tolist() for step in x.split(1, 1)]
        run = RUN.format(texts=json.dumps(texts), script=script, steps=json.dumps(steps))
        done = subprocess.run(["node", "-"], input=run, capture_output=True, text=True, check=True)
        after, expected = model.init_state(1), []
        for step in x.split(1, 1):
            with torch.no_grad():
                y, after = model(step, after)
            expected.append(y.flatten().numpy())
        actual, expected = np.array(json.loads(done.stdout), np.float64), np.stack(expected)
        finite = np.isfinite(expected)
        assert np.isnan(actual[~finite]).all()  # JSON has no others
        assert np.linalg.norm((actual - expected)[finite]) <= 1e-6 * np.linalg.norm(expected[finite])


def test_refusals(tmp_path, monkeypatch):
    student = Forecaster(3, Stack(4, 1, "mingru"), distribution="student_t")
    for model, options, message in (
        (build("gru", 4), {"rate": 8000, "overlap": 4}, "an overlap of 0 to 3"),
        (LanguageModel(7, Stack(4, 1, "gru")), {"rate": 8000}, "and a model that reads real numbers"),
        (build("gru", 4), {"overlap": 1}, "overlap is 1, expected 0 because rate is None"),
        (student, {}, "distribution is student_t, expected points or quantiles or gaussian in a page"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            write_page(model, tmp_path / "cell.html", **options)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"a page needs ziglang, a compiler: pip install 'scanl\[page\]'"):
        write_page(build("gru", 4), tmp_path / "cell.html")
    assert not list(tmp_path.iterdir())
