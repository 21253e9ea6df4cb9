"""Digits that bounce in a frame."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.data.files import folders
from scanl.data.fresh import FreshRows
from scanl.data.published.images import read_images
from scanl.data.published.sources import published
from scanl.data.questions import FeatureInputs, Numbers
from scanl.options import Positive, Range, at_least

SIDE, ITEM, SPEED = 64, 28, 0.1
ITEMS = ("mnist", "fashion_mnist")


def paths(random: np.random.Generator, count: int, steps: int) -> NDArray[np.int64]:
    """Return corners of items that bounce in a frame: (count, steps, 2), in pixels.

    A position is uniform in the free span of 36 pixels, and so is the direction; the speed is a tenth of the span a
    frame. A step is taken before the first frame. At a border the position is clamped, and its velocity turned round.
    """
    position, angle = random.random((count, 2)), random.uniform(0, 2 * np.pi, count)
    velocity = SPEED * np.stack([np.sin(angle), np.cos(angle)], 1)
    corners = []
    for _ in range(steps):
        position = position + velocity
        velocity = np.where((position < 0) | (position > 1), -velocity, velocity)
        position = position.clip(0, 1)
        corners.append((position * (SIDE - ITEM)).astype(np.int64))
    return np.stack(corners, 1)


@published("bouncing_digits")
@dataclass
class BouncingDigits(FreshRows):
    """Bouncing digits: the next frame of two digits that bounce in 64 x 64 pixels.

    20 frames; at each of the first 19 the target is the next frame, and the last 10 are scored. Pixels are in [0, 1].
    Where items overlap, the brighter pixel counts. Every step has new sequences. Training draws items from the
    training images of the set, measurements from its test images.

    Args:
        seed, eval_examples: see `FreshRows`.
        items: mnist or fashion_mnist.
        folder: where the files of the items lie; none: in the folder of that data set.
        count: number of items in a frame.
        frames: number of frames.
    """

    metric = "mean squared error"
    question = Numbers(FeatureInputs(SIDE * SIDE), SIDE * SIDE)

    items: Annotated[str, Range(f"one of {', '.join(ITEMS)}", lambda items, _: items in ITEMS)] = "mnist"
    folder: str = ""
    count: Positive = 2
    frames: Annotated[int, at_least(2)] = 20

    @cached_property
    def images(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Images of the training and of the test part: (N, 28, 28)."""
        train, test = read_images(folders[self.items], self.folder, (ITEM, ITEM, 1))
        return np.asarray(train.rows).reshape(-1, ITEM, ITEM), np.asarray(test.rows).reshape(-1, ITEM, ITEM)

    def check(self) -> None:
        _ = self.images

    @property
    def length(self) -> int:
        return self.frames - 1

    def generate(self, count: int, random: np.random.Generator, *, training: bool) -> Batch:
        images = self.images[0 if training else 1]
        video = np.zeros((count, self.frames, SIDE, SIDE), np.uint8)
        for _ in range(self.count):
            chosen = images[random.integers(0, len(images), count)]
            corners = paths(random, count, self.frames)
            for row, frame in np.ndindex(count, self.frames):
                top, left = corners[row, frame]
                place = video[row, frame, top : top + ITEM, left : left + ITEM]
                np.maximum(place, chosen[row], out=place)
        pixels = (video.reshape(count, self.frames, -1) / 255).astype(np.float32)
        targets = pixels[:, 1:].copy()
        targets[:, : max(0, self.frames - 11)] = np.nan
        return Batch(pixels[:, :-1], targets)
