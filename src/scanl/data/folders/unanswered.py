"""Examples without answers: the inputs from a user's table or files that a trained model answers."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scanl.data.base import IGNORED
from scanl.data.batch import Batch
from scanl.data.folders.folders import Folders, below
from scanl.data.series.columns import column, grouped
from scanl.data.series.rows import BATCH, SeriesRows, in_batches
from scanl.data.series.table import Table
from scanl.errors import DataError


@dataclass
class UnansweredExamples:
    """Examples and their names.

    keys: a frame with a row for each answer: the series, the row of a table or the file.   batches: the numbers of the
    rows of `keys`, and the examples of which they are the answers, in this order.   classes: of the answers; empty for
    numbers.   target: name of the answers.
    """

    keys: Any
    batches: list[tuple[Any, Batch]]
    classes: list[str]
    target: str


def of_table(table: Table, frame: Any, path: Path) -> UnansweredExamples:
    """Return the series of a table, or its rows if each step has an answer. The target need not be a column.

    A series shorter than the longest in training begins with missing steps. Raises DataError as `Table` does.
    """
    training, target = table.collection, str(table.target)
    for role, names in table.roles.titles[1:]:
        for name in names:
            column(frame, path, name, role)
    frame = frame.assign(**{target: np.nan})
    if not table.asked.per_series:
        frame, _ = table.without_gaps(frame.assign(**{_ROW: np.arange(len(frame))}), path, training)
    collection = table.collect(frame, path, training, answered=False)
    for note in collection.notes:
        warnings.warn(note, stacklevel=2)
    places = [rows for _, rows in grouped(frame, path, table.series_columns)]
    flat = SeriesRows(collection.series, max([table.length, *map(len, collection.series)]))
    if table.asked.per_series:
        by_length: dict[int, list[int]] = {}
        for i, member in enumerate(collection.series):
            by_length.setdefault(max(table.length, len(member)), []).append(i)
        batches = []
        for length, numbers in by_length.items():
            for some in in_batches(numbers):
                rows, nothing = flat.aligned(some, length), np.zeros(len(some), np.int64)
                batches.append((np.array(some), Batch(flat.features[rows], nothing, timespans=flat.durations(rows))))
        keys = frame.iloc[[rows[0] for rows in places]][table.series_columns].reset_index(drop=True)
        return UnansweredExamples(keys, batches, training.classes, target)
    numbers, batches = frame[_ROW].to_numpy(np.float64), []
    for i, own_rows in enumerate(places):
        rows = (flat.starts[i] + np.arange(len(own_rows)))[None]
        labels = np.where(np.isnan(numbers[own_rows]), IGNORED, 0)[None]  # an absent step has no answer
        asks = numbers[own_rows][labels[0] == 0].astype(np.int64)
        batches.append((asks, Batch(flat.features[rows], labels, timespans=flat.durations(rows))))
    present = frame[frame[_ROW].notna()].sort_values(_ROW)
    names = table.roles.keys
    keys = present[names].reset_index(drop=True) if names else present[[_ROW]].astype(int).set_axis(["row"], axis=1)
    return UnansweredExamples(keys.reset_index(drop=True), batches, training.classes, target)


def of_files(folders: Folders, paths: Sequence[Path]) -> UnansweredExamples:
    """Return files, and all files of folders, as rows of the form on which the folders were trained.

    Raises DataError for a file of another kind, and for a recording or a picture of another form.
    """
    import pandas as pd

    files = [file for path in paths for file in (below(path) if path.is_dir() else [path])]
    batches = []
    for begin in range(0, len(files), BATCH):
        numbers = np.arange(begin, min(begin + BATCH, len(files)))
        batches.append((numbers, folders.unlabeled([files[n] for n in numbers])))
    if not files:
        raise DataError(f"{folders.name}: {', '.join(map(str, paths))} has no file, expected files to answer for")
    return UnansweredExamples(pd.DataFrame({"file": list(map(str, files))}), batches, folders.class_names, "class")


_ROW = "\0row"  # a column with the number of each row of the table; no file has this name
