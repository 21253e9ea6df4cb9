"""The pages of the models, made from what the layers declare: one for each, one for each family, and the gallery."""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from making.docstrings import prose
from making.drawing import drawing, main_equation
from making.equations import latex, split
from making.glyph import glyph, mixer, pattern, signs
from making.sources import bibtex
from scanl.cli.columns import WIDTH as SMALL
from scanl.cli.columns import SurveyColumns, columns
from scanl.cli.layers import WIDTH, backends, origin, state_size, step_cost, summary, without_op
from scanl.layers import Layer, build, classes
from scanl.layers.initial_state import rows as state_rows
from scanl.layers.registry import channel_mixers
from scanl.models import Stack, presets
from scanl.options import ConfiguredMeta, Option, Range, described, options

Rows = Callable[..., Sequence[dict[str, str]]]  # the rows of a file of results that have some values
RELATED = 12  # other models that a page names
FAMILIES = ("memory", "rwkv", "ssm", "rnn", "ode", "attention", "bodies")
BODIES, WHOLE = "Bodies and wrappers", "Whole models"
EXAMPLE = """\
import torch
from {package} import {cls}

layer = {cls}({dim})
x = torch.randn(2, 10, {dim})  # a batch of 2, 10 steps, {dim} channels
y, state = layer(x)  # the whole sequence at once
"""
STREAMED = """\
first, carried = layer(x[:, :6])  # or in pieces: the state is carried over
rest, carried = layer(x[:, 6:], carried)
next_y, carried = layer.step(torch.randn(2, {dim}), carried)  # or one step at a time
"""


def family(cls: type[Layer]) -> str:
    """Return the folder of a layer's family."""
    folder = cls.__module__.split(".")[2]
    return folder if folder in FAMILIES else "bodies"


def package(cls: type[Layer]) -> str:
    """Return the package from which a layer is imported."""
    return "scanl.layers" if family(cls) == "bodies" else f"scanl.layers.{family(cls)}"


def example(cls: type[Layer], bidirectional: bool, dim: int = 64) -> str:
    """Return a program that runs a layer over a sequence, in pieces and step by step."""
    text = EXAMPLE if bidirectional else EXAMPLE + STREAMED
    return text.format(package=package(cls), cls=cls.__name__, dim=dim)


def pages(folder: Path, rows: Rows) -> Iterator[tuple[Path, str]]:
    """Yield the text of each page below a folder. rows: reads results."""
    measured = {cls.name: columns(cls, SMALL) for cls in classes()}
    drawn = {cls.name: glyph(build(cls.name, WIDTH), measured[cls.name]) for cls in classes()}
    for cls in classes():
        yield folder / "layers" / f"{cls.name}.md", page(cls, measured[cls.name], rows)
    for name in presets.names():
        yield folder / "layers" / f"{name}.md", whole(name)
    for name in FAMILIES:
        yield folder / "families" / f"{name}.md", family_page(name, measured)
    yield folder / "families" / "channel.md", channel_page()
    yield folder / "gallery.md", gallery(drawn)


def page(cls: type[Layer], measured: SurveyColumns | None, rows: Rows = lambda *_, **__: ()) -> str:
    """Return the page of a layer."""
    results = _results(cls.name, rows)
    layer = build(cls.name, WIDTH)
    first, *notes = inspect.cleandoc(vars(cls)["__doc__"]).split("\n\n")
    about, differs = _differences([first.partition("\n")[2], *notes])
    sections = [
        f"# {cls.__name__}",
        prose(summary(cls)),
        f"Its name is `{cls.name}`." + _aliases(cls) + _preset(cls),
        drawing(cls, layer.bidirectional, measured is None, layer),
        "## Equation",
        mathematics(cls.equation),
        _legend(cls.equation),
        *(["## Where we differ", *map(prose, differs)] if differs else []),
        "## Example",
        f"```python\n{example(cls, layer.bidirectional)}```",
        "## Options",
        f"- `dim`: model width. *An integer, at least 1.*\n{options_list(cls, 'dim')}",
        "## Size and cost",
        _costs(cls, layer),
        "## Recurrence",
        _recurrence(measured, layer),
        *(["## Measured", *results] if results else []),
        *(["## Notes", *map(prose, about)] if about else []),
        "## Source",
        sourced(cls.source),
        f"```bibtex\n{bibtex(cls.source)}\n```",
        "## Related models",
        _related(cls),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def whole(name: str) -> str:
    """Return the page of a whole model: a pattern of layers."""
    cls = presets.get(name)
    stack = Stack(WIDTH, len(cls.layers), name)
    links = ", ".join(f"[`{layer}`]({layer}.md)" for layer in dict.fromkeys(cls.layers))
    parameters = sum(parameter.numel() for parameter in stack.parameters())
    sections = [
        f"# {cls.__name__}",
        prose(summary(cls)),
        f"A pattern of layers, which repeats over depth: {links}. `Stack` takes its name, `{name}`.",
        "## Equation",
        prose(cls.equation),
        "## Example",
        "```python\nimport torch\nfrom scanl.models import LanguageModel, Stack\n\n"
        f'model = LanguageModel(256, Stack(64, {len(cls.layers)}, "{name}"))\n'
        "logits, state = model(torch.randint(256, (1, 10)))\n```",
        "## Size and cost",
        f"At a width of {WIDTH}, one repetition of the pattern with the stack's default channel mixer has "
        f"{parameters:,} parameters, and a state of {state_size(stack):,} floats.",
        "## Source",
        sourced(cls.source),
        f"```bibtex\n{bibtex(cls.source)}\n```",
    ]
    return "\n\n".join(sections) + "\n"


def family_page(name: str, measured: dict[str, SurveyColumns | None]) -> str:
    """Return the page of a family: a card for each model."""
    members = [cls for cls in classes() if family(cls) == name]
    cards = "\n".join(_card(cls, measured[cls.name]) for cls in members)
    toctree = "\n".join([":::{toctree}", ":hidden:", *(f"../layers/{cls.name}" for cls in members), ":::"])
    return f"# {family_title(name)}\n\n{COLUMNS}\n\n{toctree}\n\n{cards}\n"


def channel_page() -> str:
    """Return the page of the layers that mix features, which have no state, or the input of the step before."""
    lines = ["# Channel mixers", "Layers that mix features instead of time, for the option `channel_mixer` of a stack."]
    for name in channel_mixers.names():
        cls = channel_mixers.get(name)
        lines += [f"## {name}", prose(summary(cls)), mathematics(cls.equation), _legend(cls.equation)]
        lines += [sourced(cls.source), f"```bibtex\n{bibtex(cls.source)}\n```"]
    return "\n\n".join(filter(None, lines)) + "\n"


def gallery(drawn: dict[str, str]) -> str:
    """Return the page with a card for each model, by family. drawn: the small drawings of the layers."""
    titles = [(name, family_title(name)) for name in (*FAMILIES, "channel")]
    headings = [title for _, title in titles[:-1]] + [WHOLE, titles[-1][1]]
    lines = [
        "---\nhide-toc: true\n---\n\n# Gallery",
        f"{len(classes())} layers, {len(presets.names())} whole models, {len(channel_mixers.names())} channel mixers. "
        "A card leads to the model's page.",
        " · ".join(f"[{heading}](#{_anchor(heading)})" for heading in headings),
        "Each drawing has the state of the step before, and that of this step:",
        _grid([f"{sign} {meaning}" for sign, meaning in signs()], "signs"),
    ]
    for name, title in titles[:-1]:
        members = [cls for cls in classes() if family(cls) == name]
        cards = [_small_card(f"layers/{cls.name}.md", cls, drawn[cls.name], main_equation(cls)) for cls in members]
        lines += [f"## [{title}](families/{name}.md)", _grid(cards)]
    wholes = [presets.get(name) for name in presets.names()]
    lines += [f"## {WHOLE}", "Patterns of layers."]
    lines += [_grid([_small_card(f"layers/{cls.name}.md", cls, pattern(cls.layers), "") for cls in wholes])]
    cards = [
        _small_card(f"families/channel.md#{name}", cls, mixer(), split(cls.equation)[0])
        for name in channel_mixers.names()
        for cls in [channel_mixers.get(name)]
    ]
    lines += [f"## {titles[-1][1]}", "Layers that mix the features of a step.", _grid(cards)]
    families = [f"families/{name}" for name, _ in titles] + [f"layers/{name}" for name in presets.names()]
    return "\n\n".join([*lines, "\n".join([":::{toctree}", ":hidden:", *families, ":::"])]) + "\n"


def _grid(cards: Sequence[str], name: str = "cards") -> str:
    return "\n\n".join([f":::::{{container}} {name}", *cards, ":::::"])


def _small_card(link: str, cls: Any, svg: str, equation: str) -> str:
    """Return a card with a drawing, a name, an equation and a sentence."""
    shown = ":::{math}\n" + latex(equation) + "\n:::" if equation else ""
    lines = [svg, f"[**{cls.__name__}**]({link})", shown, prose(summary(cls))]
    return "\n\n".join(["::::{container} card", *filter(None, lines), "::::"])


def _anchor(title: str) -> str:
    """Return the name by which a page links to one of its headings."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def family_title(name: str) -> str:
    if name == "bodies":
        return BODIES
    module = sys.modules[f"scanl.layers.{name}"]
    return re.split(r"[.:]", inspect.getdoc(module) or name)[0]


COLUMNS = """\
*Linear*: the next state is a linear function of the state, and something added. *Elementwise*: a number of the state
acts on itself alone, or on one more. *Gated*: what is kept of the state depends on the input; of a recurrence that is
not linear it says that the equation has a gate. *Online*: each channel has a recurrence of its own, so real-time
recurrent learning is cheap. The first three are measured on a small layer: its state is changed, and the state a step
later compared. A card without a word is of a recurrence that is nonlinear and dense, or of a layer that keeps inputs or
sees the future."""


def _card(cls: type[Layer], measured: SurveyColumns | None) -> str:
    kind = "" if measured is None else ", ".join(word for word, holds in measured._asdict().items() if holds)
    lines = [
        f"[**{cls.__name__}**](../layers/{cls.name}.md)" + (f" *{kind}*" if kind else ""),
        mathematics(cls.equation),
        prose(summary(cls)),
    ]
    return "\n\n".join(["::::{container} card", *lines, "::::"]) + "\n"


def mathematics(equation: str) -> str:
    return "\n".join([":::{math}", *(latex(line) for line in split(equation)), ":::"])


def _legend(equation: str) -> str:
    return "⊙ multiplies element by element." if re.search(r"(?<=\s)\* ", equation) else ""


def sourced(source: str) -> str:
    """Return a source with its arXiv numbers and addresses as links."""
    text = prose(source)
    text = re.sub(r"arXiv:(\d{4}\.\d{4,5}(?:v\d)?)", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    return re.sub(r"(?<!\()https://\S+(?<![.,;])", lambda match: f"<{match[0]}>", text)


def options_list(cls: ConfiguredMeta, *without: str) -> str:
    """Return a line for each option of a class: its default, its meaning, what it takes."""
    lines = []
    for option in [option for option in options(cls).values() if option.name not in without]:
        default = "" if option.default is inspect.Parameter.empty else f" = {option.default!r}"
        takes = allowed(option)
        meaning = f" {prose(option.meaning)}." if option.meaning else ""
        lines.append(f"- `{option.name}{default}`:{meaning} *{prose(takes[0].upper() + takes[1:])}.*")
    return "\n".join(lines)


def allowed(option: Option) -> str:
    """Return what an option takes: its type and its ranges."""
    ranges = [re.sub(r"=?\{\w+\}", "", repr(bound)) for bound in (*_ranges(option.type), *option.ranges)]
    return ", ".join(dict.fromkeys([described(option.type), *ranges]))


def _ranges(annotation: Any) -> Iterator[Range]:
    for argument in get_args(annotation):
        if isinstance(argument, Range):
            yield argument
        elif get_args(argument):
            yield from _ranges(argument)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def _costs(cls: type[Layer], layer: Layer) -> str:
    parameters = sum(parameter.numel() for parameter in layer.parameters())
    rows = [("parameters", f"{parameters:,}")]
    if not layer.bidirectional:
        rows += [
            ("state of one sequence", f"{state_size(layer):,} floats"),
            ("products of matrices in a step", f"{step_cost(layer):,} multiplications"),
        ]
    text = f"At a width of {WIDTH}, with the default options:\n\n" + table(("", ""), rows)
    if cls.state is not None and not layer.bidirectional:
        rows = dict.fromkeys(state_rows(cls.state, layer=layer))
        text += "\n\nThe state:\n\n" + "\n".join(f"- {_state_row(row)}" for row in rows)
    return text


def _state_row(row: str) -> str:
    """Return a line of a state whose name and axes are code."""
    declared, mark, meaning = row.partition(": ")
    shape = re.match(r"\w+(?: \((?:[^()]|\([^()]*\))*\))?", declared)
    assert shape is not None, row
    return f"`{shape[0]}`{prose(declared[shape.end() :])}{mark}{prose(meaning)}"


def _recurrence(measured: SurveyColumns | None, layer: Layer) -> str:
    if layer.bidirectional:
        kind = "It reads the whole sequence before it answers, so it does not stream."
    elif measured is None:
        kind = "It keeps inputs, or what attention made of them, in place of a recurrence of each step."
    else:
        names = [name for name, holds in measured._asdict().items() if holds]
        kind = f"Its recurrence is {', '.join(names)}." if names else "Its recurrence is nonlinear and dense."
    op = f"The op is `{layer.op}`" if layer.op else f"It runs by {without_op(layer)}"
    listed = ", ".join(
        f"`{entry.name}` ({'any device' if entry.devices is None else ', '.join(entry.devices)})"
        for entry in backends(type(layer))
    )
    return f"{kind} {op}" + (
        f", with these backends, in the order in which they are tried: {listed}." if listed else "."
    )


def _results(name: str, rows: Rows) -> list[str]:
    """Return what was measured of a layer: its speed beside an LSTM, what it learnt."""
    texts = []
    beside = rows("layers", name=name, base="torch.nn.LSTM", way="both", shape="(4, 1024, 256)")
    if ratios := sorted(float(row["processor_ratio"] or row["ratio"]) for row in beside):
        span = " to ".join(dict.fromkeys(f"{ratio:g}" for ratio in (ratios[0], ratios[-1])))
        texts.append(
            f"A forward and a backward pass took {span} times the time of `torch.nn.LSTM` on a CPU, with a batch of 4, "
            "1,024 steps and a width of 256."
        )
    if scores := rows("tasks", setting="short", layer=name):
        listed = ", ".join(f"`{row['task']}` {row['scaled']}" for row in scores)
        texts.append(f"Short [synthetic tasks](../../tasks.md), where 0 is chance and 1 the best: {listed}.")
    if recalled := [float(row["accuracy"]) for row in rows("recall", layer=name, pairs=16) if row["accuracy"]]:
        best = f"{max(recalled):.0%}"
        texts.append(f"[Recall](../../measurements/recall.md) of 16 pairs in 256 tokens, with its best state: {best}.")
    return texts


def _aliases(cls: type[Layer]) -> str:
    known = [name.removeprefix("=") for name in vars(cls).get("aliases", ())]
    return f" It is found as {', '.join(f'`{name}`' for name in known)} too." if known else ""


def _preset(cls: type[Layer]) -> str:
    if cls.preset_of is None:
        return ""
    base = cls.preset_of
    return f" It is a preset: [{base.__name__}]({base.name}.md) with other options, `{origin(cls)}`."


def _differences(texts: list[str]) -> tuple[list[str], list[str]]:
    """Return the paragraphs of a docstring that do not say where we differ from the source, and those that do."""
    about, differs = [], []
    for text in filter(None, (" ".join(text.split()) for text in texts)):
        says = re.search(r"\bdiffers?\b", text, re.IGNORECASE) and not text.startswith("Parameters")
        cut = re.sub(r"^Differs: (\w)", lambda match: match[1].upper(), text)
        (differs if says else about).append(cut)
    return about, differs


def _related(cls: type[Layer]) -> str:
    """Return links to the presets of the same layer, and to models of the family with the same op."""
    base = cls.preset_of or cls
    presets_of = [other for other in classes() if base in (other, other.preset_of)]
    same = [
        other for other in classes() if other.op == cls.op and family(other) == family(cls) and other.preset_of is None
    ]
    links = [
        f"[{other.__name__}]({other.name}.md)" for other in dict.fromkeys([*presets_of, *same]) if other is not cls
    ]
    own = f"[{family_title(family(cls))}](../families/{family(cls)}.md)"
    return (f"{', '.join(links[:RELATED])}. " if links else "") + f"All of the family: {own}."
