"""Recordings of words as WAV files: Speech Commands to classify, and its digits sample by sample."""

import hashlib
import io
import math
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from scanl.data.base import IGNORED, Question, register
from scanl.data.files import Files, lines
from scanl.data.fixed import FixedRows, Part, Parts
from scanl.data.signals import Recording, mu_law
from scanl.errors import ConfigError

RATE = 16_000
NUMBERS = "zero one two three four five six seven eight nine".split()  # noqa: SIM905
WORDS = sorted(
    [
        *NUMBERS,
        *"backward bed bird cat dog down follow forward go happy house learn left marvin no off on right".split(),  # noqa: SIM905
        *"sheila stop tree up visual wow yes".split(),  # noqa: SIM905
    ]
)
SPEECH = Files(
    "speech_commands",
    "the content of speech_commands_v0.02.tar.gz: a folder of WAV files for each word, and two lists",
    ("validation_list.txt", "testing_list.txt", *WORDS),
    counts={"training clips": 84_843, "validation clips": 9_981, "test clips": 11_005},
    licence="CC BY 4.0",
)


class Clips(Sequence[NDArray[np.int16]]):
    """Recordings that are read from their files when they are asked for: (t,) samples of 16 bits."""

    def __init__(self, files: Files, paths: Sequence[Path], folder: str) -> None:
        self.files, self.paths, self.folder = files, paths, folder

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, place: Any) -> Any:
        path = self.paths[place]
        try:
            content = path.read_bytes()
            with wave.open(io.BytesIO(content)) as file:
                form = file.getnchannels(), file.getsampwidth(), file.getframerate()
                found = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        except (OSError, wave.Error, EOFError, ValueError) as error:
            raise self.files.damaged(path, f"it is no WAV file: {error}", self.folder) from error
        if form != (1, 2, RATE) or not len(found):
            why = f"it has {form[0]} channels of {8 * form[1]} bits at {form[2]} Hz, expected 1 of 16 at {RATE}"
            raise self.files.damaged(path, why, self.folder)
        return found


@register("speech_commands")
@dataclass
class SpeechCommands(FixedRows):
    """Speech Commands: which of 35 words a recording says, sample by sample. T = 16,000 steps.

    The published lists name the clips for validation and test; the others are for training. Samples are divided by
    2^15, and a shorter clip is followed by zeros. The programs of S4 and S5 also standardise each of the 16,000
    positions over the training part; here it is not done. Files are read when a batch needs them.

    Source: Warden, "Speech Commands", arXiv:1804.03209.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        most: samples of a clip that are read, and steps of a row.
    Chance: 1 of 35.
    """

    id = "B-sc35"
    needs = SPEECH
    question = Question("class", channels=1, classes=len(WORDS))
    chance = 1 / len(WORDS)
    words = WORDS

    most: int = RATE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most < 1:
            raise ConfigError(f"{self.name}: most is {self.most}, expected at least 1")

    @property
    def length(self) -> int:
        return self.most

    def read(self) -> Parts:
        listed = [set(lines(SPEECH.text(name, self.folder))) for name in SPEECH.needs[:2]]
        paths: tuple[list[Path], ...] = ([], [], [])
        labels: tuple[list[int], ...] = ([], [], [])
        for label, word in enumerate(self.words):
            for path in SPEECH.below(word, "*.wav", self.folder):
                name = f"{word}/{path.name}"
                part = 1 if name in listed[0] else 2 if name in listed[1] else 0
                paths[part].append(path)
                labels[part].append(label)
        if self.words is WORDS:
            for what, found in zip(("training clips", "validation clips", "test clips"), paths, strict=True):
                SPEECH.counted({what: len(found)}, self.folder)
        return Parts(
            *(
                Part(Clips(SPEECH, found, self.folder), np.array(answers, np.int64))
                for found, answers in zip(paths, labels, strict=True)
            )
        )

    def check(self) -> None:
        super().check()
        _ = self.parts.train.rows[0]

    @cached_property
    def _digest(self) -> str:
        """Of the names and sizes of the files, because reading all of them takes minutes."""
        digest = hashlib.sha256(self.name.encode())
        for part in self.parts:
            assert isinstance(part.rows, Clips)
            for path in part.rows.paths:
                digest.update(f"{path.parent.name}/{path.name} {path.stat().st_size}\n".encode())
        return digest.hexdigest()

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        batch = np.zeros((len(rows), self.length, 1), np.float32)
        for place, row in zip(batch, rows, strict=True):
            place[: len(row), 0] = row[: self.length] / np.float32(2**15)
        return batch


@register("sc09")
@dataclass
class SpokenNumbers(SpeechCommands):
    """SC09: predict each sample of a spoken digit from those before it, in 256 steps of the mu-law. T = 16,000.

    The clips of zero to nine of Speech Commands, by the published lists. The first input is 128; a clip that ends
    early is not scored after its end.

    Source: Donahue et al., "Adversarial Audio Synthesis", arXiv:1802.04208; as in Goel et al., "It's Raw!",
    arXiv:2202.09729. Args: see `SpeechCommands`. Chance: 8 bits.
    """

    id = "B-sc09"
    metric = "bits per sample"
    higher_is_better = False
    best = None
    chance = 8.0
    question = Question("next token", vocab_size=256)
    words = NUMBERS

    @property
    def signal(self) -> Recording:
        return Recording(RATE, self.length)

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        tokens = self._tokens(rows)
        inputs = np.full((len(rows), self.length), 128, np.int64)
        inputs[:, 1:] = np.where(tokens == IGNORED, 128, tokens)[:, :-1]
        return inputs

    def answers(self, part: Part) -> NDArray[Any]:
        return self._tokens(list(part.rows))

    def _tokens(self, rows: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
        tokens = np.full((len(rows), self.length), IGNORED, np.int64)
        for place, row in zip(tokens, rows, strict=True):
            place[: len(row)] = mu_law(row[: self.length])
        return tokens

    def total(self, outputs: Tensor, targets: Tensor) -> tuple[float, int]:
        nats = F.cross_entropy(outputs.float(), targets, ignore_index=IGNORED, reduction="sum").item()
        return nats / math.log(2), int((targets != IGNORED).sum())
