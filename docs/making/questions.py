"""The page of the questions, made from their classes and from what learning does for each."""

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

from making.docstrings import markdown, pieces, prose
from making.models import table
from scanl.data.questions import Question
from scanl.learning.questions.base import Answerer, registry


def pages(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the text of the page below a folder."""
    yield folder / "questions.md", page()


def page() -> str:
    """Return the page of the questions."""
    lines = [
        "# Questions",
        "What a source asks a model to predict. Learning makes the model, the loss and the scores of it. "
        "[How to add one](contributing.md#add-a-question-a-loss-or-a-score).",
    ]
    for question, answerer in sorted(registry.items(), key=lambda pair: pair[0].__name__):
        lines += section(question, answerer)
    return "\n\n".join(lines) + "\n"


def section(question: type[Question], answerer: type[Answerer]) -> list[str]:
    """Return the paragraphs about a question."""
    names = [field.name for field in fields(question)]
    rows = [
        (f"`{field.name}`", "" if field.default is MISSING else f"`{field.default!r}`") for field in fields(question)
    ]
    lines = [f"## {question.__name__}", *markdown(pieces(question.__doc__, names)), table(("field", "default"), rows)]
    lines += ["Its answer: " + prose(inspect.cleandoc(answerer.__doc__ or "").splitlines()[0])]
    if own := vars(answerer.options()):
        listed = ", ".join(f"`{name} = {default!r}`" for name, default in own.items())
        lines += [f"Its model has the options {listed}."]
    return lines
