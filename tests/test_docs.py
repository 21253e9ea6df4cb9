"""What the documents say is tried: their examples run, their tables name what is registered."""

import importlib.util
import itertools
import re
from pathlib import Path

import torch

from scanl import layers
from scanl.cli.accelerate import table as mixer_table
from scanl.cli.layers import page as layer_page
from scanl.cli.layers import table as layer_table
from scanl.cli.ops import table as op_table
from scanl.layers.base import registry

ROOT = Path(__file__).parents[1]


def _blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


def test_readme_order():
    """What it is, the two commands, a picture, ten lines of Python, the table of models."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    places = [text.index(mark) for mark in ("# scanl", "make demo", "make test", "![", "```python", "| layer |")]
    assert places == sorted(places)
    first_block = _blocks("README.md")[0].strip().splitlines()
    assert len([line for line in first_block if line]) <= 10


def test_readme_table_is_the_registry():
    assert layer_table() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_page_of_layers_is_the_registry():
    """`scanl list --markdown` writes it."""
    assert (ROOT / "docs" / "layers.md").read_text(encoding="utf-8") == layer_page()


def test_table_of_ops_is_the_registry():
    assert op_table() in (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")


def test_table_of_mixers_is_the_registry():
    assert mixer_table() in (ROOT / "docs" / "hub.md").read_text(encoding="utf-8")


def test_readme_links_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_model_of_contributing_is_a_model(tmp_path):
    """Its file, as printed, registers a layer that streams exactly."""
    (block,) = _blocks("CONTRIBUTING.md")
    path = tmp_path / "moving_average.py"
    path.write_text(block, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("moving_average", path)
    assert spec is not None
    assert spec.loader is not None
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        layer = layers.build("moving_average", 6).double()
        x = torch.randn(2, 7, 6, dtype=torch.float64)
        whole, last = layer(x)
        for cut in range(8):
            first, state = layer(x[:, :cut])
            second, state = layer(x[:, cut:], state)
            torch.testing.assert_close(torch.cat([first, second], 1), whole)
            torch.testing.assert_close(state, last)
    finally:
        registry.remove("moving_average")


def test_changes_are_written_down():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in text or re.search(r"## \[\d", text)
    for before, after in itertools.pairwise(re.findall(r"## \[(\d[^\]]*)\]", text)):
        assert before > after
