"""Photographs: ImageNet by patches, and mini-ImageNet in episodes of a few examples of each class."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.data.files import Files
from scanl.data.fixed import FixedPart, FixedRows, FromFiles, Parts, set_aside
from scanl.data.fresh import FreshRows
from scanl.data.published.sources import published
from scanl.data.questions import Class, FeatureInputs, Question
from scanl.data.readers.photograph import square
from scanl.errors import DataError
from scanl.options import Positive, Range, at_least

MINI_PARTS = ("train", "val", "test")
MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])  # of the colors of ImageNet

side_divisor = Range(
    "a divisor of side, {side}", lambda patch, options: patch > 0 and options["side"] % patch == 0, relation=True
)


@published("imagenet")
@dataclass
class ImageNetPatches(FixedRows):
    """ImageNet: which of 1,000 things a photograph shows, patch by patch. T = 196 steps of 768 channels.

    A photograph is scaled so that its shorter side has 8/7 of `side` pixels, and the square in its middle is cut into
    patches, from the top left, row by row. Colours are standardised by the published mean and deviation. Unlike in the
    literature, there is no augmentation. `aside` training images are set aside for validation. The test part is the
    published validation part of 50,000 images. Files are read when a batch needs them.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        side: pixels of a side.
        patch: pixels of a side of a patch, a divisor of `side`.
        aside: number of training images that are set aside; which ones, the seed 42 decides.
    """

    side: Positive = 224
    patch: Annotated[int, side_divisor] = 16
    aside: Positive = 10_000

    @property
    def length(self) -> int:
        return (self.side // self.patch) ** 2

    @cached_property
    def classes(self) -> list[str]:
        """Names of the folders of the training part, sorted."""
        names = sorted(path.name for path in self.files.path("train", self.folder).iterdir() if path.is_dir())
        self.files.check_counts({"classes": len(names)}, self.folder)
        return names

    @property
    def question(self) -> Question:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Class(FeatureInputs(3 * self.patch**2), len(self.classes))

    @property
    def chance(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 1 / len(self.classes)

    def read(self) -> Parts:
        train, test = self._part("train", "training images"), self._part("val", "test images")
        if self.aside >= len(train.answers):
            have = f"{len(train.answers)} training images"
            raise DataError(f"{self.name}: aside is {self.aside}, expected less than the {have}")
        return Parts(*set_aside(train, self.aside), test)

    def _part(self, split: str, what: str) -> FixedPart:
        paths: list[Path] = []
        answers: list[int] = []
        for number, name in enumerate(self.classes):
            split_paths = self.files.below(f"{split}/{name}", "*.JPEG", self.folder)
            paths += split_paths
            answers += [number] * len(split_paths)
        self.files.check_counts({what: len(paths)}, self.folder)
        return FixedPart(FromFiles(paths, self.photograph), np.array(answers, np.int64))

    def photograph(self, path: Path) -> NDArray[np.uint8]:
        """Return the patches of a file: (T, 3 patch ** 2)."""
        pixels = square(self.files, path, self.side, round(self.side * 8 / 7), self.folder)
        across, size = self.side // self.patch, self.patch
        patches = pixels.reshape(across, size, across, size, 3).swapaxes(1, 2)
        return patches.reshape(across**2, size**2 * 3)

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        colors = np.stack(rows).reshape(len(rows), self.length, -1, 3) / 255
        return ((colors - MEAN) / DEVIATION).astype(np.float32).reshape(len(rows), self.length, -1)


@published("miniimagenet")
@dataclass
class MiniImageNetEpisodes(FreshRows):
    """mini-ImageNet: to which of five new classes a photograph belongs, after a few examples of each.

    An episode draws `ways` classes, `shots` photographs of each, and one more photograph of one of them. A step is a
    standardised photograph of 84 x 84 pixels, and its class in the episode as a one-hot vector of `ways` numbers. The
    last step has no class: this class is the answer. The examples come in random order. Every training step has new
    episodes. Training draws from 64 classes, measurements during training from 16 others, and the exam from 20 more.

    Args:
        seed, eval_examples: see `FreshRows`.
        folder: where the files lie; none: in the folder of the data set.
        ways: classes of an episode.
        shots: examples of each class; 1 or 5 in the literature.
    """

    metric = "accuracy"
    side: ClassVar[int] = 84

    folder: str = ""
    ways: Annotated[int, at_least(2)] = 5
    shots: Positive = 1

    @property
    def files(self) -> Files:
        """The files of the data set."""
        assert self.needs is not None
        return self.needs

    @property
    def length(self) -> int:
        return self.ways * self.shots + 1

    @property
    def question(self) -> Question:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Class(FeatureInputs(3 * self.side**2 + self.ways), self.ways)

    @property
    def chance(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 1 / self.ways

    @cached_property
    def parts(self) -> list[list[list[Path]]]:
        """The photographs of each class, for the parts training, validation and test."""
        parts = []
        for split in MINI_PARTS:
            classes: dict[str, list[Path]] = {}
            path, images = self.files.path(f"{split}.csv", self.folder), self.files.path("images", self.folder)
            header, *rows = csv.reader(self.files.text(f"{split}.csv", self.folder).splitlines() or [""])
            if header != ["filename", "label"]:
                raise self.files.damaged(path, f"its header is {header}, expected filename, label", self.folder)
            for row in rows:
                if len(row) != 2 or "/" in row[0]:
                    raise self.files.damaged(path, f"line {row} is not the name of a file and a class", self.folder)
                classes.setdefault(row[1], []).append(images / row[0])
            self.files.check_counts({f"{split} classes": len(classes)}, self.folder)
            least = min(map(len, classes.values()), default=0)
            if len(classes) < self.ways or least <= self.shots:
                why = f"it has {len(classes)} classes of {least} photographs or more, expected {self.ways} of"
                raise self.files.damaged(path, f"{why} {self.shots + 1}", self.folder)
            parts.append([classes[name] for name in sorted(classes)])
        self.files.check_counts(
            {"images": sum(len(class_paths) for split in parts for class_paths in split)}, self.folder
        )
        return parts

    def check(self) -> None:
        for split in self.parts:
            square(self.files, split[0][0], self.side, self.side, self.folder)

    def _rows(self, count: int, *seed: int) -> Batch:
        return self._episodes(count, np.random.default_rng((self.seed, *seed)), self.parts[seed[0]])

    def generate(self, count: int, random: np.random.Generator, *, training: bool) -> Batch:
        return self._episodes(count, random, self.parts[0 if training else -1])

    def _episodes(self, count: int, random: np.random.Generator, classes: list[list[Path]]) -> Batch:
        inputs = np.zeros((count, self.length, 3 * self.side**2 + self.ways), np.float32)
        answers = np.zeros(count, np.int64)
        for row in range(count):
            drawn = random.choice(len(classes), self.ways, replace=False)
            answers[row] = random.integers(self.ways)
            shown = random.permutation(np.repeat(np.arange(self.ways), self.shots))
            # `shots` photographs of each class to show, and one for the query.
            places = [list(random.choice(len(classes[label]), self.shots + 1, replace=False)) for label in drawn]
            for step, number in enumerate([*shown, answers[row]]):
                path = classes[drawn[number]][places[number].pop()]
                pixels = square(self.files, path, self.side, self.side, self.folder)
                inputs[row, step, : -self.ways] = ((pixels / 255 - MEAN) / DEVIATION).reshape(-1)
                inputs[row, step, number - self.ways] = step < len(shown)
        return Batch(inputs, answers)
