"""PNG files: one picture, or one whose every row is an image."""

import json
import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scanl.data.files import Files
from scanl.data.fixed import FixedPart


def pixels(files: Files, path: Path, folder: str, mode: str, content: bytes | None = None) -> NDArray[np.uint8]:
    """Return the pixels of a picture: (height, width) for the mode "L", (height, width, 3) for "RGB".

    content: of the file, if it was read already.
    """
    from PIL import Image

    try:
        with Image.open(path if content is None else BytesIO(content), formats=["PNG"]) as image:
            return np.asarray(image.convert(mode))
    except (OSError, SyntaxError, ValueError) as error:
        raise files.damaged(path, f"Pillow cannot read it: {error}", folder) from error


def images(files: Files, names: Sequence[str], folder: str, shape: tuple[int, int, int]) -> FixedPart:
    """Return the images (N, pixels, numbers), each a row of pixels of a picture, and the classes of a JSON list.

    The list is the last file.
    """
    *pictures, labels = names
    size, rows = math.prod(shape[:2]), []
    for name in pictures:
        path, content = files.path(name, folder), files.read(name, folder)
        rows.append(pixels(files, path, folder, "RGB" if shape[2] == 3 else "L", content))
        if rows[-1].shape[1] != size:
            why = f"its rows have {rows[-1].shape[1]} pixels, expected {size}"
            raise files.damaged(path, why, folder)
    images = np.concatenate(rows).reshape(-1, size, shape[2])
    try:
        answers = np.array(json.loads(files.text(labels, folder)))
    except ValueError as error:
        raise files.damaged(files.path(labels, folder), str(error), folder) from error
    if answers.shape != (len(images),) or not np.issubdtype(answers.dtype, np.integer):
        why = f"{len(images)} images have {answers.shape} labels"
        raise files.damaged(files.path(labels, folder), why, folder)
    return FixedPart(images, answers.astype(np.int64))
