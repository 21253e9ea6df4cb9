"""IDX, the form of MNIST: a header of sizes, and unsigned bytes."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scanl.data.files import Files
from scanl.data.fixed import FixedPart
from scanl.errors import ConfigError


def array(files: Files, name: str, folder: str, dimensions: int) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes: magic 2048 + dimensions, the sizes (big-endian, 32 bits), the bytes."""
    content = files.read(name, folder)
    begin = 4 + 4 * dimensions
    header = np.frombuffer(content[:begin], ">u4") if len(content) >= begin else np.zeros(1, np.uint32)
    path = files.path(name, folder)
    if header[0] != 2048 + dimensions:
        raise files.damaged(path, f"it does not begin with {2048 + dimensions}, as IDX files of its kind do", folder)
    shape = tuple(int(size) for size in header[1:])
    if len(content) - begin != math.prod(shape):
        raise files.damaged(path, f"it has {len(content) - begin} bytes, expected {shape} of its header", folder)
    return np.frombuffer(content, np.uint8, offset=begin).reshape(shape)


def images(files: Files, names: Sequence[str], folder: str, shape: tuple[int, int, int]) -> FixedPart:
    """Return the images (N, pixels, numbers) of a file and the classes of another."""
    if len(names) != 2:
        raise ConfigError(f"{files.name}: the part of {', '.join(names)} is no file of images and one of labels")
    pictures, labels = names
    sizes = shape if shape[2] > 1 else shape[:2]
    rows, answers = array(files, pictures, folder, 1 + len(sizes)), array(files, labels, folder, 1)
    if len(rows) != len(answers) or rows.shape[1:] != sizes:
        why = f"{rows.shape} images have {len(answers)} labels"
        raise files.damaged(files.path(labels, folder), why, folder)
    return FixedPart(rows.reshape(len(rows), -1, shape[2]), answers.astype(np.int64))
