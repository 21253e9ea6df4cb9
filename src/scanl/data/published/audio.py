"""Recordings as WAV files: Speech Commands to classify by 35 words or ten; its digits and piano music to predict."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scanl.data.base import IGNORED, Signal, SignalSource
from scanl.data.files import lines
from scanl.data.fixed import FixedPart, FixedRows, FromFiles, Parts
from scanl.data.folders.signals import Recording, expanded, linear, mu_law, spread
from scanl.data.published.sources import kind, published
from scanl.data.questions import Class, FeatureInputs, NextToken, Question, Vocabulary
from scanl.data.readers.wav import RATE, opened
from scanl.options import Positive

TEN = "yes no up down left right on off stop go".split()  # noqa: SIM905
NUMBERS = "zero one two three four five six seven eight nine".split()  # noqa: SIM905
WORDS = sorted(
    [
        *NUMBERS,
        *"backward bed bird cat dog down follow forward go happy house learn left marvin no off on right".split(),  # noqa: SIM905
        *"sheila stop tree up visual wow yes".split(),  # noqa: SIM905
    ]
)


@published("speech_commands")
@dataclass
class SpeechCommands(FixedRows):
    """Speech Commands: which of 35 words a recording says, sample by sample. T = 16,000 steps.

    The published lists name the clips for validation and test; the others are for training. Samples are divided by
    2^15, and a shorter clip is followed by zeros. The programs of S4 and S5 also standardise each of the 16,000
    positions over the training part; here it is not done. Files are read when a batch needs them.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        max_length: samples of a clip that are read, and steps of a row.
    """

    question = Class(FeatureInputs(1), len(WORDS))
    words = WORDS

    max_length: Positive = RATE

    @property
    def length(self) -> int:
        return self.max_length

    def read(self) -> Parts:
        listed = [set(lines(self.files.text(name, self.folder))) for name in self.files.needs[:2]]
        paths: tuple[list[Path], ...] = ([], [], [])
        labels: tuple[list[int], ...] = ([], [], [])
        for label, word in enumerate(self.words):
            for path in self.files.below(word, "*.wav", self.folder):
                name = f"{word}/{path.name}"
                split = 1 if name in listed[0] else 2 if name in listed[1] else 0
                paths[split].append(path)
                labels[split].append(label)
        if self.words is WORDS:
            for what, clips in zip(("training clips", "validation clips", "test clips"), paths, strict=True):
                self.files.check_counts({what: len(clips)}, self.folder)
        return Parts(
            *(
                FixedPart(FromFiles(clips, self.clip), np.array(answers, np.int64))
                for clips, answers in zip(paths, labels, strict=True)
            )
        )

    def clip(self, path: Path) -> NDArray[np.int16]:
        """Return the samples of a file."""
        with opened(self.files, path, self.folder) as file:
            return np.frombuffer(file.readframes(file.getnframes()), "<i2")

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        batch = np.zeros((len(rows), self.length, 1), np.float32)
        for place, row in zip(batch, rows, strict=True):
            place[: len(row), 0] = row[: self.length] / np.float32(2**15)
        return batch


HOP, BINS, COEFFICIENTS = 100, 64, 20  # samples between two frames; bands of the mel scale; numbers of a frame


def mfcc(samples: Tensor) -> Tensor:
    r"""Return the cepstral coefficients of frames (B, 1 + T // 100, 20), from samples (B, T) at 16 kHz.

    They are computed as in torchaudio. First comes the power spectrum of 200 samples under a Hann window, around every
    hundredth sample; the ends are mirrored. It is summed over 64 triangles at equal distances of the mel scale, 2595
    lg(1 + f / 700), from 0 to 8 kHz. Then come the logarithm of the sum plus 1e-6, and the first 20 numbers of the
    orthonormal discrete cosine transform of the second kind.
    """
    window = torch.hann_window(2 * HOP, dtype=samples.dtype)
    power = torch.stft(samples, 2 * HOP, HOP, window=window, return_complex=True).abs().square().mT
    mel = torch.linspace(0, 2595 * math.log10(1 + RATE / 2 / 700), BINS + 2, dtype=torch.float64)
    edges = 700 * (10 ** (mel / 2595) - 1)
    rises = (torch.linspace(0, RATE / 2, HOP + 1, dtype=torch.float64)[:, None] - edges) / HOP
    widths = edges.diff() / HOP
    triangles = torch.minimum(rises[:, :-2] / widths[:-1], -rises[:, 2:] / widths[1:]).clamp(min=0)
    bands = (power @ triangles.to(power) + 1e-6).log()
    angles = torch.arange(COEFFICIENTS, dtype=torch.float64) * (torch.arange(BINS, dtype=torch.float64)[:, None] + 0.5)
    cosines = (angles * math.pi / BINS).cos() * math.sqrt(2 / BINS)
    cosines[:, 0] /= math.sqrt(2)
    return bands @ cosines.to(bands)


@published("sc10")
@dataclass
class TenWords(SpeechCommands):
    """SC10: which of ten words a recording of one second says, sample by sample or by 161 frames of coefficients.

    The clips are the 34,975 with 16,000 samples of yes, no, up, down, left, right, on, off, stop and go. The clips of
    each word are split at random into 70, 15 and 15 %. The literature does the same, with another random generator and
    another order of the files. Samples are divided by 2^15. Each position, or with `mfcc` each coefficient, is
    standardised by the training part, with 1e-5 added to the deviation. The training part is read once for this.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        max_length: samples of a clip; clips of another length are left out.
        mfcc: 20 coefficients of each of 1 + max_length // 100 frames, in place of samples; see `mfcc`.
        split_seed: seed of the split.
    """

    words = TEN

    mfcc: bool = False
    split_seed: int = 0

    @property
    def question(self) -> Question:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Class(FeatureInputs(COEFFICIENTS if self.mfcc else 1), len(TEN))

    @property
    def length(self) -> int:
        return 1 + self.max_length // HOP if self.mfcc else self.max_length

    def read(self) -> Parts:
        paths: tuple[list[Path], ...] = ([], [], [])
        labels: tuple[list[int], ...] = ([], [], [])
        for label, word in enumerate(self.words):
            clips = [
                path for path in self.files.below(word, "*.wav", self.folder) if self._samples(path) == self.max_length
            ]
            order = np.random.default_rng((self.split_seed, label)).permutation(len(clips))
            aside = round(0.15 * len(clips))
            for indices, split in zip(
                (order[2 * aside :], order[:aside], order[aside : 2 * aside]), range(3), strict=True
            ):
                paths[split].extend(clips[number] for number in np.sort(indices))
                labels[split].extend([label] * len(indices))
        self.files.check_counts({"whole clips of ten words": sum(map(len, paths))}, self.folder)
        return Parts(
            *(
                FixedPart(FromFiles(split_paths, self.clip), np.array(split_labels, np.int64))
                for split_paths, split_labels in zip(paths, labels, strict=True)
            )
        )

    def _samples(self, path: Path) -> int:
        with opened(self.files, path, self.folder) as file:
            return file.getnframes()

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        location, scale = self._scales
        return ((self._features(rows) - location) / scale).astype(np.float32)

    def _features(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        values = np.stack(rows) / np.float32(2**15)
        return mfcc(torch.from_numpy(values)).numpy() if self.mfcc else values[..., None]

    @cached_property
    def _scales(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and deviation over the training part: of each position (T, 1), or of each coefficient (20,)."""
        clips = self.parts.train.rows
        count, total, squares = 0, 0.0, 0.0
        for start in range(0, len(clips), 256):
            batch = self._features([clips[place] for place in range(start, min(start + 256, len(clips)))]).astype(float)
            values = batch.reshape(-1, COEFFICIENTS) if self.mfcc else batch
            count, total, squares = count + len(values), total + values.sum(0), squares + np.square(values).sum(0)
        mean = np.asarray(total) / count
        return mean, np.sqrt(np.maximum(np.asarray(squares) / count - mean**2, 0)) + 1e-5


class QuantizedAudio(FixedRows, SignalSource):
    """Predict each sample of a recording from the samples before it, in 256 steps. The first input is 128, which is
    silence.

    A row that ends early is not scored after its end. A subclass may have another `encode` and `decode`.
    """

    metric = "bits per sample"
    chance = 8.0
    question = NextToken(Vocabulary(256))

    encode, decode = staticmethod(mu_law), staticmethod(expanded)

    @property
    def signal(self) -> Signal:
        return Recording(RATE, self.length, self.encode, self.decode)

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        tokens = self._tokens(rows)
        first = self.signal.first
        inputs = np.full((len(rows), self.length), first, np.int64)
        inputs[:, 1:] = np.where(tokens == IGNORED, first, tokens)[:, :-1]
        return inputs

    def answers(self, split: FixedPart) -> NDArray[Any]:
        return self._tokens(list(split.rows))

    def _tokens(self, rows: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
        tokens = np.full((len(rows), self.length), IGNORED, np.int64)
        for place, row in zip(tokens, rows, strict=True):
            place[: len(row)] = self.encode(row[: self.length])
        return tokens


@published("sc09")
@dataclass
class SpokenNumbers(QuantizedAudio, SpeechCommands):
    """SC09: predict each sample of a spoken digit from the samples before it, in 256 steps of the mu-law. T = 16,000.

    The clips of zero to nine of Speech Commands, by the published lists.

    Args: see `SpeechCommands`.
    """

    words = NUMBERS


@kind
@dataclass
class Pieces(QuantizedAudio):
    """Long recordings in pieces of equal length. The rest at the end of a recording is dropped.

    The files `*.wav` of the folder, in the natural order of their names, 2 before 10: the first 88 % are for training,
    the next 6 % for validation, the last 6 % for test. Pieces are read when a batch needs them.

    A record may give `quantization`: "mu-law", or "linear" for equal steps.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        piece: samples of a piece, and steps of a row.
    """

    readers: ClassVar[Mapping[str, Callable[..., Any]]] = {"wav": opened}
    splits: ClassVar[Sequence[tuple[str, ...]]] = [("whole",)]
    quantization: ClassVar[str] = "mu-law"

    piece: Positive = 128_000

    def encode(self, samples: NDArray[np.number]) -> NDArray[np.int64]:
        return (linear if self.quantization == "linear" else mu_law)(samples)

    def decode(self, tokens: NDArray[np.int64]) -> NDArray[np.floating]:
        return (spread if self.quantization == "linear" else expanded)(tokens)

    @property
    def length(self) -> int:
        return self.piece

    def read(self) -> Parts:
        ((name,),) = self.files.laid_out(self.folder).parts.values()
        recordings = self.files.below(name, "*.wav", self.folder)
        recordings.sort(
            key=lambda path: [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", path.name)]
        )
        parts = []
        for low, high in ((0, 0.88), (0.88, 0.94), (0.94, 1)):
            paths: list[Path] = []
            starts: list[tuple[int]] = []
            for path in recordings[int(low * len(recordings)) : int(high * len(recordings))]:
                with opened(self.files, path, self.folder) as file:
                    pieces = file.getnframes() // self.piece
                paths += [path] * pieces
                starts += [(number * self.piece,) for number in range(pieces)]
            parts.append(FixedPart(FromFiles(paths, self.cut, starts), np.zeros(len(paths), np.int64)))
        return Parts(*parts)

    def cut(self, path: Path, start: int) -> NDArray[np.int16]:
        """Return the samples of a piece."""
        with opened(self.files, path, self.folder) as file:
            file.setpos(start)
            samples = np.frombuffer(file.readframes(self.piece), "<i2")
        if len(samples) != self.piece:
            raise self.files.damaged(path, f"it ends after {start + len(samples)} samples", self.folder)
        return samples
