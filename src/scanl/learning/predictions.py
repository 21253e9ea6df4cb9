"""A trained run's answers for a table or for files of one's own: `predict`, which `scanl predict` calls.

This module needs pandas when it is used: `pip install 'scanl[series]'`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.data.folders.folders import Folders
from scanl.data.folders.own_signals import OwnSignals
from scanl.data.folders.unanswered import UnansweredExamples, of_files, of_table
from scanl.data.series.columns import as_table
from scanl.data.series.table import Table
from scanl.errors import ConfigError
from scanl.learning.evaluation import trained
from scanl.learning.forecasting.answer_columns import FRAME, bounds, check_levels, refuse_twice
from scanl.learning.questions.base import Answerer, answerer, durations
from scanl.learning.run.folder import RunFolder

CHUNK = 4096  # steps that a causal labeler reads at once


def predict(run: str | Path, data: Any = None, *, levels: Sequence[float] | None = None) -> Any:
    """Return a run's answers as a frame of pandas: a row for each series of a table, each row of it, or each file.

    A class or a label is under the name of the target (`class` for files), with the probability of each class as
    `kind-p-a`. A number is the mean, with the bounds of intervals as `y-lo-80` and `y-hi-80`, if its distribution has
    any.

    run: folder of a run with the question "classify", "label" or "regress" on a table, or "classify" on a folder.
    data: a table with the same columns, of which the target is not read: a path or a frame; or files and folders, a
    path or several. None: the data of the run.   levels: per cents of the intervals; None: 80 and 95.
    Raises ConfigError and DataError as `scanl predict` prints them.
    """
    folder = RunFolder.open(run)
    source = folder.source
    if not isinstance(source, Table | Folders) or isinstance(source, OwnSignals) or source.is_forecast:
        entry = folder.config().entry.name
        data_name = entry if source.ask is None else f"the question {source.ask!r} of a table"
        advice = "; scanl forecast answers it" if source.is_forecast else ""
        raise ConfigError(
            f"predict: {run} was trained on {data_name}, expected a table to classify, label or regress, or a "
            f"folder{advice}"
        )
    model = trained(folder)
    probable = "points" if source.class_names else folder.config().source.distribution
    levels = check_levels("predict", probable, levels)
    examples = _examples(source, data)
    answers = _answers(model, answerer(source.question), examples, levels)
    keys, target, classes = examples.keys, examples.target, examples.classes
    if classes:
        names = [target, *(f"{target}-p-{name}" for name in classes)]
        columns = [np.array(classes, object)[answers.argmax(1)], *answers.T]
    else:
        names, columns = [target, *bounds(target, levels)], list(answers.T)
    refuse_twice("predict", [*keys.columns, *names])
    return keys.assign(**dict(zip(names, columns, strict=True)))


def _examples(source: Table | Folders, data: Any) -> UnansweredExamples:
    if isinstance(source, Folders):
        paths = [source.root] if data is None else [data] if isinstance(data, str | Path) else data
        for path in map(Path, paths):
            if not path.exists():
                raise ConfigError(f"predict: data is {path}, which does not exist; name files or folders")
        return of_files(source, list(map(Path, paths)))
    if isinstance(data, list | tuple):
        if len(data) != 1:
            raise ConfigError(f"predict: data is {len(data)} tables, expected one; a pattern reads several as one")
        data = data[0]
    path = source.path if data is None else Path(data) if isinstance(data, str | Path) else FRAME
    return of_table(source, as_table(data, "predict: data") if path is FRAME else source.read(path, least=1), path)


@torch.no_grad()
def _answers(
    model: Any, method: Answerer[Any], examples: UnansweredExamples, levels: Sequence[float]
) -> NDArray[np.float64]:
    """Return an array with a row for each answer: probabilities of classes, or a mean and its bounds."""
    tails = [(1 - level / 100) / 2 for level in levels]
    probabilities = torch.tensor([p for tail in tails for p in (tail, 1 - tail)], dtype=torch.float64)
    width = len(examples.classes) or 1 + len(probabilities)
    answers = np.full((len(examples.keys), width), np.nan)
    for numbers, batch in examples.batches:
        tensors = batch.tensors(next(model.parameters()).device)
        outputs = _outputs(model, tensors, every_step=method.every_step)
        answers[numbers] = method.predicted(model, tensors, outputs, probabilities).cpu().numpy()
    return answers


def _outputs(model: Any, batch: Batch, *, every_step: bool) -> Any:
    """Return the outputs of a model. Steps with an answer each are read in chunks, with the state between them."""
    if not every_step or model.stack.bidirectional:
        return model(batch.inputs, mask=batch.mask, timespans=durations(model, batch))[0]
    outputs, state = [], None
    for begin in range(0, batch.length, CHUNK):
        piece = batch.steps(begin, begin + CHUNK, targets=True)
        output, state = model(piece.inputs, state, mask=piece.mask, timespans=durations(model, piece))
        outputs.append(output)
    return torch.cat(outputs, 1)
