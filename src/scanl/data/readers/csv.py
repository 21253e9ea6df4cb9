"""CSV: a table of numbers whose first row has the names of its columns."""

import csv
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scanl.data.files import Files

MISSING = ("", "NA", "NaN", "?")


def columns(
    files: Files, name: str, folder: str, chosen: Sequence[str], skipped: Sequence[str], *, delimiter: str = ","
) -> tuple[list[str], NDArray[np.float64]]:
    """Return the names of columns and their numbers (n, C); a missing number is NaN.

    chosen: names of the columns; none: all but `skipped`.   delimiter: between two fields of a row.
    """
    header, *rows = [*csv.reader(files.text(name, folder).splitlines(), delimiter=delimiter)] or [[]]
    header = [column.strip() for column in header]
    names = list(chosen) or [column for column in header if column not in skipped]
    path = files.path(name, folder)
    if lacking := set(names) - set(header) or not (names and rows):
        raise files.damaged(path, f"it has the columns {header}, and lacks {lacking}", folder)
    places = [header.index(column) for column in names]
    values = np.empty((len(rows), len(names)))
    for number, row in enumerate(rows):
        try:
            values[number] = [np.nan if row[at] in MISSING else float(row[at]) for at in places]
        except (ValueError, IndexError) as error:
            raise files.damaged(path, f"line {number + 2}: {error}", folder) from error
    files.check_counts({"rows": len(values)}, folder)
    return names, values
