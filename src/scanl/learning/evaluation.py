"""Measure a model on data that it was not trained on."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scanl.data.base import IGNORED, Exam, Source
from scanl.data.batch import Batch
from scanl.data.questions import Question
from scanl.data.text.corpus import Bytes, side_by_side
from scanl.data.text.corpus import spread as spread
from scanl.data.text.text import Text
from scanl.layers.module import in_mode
from scanl.learning.questions import Answerer, Model, answerer
from scanl.learning.questions.base import means
from scanl.learning.run.folder import RunFolder
from scanl.learning.scores import scores
from scanl.models import LanguageModel
from scanl.models.saving import Saved
from scanl.tasks import Task
from scanl.tasks.base import FreshExamples, groups


def trained(folder: RunFolder) -> Model:
    """Return the model of a run, with the scales of its training even if the data have changed since."""
    return Saved.load(folder.path) if folder.weights.exists() else folder.load_model()


def measure(model: Model, source: Source, examples: Iterable[Batch], *, chunk: int = 256) -> float:
    """Return the mean of the source's metric over all answers in the batches of `examples`. See `measures`."""
    return measures(model, source, examples, chunk=chunk)[source.metric]


@torch.no_grad()
def measures(
    model: Model, source: Source, examples: Iterable[Batch], *, chunk: int = 256, question: Question | None = None
) -> dict[str, float]:
    """Return each of the source's scores over all answers in the batches of `examples`, by name.

    question: the exam's, if it has other scores than the source's.

    A batch is read in chunks of `chunk` steps with the state carried over, so memory does not grow with the length of
    the sequences. A bidirectional model reads whole sequences instead.
    """
    method = answerer(question or source.question)
    with in_mode(model, training=False):
        found = means(score for batch in examples for score in _scores(method, model, batch, chunk))
    return _named(source, found)


@torch.no_grad()
def written(model: Model, source: Source, examples: Iterable[Batch]) -> dict[str, float]:
    """Return the scores of what a model of bytes writes in the place of the answers, by name: `written` of a question.

    It reads each row up to its first answer, and takes the likeliest byte at each step, until the end of the text.
    """
    names, parts = getattr(source.question, "written", ()), []
    for batch in examples if names else ():
        rows = batch.tensors(next(model.parameters()).device)
        answers, right = _texts(model, rows.inputs, rows.targets)
        parts.append({name: scores.get(name)(source.question, answers, right) for name in names})
    return means(parts)


def _texts(model: Model, inputs: Tensor, targets: Tensor) -> tuple[list[str], list[str]]:
    """Return the texts that a model writes, and the right texts of targets (N, T), IGNORED outside of the answers."""
    known = targets != IGNORED
    right = [row[here].tolist() for row, here in zip(targets, known, strict=True)]
    first, end = known.int().argmax(1), right[0][-1]
    longest, ended = int(first.max()) + 1, torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)

    def stop(token: Tensor, count: int) -> bool:
        ended.logical_or_(token == end)
        return bool(ended.all())

    mask = torch.arange(longest, device=inputs.device) <= first[:, None]
    steps = model.generate(inputs[:, :longest], mask=mask, max_new_tokens=inputs.shape[1], temperature=0.0, stop=stop)
    answers = torch.stack(list(steps), 1).tolist()
    return [_decoded(row, end) for row in answers], [_decoded(row, end) for row in right]


def _decoded(row: Sequence[int], end: int) -> str:
    return bytes(row[: row.index(end)] if end in row else row).decode(errors="replace")


def baselines(source: Source, exam: Exam) -> dict[str, dict[str, float]]:
    """Return the baselines' scores in an exam, by method and score, as `measures` returns a model's."""
    return {name: _named(source, found) for name, found in answerer(source.question).baselines(exam).items()}


def _named(source: Source, found: Mapping[str, float]) -> dict[str, float]:
    """Return scores by name; the first one gets the name of the source's metric."""
    first, *others = found
    return {source.metric: found[first], **{name: found[name] for name in others}}


def _scores(method: Answerer[Any], model: Model, batch: Batch, chunk: int) -> Iterator[Mapping[str, tuple[Any, int]]]:
    """Yield the scores of the answers of a batch, chunk by chunk."""
    steps, state, device = batch.length, None, next(model.parameters()).device
    at_once = steps if model.stack.bidirectional else chunk
    for begin in range(0, steps, at_once):
        piece = batch.steps(begin, begin + at_once, targets=method.every_step)
        outputs, targets, state = method.answers(model, piece.tensors(device), state)
        if method.every_step or begin + at_once >= steps:
            yield method.scores(outputs, targets)


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
