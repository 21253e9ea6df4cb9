"""The binary form of CIFAR: records of labels and the planes of an image, all bytes."""

import math
from collections.abc import Sequence

import numpy as np

from scanl.data.files import Files
from scanl.data.fixed import FixedPart


def images(
    files: Files, names: Sequence[str], folder: str, shape: tuple[int, int, int], *, labels: int = 1
) -> FixedPart:
    """Return the images (N, pixels, numbers) of files, and their classes.

    A record has `labels` bytes, the last one the class, and an image, one plane of a color after the other.
    """
    size, contents = labels + math.prod(shape), []
    for name in names:
        content = files.read(name, folder)
        if len(content) == 0 or len(content) % size:
            why = f"it has {len(content)} bytes, expected records of {size}"
            raise files.damaged(files.path(name, folder), why, folder)
        contents.append(np.frombuffer(content, np.uint8).reshape(-1, size))
    records = np.concatenate(contents)
    planes = records[:, labels:].reshape(len(records), shape[2], -1)
    return FixedPart(planes.transpose(0, 2, 1), records[:, labels - 1].astype(np.int64))
