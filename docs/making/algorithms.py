"""The pages of the learning algorithms, made from what they declare: one for each, and one that leads to them."""

import inspect
from collections.abc import Iterator
from pathlib import Path

import torch

from making.docstrings import markdown, pieces, prose
from making.models import options_list, sourced, table
from making.sources import bibtex
from scanl.data.questions import FeatureInputs, Numbers
from scanl.errors import ConfigError
from scanl.learning.algorithms import Algorithm, algorithms
from scanl.learning.questions import answerer
from scanl.models import Stack
from scanl.options import options

LAYERS = ("mingru", "gru", "irnn", "elman", "lru", "columnar_constructive")  # the first that it trains is the example's
LETTERS = (
    "In *B* sequences, *T* steps of an update, *d* inputs, *e* numbers of the state and *p* parameters of the "
    "recurrence; the other names are options."
)
EXAMPLE = """\
import torch
from scanl.data.batch import Batch
from scanl.learning.algorithms import {cls}
{imports}
{model}
algorithm = {cls}({loss})
learner = algorithm.init(model, batch_size=2)  # what is kept between two updates
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for _ in range(3):  # 4 steps of 2 sequences an update
    x = torch.randn(2, 4, 2)
    optimizer.zero_grad()
    loss, learner = algorithm.update(model, learner, Batch(x, x.{answer}))
    loss.backward()
    optimizer.step()
"""
STACK = """\
from scanl.data.questions import FeatureInputs, Numbers
from scanl.learning.questions import answerer
from scanl.models import {backbone}

task = answerer(Numbers(FeatureInputs(2), count=1))  # two numbers are read at every step, and one is answered
model = task.model({stack})"""
SPECIAL = {  # algorithms that train no stack of layers: what is imported, the model, its loss and its answer
    "gtf": (
        "from scanl.models.whole.dynamics import Dynamics, dynamics_loss\n",
        "model = Dynamics(2, 8)  # the next observation is the answer",
        "dynamics_loss",
    ),
    "p_tncn": (
        "from scanl.models.whole.ptncn import PTNCN, ptncn_loss\n",
        "model = PTNCN(2, 8, 2)  # the next input is the answer",
        "ptncn_loss",
    ),
}


def pages(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the text of each page below a folder."""
    for name in algorithms.names():
        yield folder / "algorithms" / f"{name}.md", page(algorithms.get(name))
    yield folder / "algorithms.md", index()


def page(cls: type[Algorithm]) -> str:
    """Return the page of an algorithm."""
    notes = list(pieces(vars(cls)["__doc__"]))
    gradient = f"It computes {GRADIENTS[cls.computes]}." + (f" {prose(_sentence(cls.error))}" if cls.error else "")
    has_options = any(option.name != "loss" for option in options(cls).values())
    sections = [
        f"# {cls.__name__}",
        *markdown(iter(notes[:1])),
        f"Its name is `{cls.name}`.",
        *markdown(iter(notes[1:])),
        "## Gradient",
        gradient,
        f"It works for {prose(cls.works_for)}.",
        "## Cost",
        LETTERS,
        table(
            ("", ""),
            [
                ("numbers kept beside the parameters", f"`{cls.memory}`"),
                ("multiplications of an update", f"`{cls.operations}`"),
            ],
        ),
        *(["## Options", options_list(cls, "loss")] if has_options else []),
        "## Example",
        f"```python\n{example(cls)}```",
        "## Source",
        sourced(cls.source),
        f"```bibtex\n{bibtex(cls.source)}\n```",
    ]
    return "\n\n".join(sections) + "\n"


GRADIENTS = {
    "exact": "the exact gradient",
    "truncation": "a truncation of the gradient",
    "estimate": "an estimate of the gradient",
}


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def example(cls: type[Algorithm]) -> str:
    """Return a program that trains a small model with an algorithm. Raises AssertionError where none is known."""
    if cls.name in SPECIAL:
        imports, model, loss = SPECIAL[cls.name]
        return EXAMPLE.format(cls=cls.__name__, imports=imports, model=model, loss=loss, answer="roll(-1, 1)")
    if cls.name == "lra":
        backbone, stack = "AlignedStack", "AlignedStack(8, 2)"
    else:
        backbone, stack = "Stack", f'Stack(8, 1, "{_layer(cls)}", channel_mixer="none")'
    head, model = STACK.format(backbone=backbone, stack=stack).split("\n\n")
    return EXAMPLE.format(
        cls=cls.__name__, imports=head + "\n", model=model, loss="task.loss", answer="sum(-1, keepdim=True)"
    )


def _layer(cls: type[Algorithm]) -> str:
    """Return a layer that an algorithm trains."""
    task = answerer(Numbers(FeatureInputs(2), count=1))
    for layer in LAYERS:
        with torch.random.fork_rng(devices=[]):
            model = task.model(Stack(4, 1, layer, channel_mixer="none"))
        try:
            cls(task.loss).init(model, 1)
        except ConfigError:
            continue
        return layer
    raise AssertionError(f"{cls.name} trains none of {LAYERS}: add a layer that it trains, or a program to SPECIAL")


def index() -> str:
    """Return the page that leads to the algorithms."""
    every = [algorithms.get(name) for name in algorithms.names()]
    rows = [
        (
            f"[{cls.name}](algorithms/{cls.name}.md)",
            prose(inspect.cleandoc(vars(cls)["__doc__"]).splitlines()[0]),
            cls.computes,
        )
        for cls in every
    ]
    lines = [
        "# Learning algorithms",
        "An algorithm computes the gradient of the parameters, one update after another. "
        "[Which one to take](../learning_online.md).",
        table(("algorithm", "", "gradient"), rows),
        "\n".join([":::{toctree}", ":hidden:", *(f"algorithms/{cls.name}" for cls in every), ":::"]),
    ]
    return "\n\n".join(lines) + "\n"
