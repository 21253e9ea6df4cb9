"""A stream of digits, one pixel at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from scanl.data.base import IGNORED, register
from scanl.data.questions import FeatureInputs, Label
from scanl.errors import ConfigError
from scanl.tasks.stream import Sample, StreamTask

MAX_BRIGHTNESS = 16


@register("digits_stream")
@dataclass
class DigitsStream(StreamTask):
    """Digits pixel by pixel: which digit an image of 8 x 8 pixels shows, at its last pixel; images without end.

    The 1,797 images of `sklearn.datasets.load_digits` are read row by row, in a new order every time that all have been
    seen. Nothing is reset between two images.

    Args: see `StreamTask`.

    inputs: the pixel, from 0 to 1, and a 1 at the first pixel of an image.
    """

    source = (
        'Kaynak, "Methods of Combining Multiple Classifiers and Their Applications to Handwritten Digit Recognition", '
        "MSc thesis, 1995, the test part"
    )
    metric = "accuracy"
    question = Label(FeatureInputs(2), 10)
    chance = 0.1

    @cached_property
    def images(self) -> tuple[list[list[float]], list[int]]:
        """Pixels of each image, 64 each, and the digits."""
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ConfigError(
                f"{self.name}: the digits come with scikit-learn: pip install 'scanl[sklearn]'"
            ) from error
        data: Any = load_digits()
        return (data.data / MAX_BRIGHTNESS).tolist(), data.target.tolist()

    def samples(self, random: np.random.Generator) -> Iterator[Sample]:
        images, digits = self.images
        while True:
            for chosen in random.permutation(len(digits)).tolist():
                *pixels, last = images[chosen]
                yield from (([pixel, float(t == 0)], IGNORED) for t, pixel in enumerate(pixels))
                yield [last, 0.0], digits[chosen]
