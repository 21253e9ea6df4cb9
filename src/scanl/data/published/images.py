"""Images as sequences, pixel by pixel: to classify, or to predict each number from the numbers before it."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from scanl.data.base import SignalSource
from scanl.data.files import Files
from scanl.data.fixed import FixedPart, FixedRows, Parts, set_aside
from scanl.data.folders.signals import Picture
from scanl.data.published.sources import kind, published
from scanl.data.questions import Class, FeatureInputs, NextToken, Question, Vocabulary
from scanl.data.readers import cifar, idx, npz, png
from scanl.errors import ConfigError, DataError
from scanl.options import Positive, Range

READERS: Mapping[str, Callable[..., FixedPart]] = {
    "cifar": cifar.images,
    "idx": idx.images,
    "npz": npz.images,
    "png": png.images,
}


def read_images(files: Files, folder: str, shape: tuple[int, int, int]) -> tuple[FixedPart, FixedPart]:
    """Read the images (N, pixels, numbers) and the classes of the training and of the test part."""
    layout, parts = files.laid_out(folder), []
    for name, what in (("train", "training images"), ("test", "test images")):
        parts.append(READERS[layout.reader](files, layout.parts[name], folder, shape, **layout.options))
        files.check_counts({what: len(parts[-1].rows)}, folder)
    return parts[0], parts[1]


def permutation(order: str, size: int) -> NDArray[np.int64]:
    """Return the order in which the pixels of an image are read.

    order: "raster"; "bit_reversal", the bit reversal of the next power of two without the numbers from `size` on;
    "torch:SEED" or "numpy:SEED", which is a random order, the first that is drawn after this seed.
    """
    if order == "raster":
        return np.arange(size)
    if order == "bit_reversal":
        bits = (size - 1).bit_length()
        reverse = np.array([int(f"{i:0{bits}b}"[::-1], 2) for i in range(2**bits)])
        return reverse[reverse < size]
    library, _, seed = order.partition(":")
    if library == "torch" and seed.isdigit():
        return torch.randperm(size, generator=torch.Generator().manual_seed(int(seed))).numpy()
    if library == "numpy" and seed.isdigit():
        return np.random.RandomState(int(seed)).permutation(size)
    raise ConfigError(f"images: order is {order!r}, expected raster, bit_reversal, torch:SEED or numpy:SEED")


@dataclass
class PixelByPixel(FixedRows):
    """Images of one size that are read pixel by pixel.

    A record gives `shape`; the readers of `READERS` take it.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        order: of the pixels; see `permutation`.
        aside: number of training images that are set aside. The seed 42 decides which ones.
    """

    readers: ClassVar[Mapping[str, Callable[..., FixedPart]]] = READERS
    splits: ClassVar[Sequence[tuple[str, ...]]] = [("train", "test")]
    most_files: ClassVar[int] = sys.maxsize
    shape: ClassVar[tuple[int, int, int]]  # height, width, numbers of a pixel

    order: str = "raster"
    aside: Positive = 6000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pixels = permutation(self.order, self.length)

    def read(self) -> Parts:
        train, test = self.images()
        if self.aside >= len(train.answers):
            have = f"{len(train.answers)} training images"
            raise DataError(f"{self.name}: aside is {self.aside}, expected less than the {have}")
        return Parts(*set_aside(train, self.aside), test)

    def images(self) -> tuple[FixedPart, FixedPart]:
        """Read the images and classes of training and test."""
        return read_images(self.files, self.folder, self.shape)


@kind
@dataclass
class Images(PixelByPixel):
    """Classify an image, read pixel by pixel. A step has the numbers of a pixel.

    A record gives `shape` and `classes`, and for numbers that are standardized `mean` and `deviation`.

    Args: see `PixelByPixel`.
    """

    classes: ClassVar[int]
    mean: ClassVar[tuple[float, ...]] = (0.0,)  # of the numbers in [0, 1], each or all
    deviation: ClassVar[tuple[float, ...]] = (1.0,)

    @property
    def length(self) -> int:
        return math.prod(self.shape[:2])

    @property
    def question(self) -> Question:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Class(FeatureInputs(self.shape[2]), self.classes)

    def images(self) -> tuple[FixedPart, FixedPart]:
        parts = super().images()
        for split, name in zip(parts, ("training", "test"), strict=True):
            if len(odd := split.answers[(split.answers < 0) | (split.answers >= self.classes)]):
                why = f"a {name} image has the label {odd[0]}, expected from 0 to {self.classes - 1}"
                raise self.files.damaged(self.files.folder(self.folder), why, self.folder)
        return parts

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        numbers = np.stack(rows)[:, self.pixels] / 255
        return ((numbers - np.array(self.mean)) / np.array(self.deviation)).astype(np.float32)


@kind
@dataclass
class ColorImages(Images):
    """Classify an image of three colors, read pixel by pixel. A step has three numbers, or a grey.

    A record gives what `Images` needs, and `luma`: mean and deviation of the gray values, from 0 to 255 for white. Gray
    values have the weights of ITU-R BT.601, as in image programs.

    Args:
        seed, eval_examples, folder, order, aside: see `PixelByPixel`.
        gray: one channel in place of three.
    """

    luma: ClassVar[tuple[float, float]]

    gray: bool = False

    @property
    def question(self) -> Question:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Class(FeatureInputs(1 if self.gray else 3), self.classes)

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        if not self.gray:
            return super().form(rows)
        gray = np.stack(rows)[:, self.pixels] / 255 @ np.array([0.299, 0.587, 0.114])
        mean, deviation = self.luma
        return ((gray[..., None] - mean / 255) / (deviation / 255)).astype(np.float32)


@published("noise_padded_cifar10")
@dataclass
class NoisePaddedCIFAR10(Images):
    """Noise-padded CIFAR-10: the 32 rows of an image, then 968 steps of noise. T = 1000 steps of 96 channels.

    A step is a row: 32 red, 32 green and 32 blue numbers in [0, 1]. The noise is one block (968, 96) of the normal
    distribution, the same for all images, as in the programs of coRNN, LEM and UnICORNN; Chang et al. say uniform.
    2,000 training images are set aside for validation.

    Args:
        seed, eval_examples, folder, aside: see `PixelByPixel`.
        order: must be left as it is.
    """

    order: Annotated[str, Range("raster", lambda order, _: order == "raster")] = "raster"
    aside: Positive = 2000

    @property
    def length(self) -> int:
        return 1000

    @property
    def question(self) -> Question:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Class(FeatureInputs(96), self.classes)

    @cached_property
    def noise(self) -> NDArray[np.float32]:
        """The steps after the image; seed 42."""
        return np.random.default_rng(42).standard_normal((968, 96)).astype(np.float32)

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        images = np.stack(rows).reshape(-1, 32, 32, 3).transpose(0, 1, 3, 2).reshape(-1, 32, 96) / np.float32(255)
        return np.concatenate([images, np.broadcast_to(self.noise, (len(images), 968, 96))], 1).astype(np.float32)


@kind
@dataclass
class Pixels(PixelByPixel, SignalSource):
    """Predict each pixel of an image from the pixels before it. The first is predicted from a zero.

    A record gives `shape`. The score is the mean of -log2 p over all numbers of the images. Each has 256 values.

    Args: see `PixelByPixel`.
    """

    metric = "bits per dimension"
    question = NextToken(Vocabulary(256))

    @property
    def length(self) -> int:
        return math.prod(self.shape)

    @property
    def signal(self) -> Picture:
        return Picture(self.shape, self.pixels)

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        tokens = np.zeros((len(rows), self.length), np.int64)
        tokens[:, 1:] = self._tokens(rows)[:, :-1]
        return tokens

    def _tokens(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.stack(rows).reshape(len(rows), self.length)[:, self.pixels]

    def answers(self, split: FixedPart) -> NDArray[Any]:
        return self._tokens(list(split.rows)).astype(np.int64)
