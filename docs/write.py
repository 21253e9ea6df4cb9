"""Write what comes from the code into docs/, and the stubs of packages: `make docs` begins so.

The stubs have the public names of each package in PACKAGES. docs/made/ has the pages that come from the code alone: of
the models, and of the reference. Only the site has them; git ignores them. The figures of the stages of a scan are
drawn by code too. The other pages are filled when the site reads them (`making.filling`).
"""

import os
from importlib import import_module
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in the tests: with more, a solver may iterate once more

from making import algorithms as algorithm_pages
from making import api, commands, inspectors, models, notebooks, questions, stages
from making import data as data_pages
from making import ops as op_pages
from making.filling import DOCS, rows
from scanl import faces
from scanl.layers import classes
from scanl.layers.registry import channel_mixers
from scanl.learning.algorithms import algorithms as learning

FAMILIES = ("attention", "channel", "memory", "ode", "rnn", "rwkv", "ssm")
PACKAGES = ("scanl.layers", *(f"scanl.layers.{family}" for family in FAMILIES))
REFERENCE = (op_pages, algorithm_pages, data_pages, questions, inspectors, commands, api, notebooks)  # each has `pages`


def stubs() -> dict[Path, str]:
    """Return the stub of each package whose public names come from a registry."""
    registered = dict.fromkeys(PACKAGES, classes())
    registered["scanl.learning.algorithms"] = [learning.get(name) for name in learning.names()]
    registered["scanl.layers.channel"] = [channel_mixers.get(name) for name in channel_mixers.names()]
    return {
        Path(str(import_module(package).__file__)).with_suffix(".pyi"): faces.stub(package, every)
        for package, every in registered.items()
    }


def made() -> dict[Path, str]:
    """Return the text of each page that only the site has: models, the reference, and the files beside docs/."""
    texts = dict(models.pages(DOCS / "made", rows))
    for part in REFERENCE:
        texts |= dict(part.pages(DOCS / "made"))
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        text = (DOCS.parent / name).read_text(encoding="utf-8")
        texts[DOCS / "made" / name.lower()] = text.replace("](docs/", "](../")
    return texts


def figures() -> dict[Path, str]:
    """Return the text of each figure that is drawn by code."""
    return {DOCS / name: text for name, text in stages.figures().items()}


if __name__ == "__main__":
    for path, text in {**stubs(), **figures(), **made()}.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # Sphinx reads again what is newer
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
