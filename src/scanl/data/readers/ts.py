"""The form .ts of the UCR and UEA archives: a series a line, and its answer."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.files import Files


def series(files: Files, name: str, folder: str) -> tuple[list[NDArray[np.float64]], list[Any]]:
    """Return series (t, C), and the answer of each as text: a class, or with @targetlabel a number.

    A file has comments (#), tags (@), and after @data one series a line. A line has the channels and then the answer,
    with colons between them. The numbers of a channel have commas between them. A missing number is ? or NaN.
    """
    rows: list[NDArray[np.float64]] = []
    answers: list[str] = []
    path, begun = files.path(name, folder), False
    for number, line in enumerate(files.text(name, folder).splitlines(), 1):
        text = line.strip()
        if not begun:
            begun = text.lower() == "@data"
            if "@timestamps true" in text.lower():
                raise files.damaged(path, "it has time stamps, which are not read", folder)
            continue
        if not text or text.startswith("#"):
            continue
        *channels, answer = text.split(":")
        try:
            values = [[_number(value) for value in channel.split(",")] for channel in channels]
        except ValueError as error:
            raise files.damaged(path, f"line {number}: {error}", folder) from error
        if not values or not answer:
            raise files.damaged(path, f"line {number} has no channel, or no answer after a colon", folder)
        row = np.full((max(map(len, values)), len(values)), np.nan)
        for place, channel in enumerate(values):
            row[: len(channel), place] = channel
        if rows and row.shape[1] != rows[0].shape[1]:
            why = f"line {number} has {row.shape[1]} channels, expected {rows[0].shape[1]}"
            raise files.damaged(path, why, folder)
        rows.append(_ended(row))
        answers.append(answer.strip())
    if not rows:
        raise files.damaged(path, "it has no series after @data", folder)
    return rows, answers


def _number(text: str) -> float:
    return np.nan if text.strip() in ("?", "NaN", "nan") else float(text)


def _ended(row: NDArray[np.float64]) -> NDArray[np.float64]:
    """Leave out the steps at the end in which every channel is missing, and set other missing numbers to 0."""
    steps = np.flatnonzero(~np.isnan(row).all(1))
    return np.nan_to_num(row[: steps[-1] + 1 if len(steps) else 0])
