"""The pages of data, made from the catalogue and from the tasks' declarations: one for each group of sources.

A group is a module: the sources of one form, or a synthetic task.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from making.docstrings import markdown, pieces, prose
from making.models import sourced, table
from making.sources import bibtex
from scanl import tasks
from scanl.data import sources
from scanl.data.base import Entry, summary
from scanl.data.published.sources import records
from scanl.data.questions import Question
from scanl.tasks import Task

OF_RECORDS = ("Split: ", "Source: ", "Chance: ")  # paragraphs of a docstring that say what the record says


def groups() -> dict[str, list[type[Entry]]]:
    """Return the sources of each module."""
    found: dict[str, list[type[Entry]]] = {}
    for name in sources.names():
        found.setdefault(sources.get(name).__module__, []).append(sources.get(name))
    return dict(sorted(found.items()))


def pages(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the text of each page below a folder."""
    for module, members in groups().items():
        yield folder / f"{path(module)}.md", page(module, members)
    yield folder / "sources.md", index("sources", "data", DATA)
    yield folder / "tasks.md", index("tasks", "tasks", TASKS)


def path(module: str) -> str:
    """Return the path of a group's page, without its ending."""
    package, name = module.split(".")[1], module.rpartition(".")[2]
    return f"{'sources' if package == 'data' else package}/{name}"


def page(module: str, members: list[type[Entry]]) -> str:
    """Return the page of a group."""
    alone = len(members) == 1
    lines = [f"# {title(module)}"]
    if not alone:
        first = next(pieces(sys.modules[module].__doc__))
        lines += markdown(iter([first]))
    for cls in members:
        lines += [] if alone else [f"## {cls.name}"]
        lines += section(cls)
    return "\n\n".join(lines) + "\n"


def title(module: str) -> str:
    """Return the title of a group: the subject of its module, or the name of its only source."""
    members = groups()[module]
    if len(members) == 1:
        return members[0].name
    return re.split(r"[.:,]", inspect.cleandoc(sys.modules[module].__doc__ or ""))[0]


def section(cls: type[Entry]) -> list[str]:
    """Return the paragraphs about a source."""
    record = records.get(cls.name)
    text = inspect.cleandoc(cls.__doc__ or "")
    about = [
        piece
        for piece in pieces(text)
        if piece.kind != "arguments" and not piece.text.startswith(("Arguments: ", *(OF_RECORDS if record else ())))
    ]
    lines = markdown(iter(about))
    lines += [table(("", ""), [row for row in facts(cls) if row[1]])]
    if listed := options(cls):
        lines += ["Options, set by `--data-options.NAME VALUE`:", "\n".join(listed)]
    lines += [f"```console\n{example(cls)}```"]
    if cls.source:
        lines += [f"Source: {sourced(cls.source)}", f"```bibtex\n{bibtex(cls.source)}\n```"]
    return lines


def facts(cls: type[Entry]) -> list[tuple[str, str]]:
    """Return what is known of a source: what it asks, its scores, its files."""
    record, files = records.get(cls.name), cls.needs
    asked = getattr(tasks.build(cls.name) if issubclass(cls, Task) else cls, "question", None)
    rows = [("class", f"`{cls.__module__.rsplit('.', 1)[0]}.{cls.__name__}`")]
    if isinstance(asked, Question):
        rows += [("question", f"[{type(asked).__name__}](../questions.md)")]
    if issubclass(cls, Task):
        task = tasks.build(cls.name)
        rows += [("metric", task.metric), ("chance, best", f"{task.chance:.4g}, {task.best:g}")]
    elif record is not None:
        rows += [("chance", "" if record.chance is None else f"{record.chance:.4g}"), ("split", prose(record.split))]
    if files is not None:
        get = files.origin or f"put them into the folder `{files.name}`; no package has them"
        rows += [("files", prose(files.form)), ("licence", prose(files.license)), ("from", prose(get))]
    return rows


def options(cls: type[Entry]) -> list[str]:
    """Return a line for each option of a source alone: its default and its meaning."""
    meanings: dict[str, str] = {}
    for base in cls.__mro__:
        for piece in pieces(vars(base).get("__doc__")):
            for line in piece.text.splitlines() if piece.kind == "arguments" else ():
                names, _, meaning = line.partition(": ")
                for name in names.split(", ") if not meaning.startswith("see `") else ():
                    meanings.setdefault(name, meaning)
    own = [field for field in fields(cls) if field.init] if is_dataclass(cls) else []
    return [
        f"- `{field.name}{_default(field)}`: {prose(meanings[field.name])}"
        for field in own
        if field.name in meanings and field.name not in SHARED
    ]


SHARED = {"seed", "eval_examples", "eval_bytes", "data", "held_out", "sequence_length", "carry_state"}


def _default(field: Any) -> str:
    return "" if field.default is MISSING else f" = {field.default!r}"


def example(cls: type[Entry]) -> str:
    """Return the commands that get the files of a source and train a model on it."""
    get = f"scanl data get {cls.needs.name}\n" if cls.needs is not None and cls.needs.origin else ""
    return f"{get}scanl train --data {OWN.get(cls.name, cls.name)} --layer lru --minutes 10\n"


OWN = {  # sources that read the user's own files, which are named in their place
    "folders": "letters --question classify --sequence-length 64",
    "shards": "'web/*.jsonl.gz'",
    "signals": "songs --question generate --sequence-length 8000",
    "table": "co2.csv --question forecast --horizon 12",
    "text": "book.txt",
}
DATA = (
    "# Sources",
    "Published data sets that a run learns from, and files of your own. [How sources are used](../data.md).",
)
TASKS = (
    "# Tasks",
    "Problems that are generated, each for one ability of a memory. [How tasks are used](../tasks.md).",
)


def index(name: str, package: str, begin: tuple[str, str]) -> str:
    """Return the page that leads to the groups of a package."""
    modules = [module for module in groups() if module.startswith(f"scanl.{package}.")]
    rows = [
        (f"[{cls.name}]({path(module)}.md{_anchor(module, cls)})", prose(summary(cls)), _licence(cls))
        for module in modules
        for cls in groups()[module]
    ]
    header = ("source", "", "licence") if name == "sources" else ("task", "")
    listed = table(header, [row[: len(header)] for row in sorted(rows)])
    toctree = "\n".join([":::{toctree}", ":hidden:", *map(path, modules), ":::"])
    return "\n\n".join([*begin, listed, toctree]) + "\n"


def _anchor(module: str, cls: type[Entry]) -> str:
    return "" if len(groups()[module]) == 1 else f"#{cls.name}"


def _licence(cls: type[Entry]) -> str:
    return "" if cls.needs is None else prose(cls.needs.license)
