"""Every registered model has what its page in the site is made of. `make docs` builds the pages, and is strict."""

import inspect
import itertools
import re
import shlex
import unicodedata
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from making import (
    algorithms,
    api,
    commands,
    docstrings,
    drawing,
    equations,
    filling,
    inspectors,
    models,
    questions,
    sources,
)
from making import data as data_pages
from making import ops as op_pages
from scanl import ops
from scanl.cli import COMMANDS
from scanl.cli.columns import SurveyColumns
from scanl.cli.train import parse
from scanl.compat import fla
from scanl.data import sources as data
from scanl.data.files import folders
from scanl.data.questions import Question
from scanl.inspect import inspectors as inspecting
from scanl.layers import classes, get
from scanl.layers.registry import channel_mixers
from scanl.learning import TrainConfig
from scanl.learning.algorithms import algorithms as learning
from scanl.models import presets
from scanl.ops import registry

EVERY = [*classes(), *map(channel_mixers.get, channel_mixers.names()), *map(presets.get, presets.names())]
SOURCED = [*EVERY, *op_pages.public(), *map(learning.get, learning.names()), *map(inspecting.get, inspecting.names())]
OWN = {"folders", "shards", "signals", "table", "text"}  # sources of the user's own data, which nobody has published
FOLDER = Path("made")


@pytest.fixture(scope="module")
def gla():
    """The page of a layer."""
    return models.page(get("gla"), SurveyColumns(True, True, True, False), filling.rows)


def letters(text: str) -> str:
    """What is written in a text, without spaces, brackets of groups and signs."""
    return "".join(re.findall(r"[A-Za-z0-9]", unicodedata.normalize("NFKC", text)))


def test_equations_keep_what_they_say():
    """In LaTeX, braces are closed and all names remain, in their order but for what stands below and above."""
    for cls in EVERY:
        lines = equations.split(cls.equation)
        assert lines, cls.name
        for line in lines:
            text = equations.latex(line)
            assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}"), (cls.name, text)
            shown = "".join(piece for piece, _ in equations.spans(line))
            written = re.sub(r"sqrt|(?<!cum)sum|prod|grad(?!i)|_hat|\bconv(?= )|(?<= )\(x\)(?= )|\bin\b", "", line)
            for name, letter in equations.GREEK.items():
                written = re.sub(rf"(?<![A-Za-z]){name}(?![A-Za-z])", "", written)
                shown = shown.replace(letter, "")
            assert sorted(letters(written)) == sorted(letters(re.sub(r"\bin\b", "", shown))), (cls.name, line, shown)


@pytest.mark.parametrize(
    ("equation", "latex", "text"),
    [
        ("h_t = a_t * h_{t-1}", r"h_{t}=a_{t}\odot h_{t -1}", "h_t = a_t ⊙ h_t_−_1"),
        ("S_t = S_{t-1} + k_t v_t^T", r"S_{t}=S_{t -1}+k_{t}v_{t}^{\top }", "S_t = S_t_−_1 + k_t v_t^T"),
        ("q_t . k_j / sqrt(K)", r"q_{t}\cdot k_{j}/\sqrt{K}", "q_t·k_j/√K"),
        ("r < `max_length`", r"r <\text{max_length}", "r < max_length"),
        ("i_t = exp(i'_t) where c", r"i_{t}=\operatorname{exp}({i'}_{t})\ \text{where}\ c", "i_t = exp(i′_t) where c"),
    ],
)  # fmt: skip
def test_equations_as_latex_and_as_text(equation, latex, text):
    assert equations.latex(equation).rstrip() == latex.rstrip()
    marks = {0: "", -1: "_", 1: "^"}
    assert "".join(marks[level] + piece for piece, level in equations.spans(equation)) == text


def test_every_drawing_has_a_state_and_fits():
    for cls in classes():
        svg = ElementTree.fromstring(drawing.drawing(cls, cls.bidirectional))
        titles = [box.get("class") for box in svg.iter() if box.tag.endswith("}rect")]
        assert titles[:2] == (["sequence"] if cls.bidirectional else ["transition", "state"]), cls.name
        for line in (text for text in svg.iter() if text.tag.endswith("}text") and text.get("class") is None):
            size = sum(drawing.size((span.text, span.get("class") is not None)) for span in line)
            assert size <= drawing.WIDTH - 2 * drawing.MARGIN, (cls.name, "".join(line.itertext()))


def test_roles_of_equations():
    lstm, gla, attention = (drawing.roles(get(name)) for name in ("lstm", "gla", "attention"))
    assert lstm.transition == ["c_t = f_t * c_{t-1} + i_t * tanh(g_t)"]
    assert lstm.readout == ["h_t = o_t * tanh(c_t)"]
    assert [line.partition(" ")[0] for line in gla.transition + gla.readout] == ["S_t", "o_t", "y"]
    assert attention.transition == [drawing.GENERIC]
    assert drawing.roles(get("attention"), keeps=True).transition == [drawing.KEPT]
    assert drawing.roles(get("hawk")).transition == ["linear_scan: h_t = a_t * h_{t-1} + x_t"]
    assert drawing.roles(get("implicit")).transition == ["s_t = tanh(W s_t + U x_t + b)"]
    assert drawing.roles(get("infini_attention")).transition[0].startswith("after it M += ")


def test_few_drawings_have_the_general_transition():
    """Where the equations have no recurrence: convolutions, and sums over the past without an op."""
    of_attention = "scanl.layers.attention."  # these keep inputs
    general = {
        cls.name
        for cls in classes()
        if drawing.roles(cls, cls.__module__.startswith(of_attention)).transition == [drawing.GENERIC]
    }
    assert len(general) < 16, general


def test_every_source_is_a_reference():
    assert {name for name in data.names() if not data.get(name).source} == OWN
    for cls in [*SOURCED, *(data.get(name) for name in data.names() if name not in OWN)]:
        entries = sources.bibtex(cls.source)
        assert re.match(r"@misc\{\w+,\n|@software\{scanl,\n", entries), (cls.name, cls.source)
        assert entries.count("{") == entries.count("}"), cls.name
        for reference in sources.references(cls.source):
            assert reference.title, cls.name
            assert reference.where or reference.arxiv or reference.url or reference.year, cls.name


def test_fields_of_a_reference():
    (one, two) = sources.references(
        'Gers, Cummins and others et al., "Long; short", Neural Computation 9, 1997, eq. (3) to (5), and its code; '
        'wiring: Kimi Team, "Two", arXiv:2510.26692, sec. 3.1'
    )
    assert (one.title, one.where, one.year, one.arxiv) == ("Long; short", "Neural Computation 9", "1997", "")
    assert (two.authors, two.year, two.arxiv, two.where) == ("Kimi Team", "2025", "2510.26692", "")
    assert "author = {{Kimi Team}}" in two.bibtex()


@torch.no_grad()
def test_every_example_runs():
    """With small options, by the reference: the kernels would be compiled, and the widths of a page take long."""
    with ops.backend("reference"):
        for cls in classes():
            bidirectional = cls(12, **cls.sample).bidirectional
            text = models.example(cls, bidirectional, 12)
            assert f"{cls.__name__}(12)" in text
            values: dict = {"sample": cls.sample}
            exec(compile(text.replace("(12)", "(12, **sample)"), cls.name, "exec"), values)
            assert values["y"].shape == values["x"].shape == (2, 10, 12), cls.name
            if not bidirectional:
                assert values["first"].shape == (2, 6, 12), cls.name
                assert values["rest"].shape == (2, 4, 12), cls.name
                assert values["next_y"].shape == (2, 12), cls.name


def test_every_example_makes_a_layer():
    """Of the width that a page has, with the default options."""
    for cls in classes():
        assert cls(64).dim == 64


def test_a_page_has_its_parts(gla):
    headings = re.findall(r"^## (.*)$", gla, re.MULTILINE)
    first = ["Equation", "Where we differ", "Example", "Options", "Size and cost", "Recurrence", "Measured"]
    assert headings == [*first, "Notes", "Source", "Related models"]
    for part in (
        '<svg class="recurrence"',
        ":::{math}",
        "@misc{yang2023gated",
        "8,192 floats",
        "`copy` 1.00",
        "`num_heads = 4`: H, number",
        "- `recurrent (B, 4, 32, 64)`: S",
    ):
        assert part in gla
    assert get("gla").id not in gla  # a reader cannot look it up


def test_the_gallery_leads_to_every_model():
    page = models.gallery({cls.name: f"<svg>{cls.name}</svg>" for cls in classes()})
    links = re.findall(r"\]\(layers/(\w+)\.md\)", page)
    for cls in classes():  # a drawing, a name, an equation, a sentence
        card = rf"<svg>{cls.name}</svg>\n\n\[\*\*{cls.__name__}\*\*\]\(.*?\)\n\n:::\{{math\}}\n.+\n:::\n\n.+\n\n::::\n"
        assert re.search(card, page), cls.name
    assert sorted(links) == sorted([*(cls.name for cls in classes()), *presets.names()])
    assert all(cls.__module__.count(".") == 2 for cls in classes() if models.family(cls) == "bodies")
    page = models.channel_page()
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == channel_mixers.names()
    assert page.count(":::{math}") == len(channel_mixers.names())


def test_options_say_what_they_take():
    lines = dict(line[2:].split("`:", 1) for line in models.options_list(get("mamba2")).splitlines())
    meaning = "P, channels of a head; a divisor of expand \\* dim."
    takes = "An integer, at least 1, a divisor of expand \\* dim, with expand and dim."
    assert lines["`head_dim = 64"] == f" {meaning} *{takes}*"


def test_a_source_without_a_title_has_no_reference():
    assert sources.bibtex("Elman, 1990") == ""


@pytest.fixture(scope="module")
def reference():
    """The pages of the reference by their paths below the folder of made pages."""
    parts = (op_pages, algorithms, data_pages, questions, inspectors, commands)
    made = itertools.chain.from_iterable(part.pages(FOLDER) for part in parts)
    return {path.relative_to(FOLDER).as_posix(): text for path, text in made}


def test_whatever_is_registered_has_a_page_with_source_and_example(reference):
    """Of a layer, the tests above say it. A cell of a layer is on the layer's page."""
    expected = {f"ops/{name}.md" for name in registry.names() if name in ops.__all__}
    expected |= {f"algorithms/{name}.md" for name in learning.names()}
    expected |= {f"inspectors/{name}.md" for name in inspecting.names()}
    expected |= {f"commands/{name}.md" for name in COMMANDS}
    assert expected <= reference.keys()
    cells = {cell.name for cell in registry.cells() if cell.step.__module__.startswith("scanl.layers.")}
    assert set(registry.names()) - cells == {op.name for op in op_pages.public()}
    for path in expected - {f"commands/{name}.md" for name in COMMANDS}:
        assert "## Example\n\n```py" in reference[path], path
        assert "```bibtex\n@" in reference[path], path
    for module, members in data_pages.groups().items():
        text = reference[f"{data_pages.path(module)}.md"]
        for cls in members:
            assert cls.name in text
            assert f"scanl train --data {data_pages.OWN.get(cls.name, cls.name)} " in text, cls.name
            assert cls.name in OWN or sources.bibtex(cls.source) in text, cls.name
    for question in Question.__subclasses__():
        assert question.__module__ != "scanl.data.questions" or f"## {question.__name__}\n" in reference["questions.md"]


def test_pages_that_lead_to_others_lead_to_all(reference):
    for name in ("ops", "algorithms", "sources", "tasks", "inspectors", "commands"):
        linked = set(re.findall(r"\]\(([\w/-]+\.md)(?:#\w+)?\)", reference[f"{name}.md"]))
        assert linked == {path for path in reference if path.startswith(f"{name}/")}, name


def test_links_of_the_reference_lead_somewhere(reference):
    layers = {f"layers/{cls.name}.md" for cls in classes()}
    for path, text in reference.items():
        for link in re.findall(r"\]\(([^):#]+)(?:#[\w-]+)?\)", text):
            target = (Path("/docs/made") / path).parent / link
            inside = Path(*(part for part in target.parts[1:])).as_posix()
            parts: list[str] = []
            for part in inside.split("/"):
                parts = parts[:-1] if part == ".." else [*parts, part]
            if parts[1] == "made" and parts[2:] != ["contributing.md"]:
                assert "/".join(parts[2:]) in reference.keys() | layers, (path, link)
            elif parts[1] != "made":
                assert (Path(__file__).parents[2] / "/".join(parts)).exists(), (path, link)


@pytest.mark.cells_by_loop
@pytest.mark.parametrize("name", learning.names())
def test_the_example_of_an_algorithm_runs(name):
    """One update of it."""
    values: dict = {}
    text = algorithms.example(learning.get(name))
    assert "range(3)" in text
    with ops.backend("parallel", "reference"):
        exec(compile(text.replace("range(3)", "range(1)"), name, "exec"), values)
    assert torch.isfinite(values["loss"])


@pytest.mark.parametrize("name", inspecting.names())
def test_the_example_of_an_inspector_runs(name, capsys):
    exec(compile(inspectors.example(inspecting.get(name)), name, "exec"), {})
    assert capsys.readouterr().out.startswith("{'")


def test_the_command_of_a_source_names_options_that_it_has():
    """Nothing is read. A data set is got by a name that the command knows."""
    for name in data.names():
        *get, train = data_pages.example(data.get(name)).splitlines()
        assert all(line.removeprefix("scanl data get ") in folders for line in get), name
        assert train.startswith("scanl train --data ")
        if name in OWN or name == "mnist":  # to read a line takes long
            parse(shlex.split(train)[2:])[0].check()
        else:
            assert train == f"scanl train --data {name} --layer lru --minutes 10"
            TrainConfig.of(data=[name], layer="lru", minutes=10).check()


def test_examples_of_ops_are_those_that_the_doctests_run():
    for op in op_pages.public():
        (text,) = re.findall(r"```pycon\n(.*?)```", op_pages.page(op), re.DOTALL)
        for example in text.removeprefix(op_pages.IMPORTS.format(name=op.name)).strip().split("\n\n"):
            assert example in inspect.cleandoc(op.__doc__ or ""), op.name


def test_help_of_a_command_has_its_options(reference):
    assert "--sequence-length INTEGER" in reference["commands/train.md"]
    assert "--archive" in reference["commands/data.md"]


def test_public_names_are_read_from_the_packages():
    docs = Path(__file__).parents[2] / "docs"
    modules = api.modules(docs)
    assert {"scanl.models", "scanl.learning", "scanl.hub", "scanl.data", "scanl.errors"} <= set(modules)
    assert "LanguageModel" in api.names("scanl.models")
    assert "RunFolder" in api.names("scanl.learning")
    assert api.names("scanl.errors")[0] == "BackendError"
    assert not {cls.__name__ for cls in classes()} & set(api.names("scanl.layers"))
    page = api.page("scanl.hub")
    assert ".. autofunction:: scanl.hub.load\n" in page
    assert ".. autoclass:: scanl.hub.Report\n   :members:\n" in page


def test_every_name_that_a_page_imports_is_documented():
    docs = filling.DOCS
    text = "\n".join(path.read_text(encoding="utf-8") for path in filling.pages())
    listed = {(module, name) for module in api.modules(docs) for name in api.names(module)}
    paged = {cls.__name__ for cls in classes()} | set(registry.names())
    paged |= {learning.get(name).__name__ for name in learning.names()} | {*inspecting.names()}
    paged |= {data.get(name).__name__ for name in data.names()} | vars(fla).keys()
    missing = []
    for module, names in re.findall(r"^\s*from (scanl[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
        for named in names.split(", ") if "._" not in module and module != "scanl" else ():
            name = named.partition(" as ")[0]
            is_module = (docs.parent / "src" / module.replace(".", "/") / name).with_suffix(".py").exists()
            if not (is_module or name in paged or (module, name) in listed):
                missing.append((module, name))
    assert not missing


def test_pieces_of_a_docstring():
    text = """Return a sum.

    a, b: the numbers, *not* None.   c: one more.

    .. math:: a + b,
        \\quad c

    >>> add(1, 2)
    3

    Args:
        size: how many; `None`
            for all.
    Raises nothing.
    """
    found = list(docstrings.pieces(text, ("a", "b", "c")))
    assert [piece.kind for piece in found] == ["prose", "arguments", "math", "example", "arguments", "prose"]
    assert found[1].text.splitlines() == ["a, b: the numbers, *not* None.", "c: one more."]
    assert found[4].text == "size: how many; `None` for all."
    markdown = docstrings.markdown(iter(found))
    assert markdown[1] == "- `a`, `b`: the numbers, \\*not\\* None.\n- `c`: one more."
    assert markdown[2] == ":::{math}\na + b\nc\n:::"
    rst = docstrings.restructured(text.splitlines(), ("a", "b", "c"))
    assert "- a, b: the numbers, \\*not\\* None." in rst
    assert "- size: how many; ``None`` for all." in rst
