"""How good a model is on what it has not been trained on."""

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


@torch.no_grad()
def measure(model: Model, source: Source, examples: Iterable[Examples], *, chunk: int = 256) -> float:
    """The mean of the source's scores over all that is asked for in groups of examples.

    The rows of a group are read side by side, chunk after chunk with the state carried, so that the model takes the
    memory of a chunk however long the sequences are. A bidirectional model reads them in one piece.
    """
    question, device = source.question, next(model.parameters()).device
    total, count, training = 0.0, 0, model.training
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
                more, scored = source.total(outputs, asked)
                total, count = total + more, count + scored
    model.train(training)
    return total / count


def bits_per_byte(model: LanguageModel, data: Bytes, *, streams: int = 32, chunk: int = 256) -> float:
    """Mean of -log2 p(byte | all before it) over every byte of `data`.

    The text is read as `streams` contiguous parts side by side, each chunk after chunk with the state carried; a part
    begins knowing only the byte before it (a zero byte at the very start). Short texts get fewer parts.
    """
    return measure(model, Text(), [side_by_side(data, streams, chunk)], chunk=chunk)


def score(model: Model, task: Task, count: int, seed: Sequence[int], *, chunk: int = 256, tokens: int = 2**16) -> float:
    """The mean of the task's scores over `count` examples.

    As many as hold about `tokens` are read side by side, as `measure` does.
    """
    return measure(model, FreshExamples(task, 0), groups(task, count, seed, tokens), chunk=chunk)
