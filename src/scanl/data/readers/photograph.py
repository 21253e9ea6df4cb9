"""Photographs as JPEG or PNG, of any size."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scanl.data.files import Files


def square(files: Files, path: Path, side: int, shorter_side: int, folder: str = "") -> NDArray[np.uint8]:
    """Return the middle of a photograph: (side, side, 3). It is first scaled to `shorter_side`."""
    from PIL import Image

    try:
        with Image.open(path, formats=["JPEG", "PNG"]) as image:
            image.draft("RGB", (2 * shorter_side, 2 * shorter_side))
            width, height = image.size
            scale = shorter_side / min(width, height)
            size = max(shorter_side, round(width * scale)), max(shorter_side, round(height * scale))
            left, top = ((length - side) // 2 for length in size)
            scaled = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
            return np.asarray(scaled.crop((left, top, left + side, top + side)))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise files.damaged(path, f"Pillow cannot read it: {error}", folder) from error
