"""NumPy's archives .npz: named arrays. Nothing in them is unpickled."""

import math
import zipfile
import zlib
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.files import Files
from scanl.data.fixed import FixedPart


def arrays(files: Files, name: str, keys: Sequence[str], folder: str = "") -> list[NDArray[Any]]:
    """Return arrays of an .npz file, by name. Raises DataError as `Files.read` does."""
    content = BytesIO(files.read(name, folder))
    try:
        with np.load(content, allow_pickle=False) as archive:
            return [archive[key] for key in keys]
    except (ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, TypeError) as error:
        why = f"it is no npz file with {', '.join(keys)}: {error}"
        raise files.damaged(files.path(name, folder), why, folder) from error


def images(
    files: Files,
    names: Sequence[str],
    folder: str,
    shape: tuple[int, int, int],
    *,
    images: str,
    labels: str = "",
    planes: bool = False,
) -> FixedPart:
    """Return the images (N, pixels, numbers) of the arrays `images`, and the classes of the arrays `labels`.

    Without `labels` all classes are 0.   planes: whether a color follows the other, rather than a pixel the other.
    """
    rows, answers, size = [], [], math.prod(shape)
    for name in names:
        values, *classes = arrays(files, name, [images, *([labels] if labels else [])], folder)
        if values.dtype != np.uint8 or math.prod(values.shape[1:]) != size or values.ndim < 2:
            why = f"its {images} is {values.dtype} {values.shape}, expected uint8 (N, {size})"
            raise files.damaged(files.path(name, folder), why, folder)
        if classes and (classes[0].shape != (len(values),) or classes[0].dtype.kind not in "iu"):
            why = f"{values.shape} images have {classes[0].dtype} {classes[0].shape} labels"
            raise files.damaged(files.path(name, folder), why, folder)
        rows.append(values.reshape(len(values), *((shape[2], -1) if planes else (-1, shape[2]))))
        answers.append(classes[0].astype(np.int64) if classes else np.zeros(len(values), np.int64))
    pixels = np.concatenate(rows)
    return FixedPart(pixels.transpose(0, 2, 1) if planes else pixels, np.concatenate(answers))


def series(
    files: Files, name: str, folder: str, *, values: str, answers: str, lengths: str
) -> tuple[list[NDArray[np.float64]], list[Any]]:
    """Return series (t, C), and an answer for each.

    values: name of an array of all steps, one series after the other.   answers, lengths: of an answer and of the
    number of steps of each series.
    """
    steps, labels, counts = arrays(files, name, [values, answers, lengths], folder)
    if steps.ndim != 2 or counts.sum() != len(steps) or len(counts) != len(labels) or counts.min() < 1:
        why = f"{lengths} of sum {counts.sum()} do not fit {values} {steps.shape}"
        raise files.damaged(files.path(name, folder), why, folder)
    return np.split(steps.astype(np.float64), np.cumsum(counts)[:-1]), labels.tolist()
