"""The pages of the inspectors, made from their registry: one for each, and one that leads to them."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from making.docstrings import markdown, pieces, prose
from making.models import mathematics, sourced, table
from making.sources import bibtex
from scanl.inspect import Inspector, inspectors

LAYERS = {"orbits": "plrnn", "reconstruction": "hippo"}  # of the example, where it does not take an LRU
EXAMPLE = """\
from scanl.inspect import {name}
from scanl.layers import build

found = {name}(build("{layer}", 8))
print(found.figures())
"""


def pages(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the text of each page below a folder."""
    for name in inspectors.names():
        yield folder / "inspectors" / f"{name}.md", page(inspectors.get(name))
    yield folder / "inspectors.md", index()


def page(inspector: Inspector[..., Any]) -> str:
    """Return the page of an inspector."""
    parameters = inspect.signature(inspector).parameters
    bare = inspect.Signature([each.replace(annotation=each.empty) for each in parameters.values()])
    found = list(pieces(inspector.__doc__, parameters))
    examples = [piece.text for piece in found if piece.kind == "example"]
    sections = [
        f"# {inspector.name}",
        f"{prose(inspector.title)}. It takes {prose(inspector.takes)}.",
        "## Equation",
        mathematics(inspector.equation),
        "## Call",
        f"```text\n{inspector.name}{bare}\n```",
        *markdown(piece for piece in found if piece.kind != "example"),
        f"`scanl inspect LAYER --what {inspector.name}` prints its figures, and writes its picture and its data.",
        *(f"```pycon\n{text}\n```" for text in examples),
        "## Example",
        f"```python\n{example(inspector)}```",
        "## Source",
        sourced(inspector.source),
        f"```bibtex\n{bibtex(inspector.source)}\n```",
    ]
    return "\n\n".join(sections) + "\n"


def example(inspector: Inspector[..., Any]) -> str:
    """Return a program that inspects a layer."""
    return EXAMPLE.format(name=inspector.name, layer=LAYERS.get(inspector.name, "lru"))


def index() -> str:
    """Return the page that leads to the inspectors."""
    every = [inspectors.get(name) for name in inspectors.names()]
    rows = [(f"[{each.name}](inspectors/{each.name}.md)", prose(each.title), prose(each.takes)) for each in every]
    toctree = "\n".join([":::{toctree}", ":hidden:", *(f"inspectors/{each.name}" for each in every), ":::"])
    about = "What a layer remembers, in numbers and pictures."
    return "\n\n".join(["# Inspectors", about, table(("inspector", "shows", "takes"), rows), toctree]) + "\n"
