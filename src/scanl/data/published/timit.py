"""TIMIT: the next frame of the spectrum of a spoken sentence."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from scanl.data.fixed import FixedPart, FixedRows, FromFiles, Parts
from scanl.data.published.sources import published
from scanl.data.questions import FeatureInputs, Numbers
from scanl.data.readers import sphere

BINS = 129


def halved(samples: NDArray[Any]) -> NDArray[np.float64]:
    """Return samples at half the rate, behind a low-pass filter of 41 numbers: a sinc under a Kaiser window of 5."""
    n = np.arange(-20, 21)
    taps = np.sinc(n / 2) / 2 * np.kaiser(41, 5)
    return np.convolve(samples / 2.0**15, taps / taps.sum(), "same").astype(np.float64)[::2]


def spectrum(samples: NDArray[np.float64]) -> NDArray[np.float32]:
    r"""Return frames (1 + t // 128, 129) of samples at 8 kHz: 10 lg(1e-5 + |X|^2), in decibels.

    X is the Fourier transform of 256 samples under a Hann window, at every 128th sample; the ends are mirrored.
    """
    window = torch.hann_window(256, dtype=torch.float64)
    spectra = torch.stft(torch.from_numpy(samples), 256, 128, window=window, return_complex=True).mT
    return (10 * (1e-5 + spectra.abs().square()).log10()).float().numpy()


@published("timit")
@dataclass
class TIMITFrames(FixedRows):
    """TIMIT: the next of 129 levels of the spectrum of a spoken sentence, at every 16 ms.

    Sentences are resampled to 8 kHz. The sentences SA, which all speakers say, are left out. Training has the 3,696
    sentences of the published training part, validation 400 sentences of 50 speakers, and test the core test set, 192
    sentences of 24 speakers. The literature counts 3,640 for training, and does not say which. The score is the mean
    squared error of a level in decibels.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        exchanged: exchange the parts for validation and test, as Lezcano and Casado (arXiv:1901.08428) and Erichson et
            al. (Lipschitz RNN, arXiv:2006.12070) do.
    """

    metric = "mean squared error"
    uneven = True
    question = Numbers(FeatureInputs(BINS), BINS)

    development: ClassVar[tuple[str, ...]]  # speakers of the part for validation
    core: ClassVar[tuple[str, ...]]  # speakers of the part for test

    exchanged: bool = False

    @property
    def length(self) -> int:
        return self._length

    @cached_property
    def _length(self) -> int:
        longest = max(path.stat().st_size for split in self.parts for path in split.rows.paths)  # pyright: ignore
        return ((longest - 1024) // 2 + 1) // 2 // 128

    def read(self) -> Parts:
        train = self.files.below("TRAIN", "*/*/S[IX]*.WAV", self.folder)
        test = self.files.below("TEST", "*/*/S[IX]*.WAV", self.folder)
        parts = [train, *([path for path in test if path.parent.name in who] for who in (self.development, self.core))]
        for what, split in zip(("training", "development", "core test"), parts, strict=True):
            self.files.check_counts({f"{what} sentences": len(split)}, self.folder)
        if self.exchanged:
            parts[1:] = parts[:0:-1]
        return Parts(*(FixedPart(FromFiles(split, self.frames), np.zeros(len(split), np.int64)) for split in parts))

    def frames(self, path: Path) -> NDArray[np.float32]:
        """Return the frames of a sentence: (t, 129)."""
        samples = sphere.samples(self.files, path, self.folder)
        if len(samples) < 512:
            raise self.files.damaged(path, f"it has {len(samples)} samples, expected two frames, 512", self.folder)
        return spectrum(halved(samples))

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return self._padded([row[:-1] for row in rows])

    def answers(self, split: FixedPart) -> NDArray[Any]:
        return self._padded([row[1:] for row in split.rows])

    def _padded(self, rows: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        batch = np.full((len(rows), self.length, BINS), np.nan, np.float32)
        for place, row in zip(batch, rows, strict=True):
            place[: len(row)] = row
        return batch
