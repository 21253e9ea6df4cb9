"""Pages of docs/ that are templates of Jinja: the braces are filled from benchmarks/results and from the registries."""

import ast
import csv
import functools
import inspect
import textwrap
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from statistics import fmean

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from making import compat, home
from scanl.cli import accelerate, algorithms
from scanl.layers import classes

DOCS = Path(__file__).parents[1]
BENCHMARKS = DOCS.parent / "benchmarks"
RESULTS = BENCHMARKS / "results"
TABLES: dict[str, Callable[[], str]] = {
    "algorithms": algorithms.table,
    "patches": accelerate.table,
    "compat": compat.table,
    "inexact": lambda: inexact(),
}

Rows = Sequence[dict[str, str]]


def pages() -> list[Path]:
    """Return the pages of the site that are written by hand, sorted."""
    folders = ("_build", "made")
    return sorted(path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).parts[0] not in folders)


def filled(text: str) -> str:
    """Return the text of a page, filled if it is a template: if it has a brace of Jinja."""
    return environment().from_string(text).render() if "{{" in text or "{%" in text else text


@functools.cache
def environment() -> Environment:
    """Return what a template knows: tables, rows, sources, the picture of home; filters of rows and of numbers."""
    made = Environment(
        loader=FileSystemLoader(DOCS),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    made.globals |= {"rows": rows, "source": source, "signatures": signatures, "table": lambda name: TABLES[name]()}
    made.globals |= {"layers": lambda: len(classes()), "picture": lambda: home.picture(rows)}
    made.filters |= {each.__name__: each for each in FILTERS}
    return made


def source(file: str, name: str) -> str:
    """Return the text of a function in a file of benchmarks/."""
    text = (BENCHMARKS / file).read_text(encoding="utf-8")
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name]
    (function,) = functions
    first = min(node.lineno for node in (function, *function.decorator_list))
    return "\n".join(text.splitlines()[first - 1 : function.end_lineno])


def signatures(module: str, name: str, *methods: str) -> str:
    """Return the head of a class, and of some of its methods as its file has them."""
    cls = getattr(import_module(module), name)
    lines = [f"class {name}({', '.join(base.__name__ for base in cls.__bases__)}):"]
    for method in methods:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(getattr(cls, method)))).body
        assert isinstance(node, ast.FunctionDef)
        assert node.returns is not None
        lines.append(f"    def {method}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}")
    return "\n".join(lines)


def rows(name: str, /, **key: str) -> Rows:
    """Return the rows of benchmarks/results/NAME.csv that have these values."""
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return of(list(csv.DictReader(file)), **key)


def inexact() -> str:
    """Return the layers that are excused from the law of equal bits, by their reason."""
    reasons: dict[str, list[str]] = {}
    for layer in classes():
        if (reason := layer.excused.get("bits_are_the_same_in_any_company")) is not None:
            reasons.setdefault(reason, []).append(f"`{layer.name}`")
    lines = (f"| {reason} | {', '.join(sorted(names))} |" for reason, names in reasons.items())
    return "\n".join(["| reason | layers |", "|---|---|", *lines])


def of(rows: Rows, /, **key: str) -> Rows:
    return [row for row in rows if all(row[name] == str(value) for name, value in key.items())]


def by(rows: Rows, *names: str) -> list[Rows]:
    """Return the rows in groups of equal values, in the order in which the groups begin."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.values())


def values(rows: Rows, name: str) -> list[str]:
    """Return the values of a column without repetition, in their order."""
    return list(dict.fromkeys(row[name] for row in rows))


def _numbers(rows: Rows, name: str) -> list[float]:
    return [float(row[name]) for row in rows if row[name]]


def _shown(value: float | None, form: str | None) -> float | str | None:
    return value if form is None else "" if value is None else format(value, form)


def mean(rows: Rows, name: str, form: str | None = None) -> float | str | None:
    """Return the mean of a column as text, or as a number without `form`; empty cells do not count."""
    return _shown(fmean(numbers) if (numbers := _numbers(rows, name)) else None, form)


def least(rows: Rows, name: str, form: str | None = None) -> float | str | None:
    return _shown(min(_numbers(rows, name), default=None), form)


def most(rows: Rows, name: str, form: str | None = None) -> float | str | None:
    return _shown(max(_numbers(rows, name), default=None), form)


def span(rows: Rows, name: str, form: str | None = None, word: str = "to") -> str:
    """Return the least and the largest value of a column: `2 to 5`, or one number if they read the same.

    Without `form` they read as the file has them.
    """
    ends = [row[name] for row in sorted((row for row in rows if row[name]), key=lambda row: float(row[name]))]
    ends = [end if form is None else format(float(end), form) for end in (ends[:1] + ends[-1:])]
    return f" {word} ".join(dict.fromkeys(ends))


def total(rows: Rows, name: str, form: str) -> str:
    return format(sum(_numbers(rows, name)), form)


def best(rows: Rows, name: str, *names: str) -> Rows:
    """Return of each group of rows the one with the largest value."""
    return [max(group, key=lambda row: float(row[name])) for group in by(rows, *names)]


def ascending(rows: Rows, name: str) -> Rows:
    return sorted(rows, key=lambda row: float(row[name]))


def column(rows: Rows, name: str) -> str:
    return ", ".join(row[name] for row in rows)


def ms(seconds: str) -> str:
    """Return seconds as milliseconds, in as many digits."""
    return f"{1000 * float(seconds):.4g}"


def lowest(groups: Sequence[Rows], name: str) -> Rows:
    """Return the group of rows with the lowest mean."""
    return min(groups, key=lambda rows: fmean(_numbers(rows, name)))


def number(value: str | float, form: str) -> str:
    """Return a cell in a format; an empty one is empty."""
    if value == "":
        return ""
    return format(int(value) if form.endswith("d") else float(value), form)


def code(name: str) -> str:
    """Return the name of a layer or a source as code, and other names as they are."""
    return f"`{name}`" if name.islower() and " " not in name else name


FILTERS = (of, by, values, mean, least, most, span, total, best, ascending, column, ms, lowest, number, code)
