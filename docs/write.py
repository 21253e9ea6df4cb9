"""Write what comes from the code into the pages of docs/ and into the stubs of packages: `make docs`.

docs/layers.md as a whole, the table of each page in TABLES, and the public names of each package in PACKAGES.
"""

import os
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in the tests: with more, a solver may iterate once more

from scanl import faces
from scanl.cli import accelerate, algorithms, data, layers, ops
from scanl.layers import classes
from scanl.layers.registry import channel_mixers
from scanl.learning.algorithms import algorithms as learning

DOCS = Path(__file__).parent
TABLES: dict[str, Callable[[], str]] = {
    "data.md": data.table,
    "hub.md": accelerate.table,
    "learning_online.md": algorithms.table,
    "ops.md": ops.table,
}
FAMILIES = ("attention", "channel", "memory", "ode", "rnn", "rwkv", "ssm")
PACKAGES = ("scanl.layers", *(f"scanl.layers.{family}" for family in FAMILIES))


def stubs() -> dict[Path, str]:
    """Return the stub of each package whose public names come from a registry."""
    registered = dict.fromkeys(PACKAGES, classes())
    registered["scanl.learning.algorithms"] = [learning.get(name) for name in learning.names()]
    registered["scanl.layers.channel"] = [channel_mixers.get(name) for name in channel_mixers.names()]
    return {
        Path(str(import_module(package).__file__)).with_suffix(".pyi"): faces.stub(package, every)
        for package, every in registered.items()
    }


def pages() -> dict[Path, str]:
    """Each page that has something from the code, as it should read."""
    written = {DOCS / "layers.md": layers.page()}
    for name, table in TABLES.items():
        text = (DOCS / name).read_text(encoding="utf-8")
        written[DOCS / name] = with_table(text, table())
    return written


def with_table(text: str, table: str) -> str:
    """The text with its table of the same header replaced."""
    header = table.splitlines()[0]
    text, count = re.subn(rf"^{re.escape(header)}\n(?:\|.*\n)*", lambda _: f"{table}\n", text, flags=re.MULTILINE)
    assert count == 1, f"{count} tables begin with {header}"
    return text


if __name__ == "__main__":
    for path, text in {**stubs(), **pages()}.items():
        path.write_text(text, encoding="utf-8")
