"""What the documents say of the code and of each other is read here; test_docs_run.py runs their examples."""

import doctest
import functools
import importlib
import itertools
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from jinja2 import UndefinedError

from making import filling
from scanl.ops import registry

ROOT = Path(__file__).parents[2]
CELL = re.compile(r"(?<!\\)\|")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *filling.pages()]


@functools.cache
def _text(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return filling.filled(text) if path.is_relative_to(filling.DOCS) else text


def test_figures_are_those_that_the_code_draws(write):
    figures = write.figures()
    assert sorted(path.name for path in figures) == sorted(path.name for path in (ROOT / "docs").glob("*.svg"))
    stale = [path.name for path, text in figures.items() if _text(path) != text]
    assert not stale, f"{', '.join(stale)} differ from the code: run `make docs` (python docs/write.py)"


ROWS = [
    {"layer": "gru", "seed": "0", "ratio": "7.0", "minutes": ""},
    {"layer": "gru", "seed": "1", "ratio": "10", "minutes": "2"},
    {"layer": "LRU", "seed": "0", "ratio": "9.04", "minutes": ""},
]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ('{{ rows|of(seed=1)|mean("ratio", ".1f") }}', "10.0"),
        ('{{ rows|mean("minutes", ".1f") }}{{ rows|of(seed=0)|mean("minutes", ".1f") }}', "2.0"),
        ('{{ rows|span("ratio") }}, {{ rows[2:]|span("ratio") }}', "7.0 to 10, 9.04"),
        ('{{ rows|span("ratio", ".0f", "and") }}, {{ rows[2:]|span("ratio", ".1f") }}', "7 and 10, 9.0"),
        ('{% for of in rows|by("layer") %}{{ of[0].layer|code }}{{ of|length }}{% endfor %}', "`gru`2LRU1"),
        ('{{ rows|best("ratio", "layer")|ascending("ratio")|values("ratio")|join(" ") }}', "9.04 10"),
        ('{{ rows|by("seed")|lowest("ratio")|values("seed") }}', "['0']"),
        ('{{ rows|least("ratio", "g") }}{{ rows|most("ratio", "g") }}{{ rows|total("ratio", "g") }}', "71026.04"),
        ('{{ "12000"|number(",d") }}{{ ""|number(",d") }}{{ "0.5"|number(".0%") }}', "12,00050%"),
    ],
)
def test_what_a_template_prints_of_rows(template, text):
    assert filling.environment().from_string(template).render(rows=ROWS) == text


def test_a_template_that_names_no_value_is_refused():
    with pytest.raises(UndefinedError, match="'dict object' has no attribute 'lost'"):
        filling.environment().from_string("{{ rows[0].lost }}").render(rows=ROWS)


def test_first_block_of_the_readme_is_short():
    block = re.findall(r"```python\n(.*?)```", _text(ROOT / "README.md"), re.DOTALL)[0]
    assert len([line for line in block.splitlines() if line.strip()]) <= 10


def _anchors(path: Path) -> set[str]:
    """The names by which GitHub links to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", _text(path), flags=re.DOTALL | re.MULTILINE), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^):]+)\)", _text(page)):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_every_page_is_in_the_contents():
    """Of the site, which docs/index.md lists, and the pages of guides."""
    contents = {
        (page.parent / line).resolve().relative_to(filling.DOCS).as_posix()
        for page in (filling.DOCS / "index.md", *(filling.DOCS / "guides").glob("*.md"))
        for block in re.findall(r":::\{toctree\}\n(.*?):::", _text(page), re.DOTALL)
        for line in block.split()
    }
    pages = {path.relative_to(filling.DOCS).with_suffix("").as_posix() for path in filling.pages()}
    assert not [page for page in pages - {"index"} if not any(fnmatch(page, entry) for entry in contents)]


@pytest.mark.parametrize("page", filling.pages(), ids=_name)
def test_no_page_is_long(page):
    """A page has one subject. Those that are made from the code have what the code has."""
    assert len(_text(page).encode()) <= 8192


@pytest.mark.parametrize("page", filling.pages(), ids=_name)
def test_tables_end_before_the_text(page):
    """A line of text below a row would be a row. Its cells are as many as those above it."""
    text = re.sub(r"^```.*?^```", "", _text(page), flags=re.DOTALL | re.MULTILINE)
    for row, below in itertools.pairwise(text.splitlines()):
        assert not row.startswith("| ") or below.startswith("|") or not below, below
        if row.startswith("|") and below.startswith("|"):
            assert len(CELL.findall(row)) == len(CELL.findall(below)), below


def test_an_extra_is_installed_in_one_way():
    """From a clone, quoted; by its name in a message, whose reader has scanl."""
    files = [*PAGES, *(ROOT / "examples").glob("*.*"), *(ROOT / "src").rglob("*.py")]
    for path in files:
        for line in re.findall(r"pip install (?:-e )?\S*(?:scanl|\.\[)\S*", _text(path)):
            installed, clone = r"'scanl\[[\w,{}-]+\]'", r"-e '\.\[[\w,-]+\]'"
            wheel = r"'scanl-[\d.]+-py3-none-any\.whl\[[\w,]+\]'"
            ways = installed if path.is_relative_to(ROOT / "src") else clone
            if path.stem == "start":  # it has all three
                ways = f"{installed}|{clone}|{wheel}"
            assert re.match(f"pip install (?:{ways})", line), (path, line)


def test_forecasts_take_what_the_page_of_choices_says():
    """The layer that `scanl train` adds to the linear maps is the one that the page names."""
    choose = pytest.importorskip("scanl.learning.forecasting.choose")
    section = re.findall(r"^## Forecasts of tables\n(.*?)^## ", _text(ROOT / "docs" / "choose.md"), re.DOTALL | re.M)[0]
    assert re.findall(r"one small block of\s+\[(\w+)\]", section) == [choose.STACK["layer"]]


def test_changes_are_written_down():
    text = _text(ROOT / "CHANGELOG.md")
    assert "## [Unreleased]" in text or re.search(r"## \[\d", text)
    for before, after in itertools.pairwise(re.findall(r"## \[(\d[^\]]*)\]", text)):
        assert before > after


def test_design_has_every_folder():
    """The tree of docs/design.md, which is indented by two, and the folders that there are."""
    tree = re.search(r"^    src/scanl/\n((?:    .*\n)+)", _text(ROOT / "docs" / "design.md"), re.MULTILINE)
    assert tree is not None
    named, parents = set(), [ROOT / "src" / "scanl"]
    for indent, name in re.findall(r"^    ( +)(\w+)/ ", tree[1], re.MULTILINE):
        depth = len(indent) // 2
        parents = [*parents[:depth], parents[depth - 1] / name]
        named.add(parents[-1])
    found = {path.parent for path in (ROOT / "src" / "scanl").rglob("*.py") if "__pycache__" not in path.parts}
    assert named == found - {ROOT / "src" / "scanl"}


def test_every_op_is_explained():
    """On the page of ops; a cell by its own page, or by that of its layer."""
    ops = {op.name for op in registry.every()} - {cell.name for cell in registry.cells()}
    assert len(ops) > 10
    assert not [op for op in ops if not re.search(rf"`{op}[`(]", _text(ROOT / "docs" / "ops.md"))]


MODULES = [
    path for path in sorted((ROOT / "src").rglob("*.py")) if ">>> " in _text(path) and path.parent.name != "adapters"
]


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_the_examples_of_docstrings_run(path):
    """But those of adapters, whose libraries may not be installed."""
    module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    assert doctest.testmod(importlib.import_module(module), extraglobs={"torch": torch}).failed == 0
