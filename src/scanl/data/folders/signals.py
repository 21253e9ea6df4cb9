"""Signals whose samples are tokens, as files: recordings, and pictures."""

import math
import wave
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import Signal
from scanl.data.folders.folders import Pictures, Sounds
from scanl.errors import DataError
from scanl.files import written_whole

BLOCK = 1024  # samples that are written at once


def mu_law(samples: NDArray[np.number]) -> NDArray[np.int64]:
    """Quantise samples to 0 ... 255: scaled to [-1, 1] by their range, then companded with mu = 255.

    u = (sign(x) ln(1 + 255 |x|) / ln 256 + 1) / 2,   q = floor(u (256 - 0.01) + 0.005).
    """
    low, high = float(samples.min()), float(samples.max())
    x = 2 * (samples - low) / max(high - low, 1e-12) - 1
    u = (np.sign(x) * np.log1p(255 * np.abs(x)) / math.log(256) + 1) / 2
    return np.floor(u * (256 - 0.01) + 0.005).astype(np.int64)


def expanded(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the samples in [-1, 1] in the middle of the steps of `mu_law`. Quantising them gives the tokens again."""
    u = 2 * (tokens + 0.495) / (256 - 0.01) - 1
    return np.sign(u) * np.expm1(np.abs(u) * math.log(256)) / 255


def linear(samples: NDArray[np.number]) -> NDArray[np.int64]:
    """Quantise samples to 0 ... 255: scale them to [0, 1] by their range, u = (x - min) / (max - min), then as
    `mu_law`."""
    low, high = float(samples.min()), float(samples.max())
    return np.floor((samples - low) / max(high - low, 1e-12) * (256 - 0.01) + 0.005).astype(np.int64)


def spread(tokens: NDArray[np.int64]) -> NDArray[np.floating]:
    """Return the samples in [-1, 1] in the middle of the steps of `linear`. Quantising them gives the tokens again."""
    return 2 * (tokens + 0.495) / (256 - 0.01) - 1


@dataclass(frozen=True)
class Recording(Signal):
    """Samples of one channel in 256 steps, as WAV files of 16 bits at a rate of `rate` samples a second.

    encode: makes tokens of samples.   decode: makes samples in [-1, 1] of tokens.
    """

    ending = ".wav"
    first = 128
    fixed = False

    rate: int
    steps: int
    encode: Callable[[NDArray[np.number]], NDArray[np.int64]] = mu_law
    decode: Callable[[NDArray[np.int64]], NDArray[np.floating]] = expanded

    def read(self, path: Path) -> NDArray[np.int64]:
        (channels, rate), form = Sounds().about(path)
        samples = Sounds().read(path)
        if (channels, rate) != (1, self.rate) or not len(samples):
            raise DataError(f"{path} has {len(samples)} samples of {form}, expected 1 channels at {self.rate} Hz")
        return self.encode(samples[:, 0])

    def write(self, tokens: Iterable[int], path: Path) -> None:
        stream = iter(tokens)
        with written_whole(path) as temporary, temporary.open("wb") as content, wave.open(content, "wb") as file:
            file.setparams((1, 2, self.rate, 0, "NONE", ""))
            while block := list(islice(stream, BLOCK)):
                file.writeframes(np.round(self.decode(np.array(block)) * (2**15 - 1)).astype("<i2").tobytes())


@dataclass(frozen=True)
class Picture(Signal):
    """The numbers of a picture's pixels, 0 ... 255, as PNG files.

    shape: height, width, and the numbers of a pixel: 1 of grey, 3 of a colour.   order: which of them come, in turn.
    """

    ending = ".png"
    first = 0
    fixed = True

    shape: tuple[int, int, int]
    order: NDArray[np.int64]

    @property
    def steps(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return len(self.order)

    def read(self, path: Path) -> NDArray[np.int64]:
        shape, form = Pictures().about(path)
        height, width, numbers = self.shape
        if shape != (width, height, numbers):
            raise DataError(f"{path} has {form}, expected {width} x {height} pixels of {numbers} numbers")
        return np.round(Pictures().read(path) * 255).astype(np.int64).reshape(-1)[self.order]

    def write(self, tokens: Iterable[int], path: Path) -> None:
        from PIL import Image

        pixels = np.zeros(self.steps, np.uint8)
        for place, token in zip(self.order, tokens, strict=True):
            pixels[place] = token
        shape = self.shape if self.shape[2] == 3 else self.shape[:2]
        with written_whole(path) as temporary:
            Image.fromarray(pixels.reshape(shape)).save(temporary)
