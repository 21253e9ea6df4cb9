"""Every registered model has what its page in the site is made of. `make docs` builds the pages, and is strict."""

import re
import unicodedata
from xml.etree import ElementTree

import pytest
import torch

from making import columns, drawing, equations, models, sources
from scanl import ops
from scanl.layers import classes, get
from scanl.layers.registry import channel_mixers
from scanl.models import presets

EVERY = [*classes(), *map(channel_mixers.get, channel_mixers.names()), *map(presets.get, presets.names())]


@pytest.fixture(scope="module")
def gla(write):
    """The page of a layer."""
    return models.page(get("gla"), columns.Columns(True, True, True, False), write.rows)


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


def test_every_source_is_a_reference():
    for cls in EVERY:
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


def test_columns_are_measured():
    expected = {
        "gla": (True, True, True, False),
        "lru": (True, True, False, True),
        "deltanet": (True, False, True, False),
        "elman": (False, False, False, False),
        "lstm": (False, False, True, False),
        "sru": (False, True, True, True),
    }
    for name, values in expected.items():
        assert columns.columns(get(name), models.SMALL) == values, name
    assert columns.columns(get("bidirectional"), models.SMALL) is None


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
    ):
        assert part in gla
    assert get("gla").id not in gla  # a reader cannot look it up


def test_the_gallery_leads_to_every_model():
    links = re.findall(r"\]\(layers/(\w+)\.md\)", models.gallery())
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
