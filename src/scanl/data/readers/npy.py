"""NumPy's files .npy: an array, packed or not. Nothing is unpickled."""

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.files import Files


def array(files: Files, path: Path, folder: str, dimensions: int) -> NDArray[Any]:
    """Return the array of a file, numbers with this many dimensions."""
    try:
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise files.damaged(path, f"it is no array of numbers: {error}", folder) from error
    if values.ndim != dimensions or not values.size or values.dtype.kind not in "fiu":
        why = f"it is {values.dtype} {values.shape}, expected numbers ({', '.join('tC'[:dimensions])})"
        raise files.damaged(path, why, folder)
    return values


def packed(files: Files, path: Path, form: tuple[int, ...], max_rows: int, folder: str = "") -> NDArray[Any]:
    """Return the first rows of an array in a packed .npy file, at most `most`. Nothing is unpickled.

    form: the sizes of a row.
    """
    try:
        with gzip.open(path) as file:
            version = np.lib.format.read_magic(file)
            read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[
                version
            ]
            shape, by_columns, kind = read_header(file)
            have, *row = shape
            if kind.kind not in "biuf" or tuple(row) != form or (by_columns and row):
                raise ValueError(f"its array is {kind} {shape}, expected numbers (N, {', '.join(map(str, form))})")
            rows = min(max_rows, have)
            content = file.read(rows * math.prod(form) * kind.itemsize)
        return np.frombuffer(content, kind).reshape(rows, *form)
    except (OSError, ValueError, KeyError, EOFError, zlib.error) as error:
        raise files.damaged(path, f"it is no packed array: {error}", folder) from error
