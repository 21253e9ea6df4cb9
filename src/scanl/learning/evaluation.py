"""Measure a model on data that it was not trained on."""

from collections.abc import Iterable, Sequence

import torch

from scanl.data.base import Examples, Source
from scanl.data.corpus import Bytes, side_by_side
from scanl.data.corpus import spread as spread
from scanl.data.text import Text
from scanl.learning.questions import Model, answer
from scanl.models import LanguageModel
from scanl.tasks import Task
from scanl.tasks.base import FreshExamples, groups


def measure(model: Model, source: Source, examples: Iterable[Examples], *, chunk: int = 256) -> float:
    """Return the mean of the source's metric over all answers in the batches of `examples`. See `measures`."""
    return measures(model, source, examples, chunk=chunk)[source.metric]


@torch.no_grad()
def measures(model: Model, source: Source, examples: Iterable[Examples], *, chunk: int = 256) -> dict[str, float]:
    """Return the mean of each of the source's scores over all answers in the batches of `examples`, by name.

    A batch is read in chunks of `chunk` steps with the state carried over, so memory does not grow with the length of
    the sequences. A bidirectional model reads whole sequences instead.
    """
    question, device = source.question, next(model.parameters()).device
    totals: dict[str, tuple[float, int]] = {}
    training = model.training
    model.eval()
    for group in examples:
        inputs, targets = map(torch.from_numpy, group)
        steps, state = inputs.shape[1], None
        at_once = steps if model.stack.bidirectional else chunk
        for start in range(0, steps, at_once):
            now = slice(start, start + at_once)
            read, asked = inputs[:, now].to(device), (targets[:, now] if question.every_step else targets).to(device)
            # Tokens may be stored in a narrower type.
            read, asked = (part if part.is_floating_point() else part.long() for part in (read, asked))
            outputs, asked, state = answer(question, model, read, asked, state)
            if question.every_step or now.stop >= steps:
                for name, (more, scored) in source.scores(outputs, asked).items():
                    total, count = totals.get(name, (0.0, 0))
                    totals[name] = total + more, count + scored
    model.train(training)
    return {name: total / count for name, (total, count) in totals.items()}


def bits_per_byte(model: LanguageModel, data: Bytes, *, streams: int = 32, chunk: int = 256) -> float:
    """Return the mean of -log2 p(byte | preceding bytes) over every byte of `data`.

    The text is cut into `streams` contiguous parts, the rows of one batch. They are read in chunks with the state
    carried over. At the start of a part the model knows only the byte before it (a zero byte for the first part). A
    short text is cut into fewer parts.
    """
    return measure(model, Text(), [side_by_side(data, streams, chunk)], chunk=chunk)


def score(model: Model, task: Task, count: int, seed: Sequence[int], *, chunk: int = 256, tokens: int = 2**16) -> float:
    """Return the mean of the task's scores over `count` examples, in batches of about `tokens` steps. See `measure`."""
    return measure(model, FreshExamples(task, 0), groups(task, count, seed, tokens), chunk=chunk)
