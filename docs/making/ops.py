"""The pages of the ops, made from their declarations and docstrings: one for each, and one that leads to them."""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from making.docstrings import Piece, markdown, pieces, prose
from making.models import sourced, table
from making.sources import bibtex
from scanl import ops
from scanl.cli.ops import table as backends
from scanl.layers import classes
from scanl.ops import registry
from scanl.ops.registry import Cell, HigherOrder, Op, Operand

KINDS = (
    ("Recurrences", lambda op: isinstance(op, Op) and not isinstance(op, Cell)),
    ("Cells", lambda op: isinstance(op, Cell)),
    ("Ops that take functions", lambda op: isinstance(op, HigherOrder)),
)


def public() -> list[Op | HigherOrder]:
    """Return the ops of `scanl.ops`. The cells of layers are explained on the pages of their layers."""
    return [op for op in registry.every() if op.name in ops.__all__]


def pages(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the text of each page below a folder."""
    for op in public():
        yield folder / "ops" / f"{op.name}.md", page(op)
    yield folder / "ops.md", index()


def page(op: Op | HigherOrder) -> str:
    """Return the page of an op."""
    module = sys.modules[inspect.getattr_static(op, "__module__")]
    first, *notes = pieces(module.__doc__)
    last = max(i for i, piece in enumerate(notes) if piece.kind == "math") + 1
    arguments = list(pieces(op.__doc__, inspect.signature(op).parameters))
    examples = [piece.text for piece in arguments if piece.kind == "example"]
    users = [cls for cls in classes() if cls.op == op.name]
    links = ", ".join(f"[{cls.__name__}](../layers/{cls.name}.md)" for cls in users)
    sections = [
        f"# {op.name}",
        *markdown(iter([first])),
        "## Equation",
        *markdown(iter(notes[:last])),
        "## Call",
        *markdown(iter(arguments[:1])),
        f"```text\n{call(op)}\n```",
        *([] if isinstance(op, HigherOrder) else ["The axes of the operands:", axes(op)]),
        *markdown(piece for piece in arguments[1:] if piece.kind != "example"),
        "## Example",
        "\n".join(["```pycon", IMPORTS.format(name=op.name) + "\n\n".join(examples), "```"]),
        "## Backends",
        BACKENDS.format(name=op.name),
        backends(op),
        *(["## Notes", *markdown(iter(notes[last:]))] if notes[last:] else []),
        "## Source",
        sourced(op.source),
        f"```bibtex\n{bibtex(op.source)}\n```",
        *(["## Layers", f"It is the op of {links}."] if links else []),
    ]
    return "\n\n".join(sections) + "\n"


BACKENDS = (
    'In the order in which `backend="auto"` tries them. `{name}.explain(...)` says which of them can run a call, or '
    "why not."
)
IMPORTS = ">>> import torch\n>>> from scanl.ops import {name}\n"


def call(op: Op | HigherOrder) -> str:
    """Return how an op is called: its parameters without their types."""
    parameters = inspect.signature(op).parameters.values()
    bare = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
    return f"{op.name}{inspect.Signature(bare)}"


def axes(op: Op) -> str:
    """Return a table of the operands with their axes, and of the output."""
    rows = [(f"`{operand.name}`", _axes(operand), _presence(op, operand)) for operand in op.operands]
    return table(("", "axes", ""), [*rows, ("output", f"({', '.join(op.output)})", "")])


def _axes(operand: Operand) -> str:
    if operand.tree:
        return "several tensors"
    return ("broadcasts to " if operand.broadcast else "") + str(operand).replace("*", r"\*")


def _presence(op: Op, operand: Operand) -> str:
    if operand.name == op.state:
        return "zeros if None"
    return "may be None" if operand.optional else "truth values" if operand.truth else ""


def index() -> str:
    """Return the page that leads to the ops."""
    lines = ["# Ops", "An op evaluates a transition and a readout over a sequence. [How ops are used](../ops.md)."]
    for title, belongs in KINDS:
        members = [op for op in public() if belongs(op)]
        rows = [(f"[{op.name}](ops/{op.name}.md)", _first(op)) for op in members]
        lines += [f"## {title}", table(("op", ""), rows)]
    names = "\n".join([":::{toctree}", ":hidden:", *(f"ops/{op.name}" for op in public()), ":::"])
    return "\n\n".join([*lines, names]) + "\n"


def _first(op: Op | HigherOrder) -> str:
    first: Piece = next(pieces(op.__doc__))
    return prose(first.text)
