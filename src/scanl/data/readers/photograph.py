"""Photographs as JPEG or PNG, of any size."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scanl.data.files import Files


def square(files: Files, path: Path, side: int, whole: int, folder: str = "") -> NDArray[np.uint8]:
    """Return the middle of a photograph: (side, side, 3). It is first scaled so that its shorter side has `whole`."""
    from PIL import Image

    try:
        with Image.open(path, formats=["JPEG", "PNG"]) as image:
            image.draft("RGB", (2 * whole, 2 * whole))
            width, height = image.size
            scale = whole / min(width, height)
            size = max(whole, round(width * scale)), max(whole, round(height * scale))
            left, top = ((length - side) // 2 for length in size)
            found = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
            return np.asarray(found.crop((left, top, left + side, top + side)))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise files.damaged(path, f"Pillow cannot read it: {error}", folder) from error
