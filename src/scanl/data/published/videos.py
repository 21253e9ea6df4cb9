"""Actions in videos: of a skeleton (NTU RGB+D), and step by step from features of frames (Charades, AVA)."""

import csv
import re
from abc import abstractmethod
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import padded
from scanl.data.files import Files
from scanl.data.fixed import FixedPart, FixedRows, FromFiles, Parts, set_aside
from scanl.data.published.sources import published
from scanl.data.published.yes_no import YesNoRows
from scanl.data.questions import Class, FeatureInputs, Flags, Question
from scanl.data.readers import npy, skeleton
from scanl.data.readers.skeleton import BODIES, JOINTS
from scanl.errors import DataError
from scanl.options import Positive, Range


@published("ntu")
@dataclass
class Skeletons(FixedRows):
    """NTU RGB+D: which of 60 actions a clip shows, from the skeletons of one or two people. T = 20 steps.

    A step has the positions of 25 joints of two bodies: 150 numbers, in metres before the camera, with zeros for a body
    that is not there. The frames are the middles of 20 equal parts of a clip. The literature draws a random frame of
    each part. A tenth of the training clips is set aside for validation. 302 of the 56,880 clips are known to lack
    skeletons. They are read like the others.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        across: "subject": 20 of 40 people are for training; or "view": the cameras 2 and 3 of three are.
        frames: steps of a row.
    """

    question = Class(FeatureInputs(BODIES * JOINTS * 3), 60)

    people: ClassVar[tuple[int, ...]]  # of the training part

    across: Annotated[str, Range("subject or view", lambda across, _: across in ("subject", "view"))] = "subject"
    frames: Positive = 20

    @property
    def length(self) -> int:
        return self.frames

    def read(self) -> Parts:
        clips = self.files.below("nturgb+d_skeletons", "*.skeleton", self.folder)
        self.files.check_counts({"clips": len(clips)}, self.folder)
        paths: tuple[list[Path], list[Path]] = ([], [])
        answers: tuple[list[int], list[int]] = ([], [])
        for path in clips:
            named = re.fullmatch(r"S\d{3}C(\d{3})P(\d{3})R\d{3}A(\d{3})", path.stem)
            if named is None or not 1 <= int(named[3]) <= 60:
                raise self.files.damaged(path, "its name is not SsssCcccPpppRrrrAaaa with an action of 60", self.folder)
            camera, person, action = map(int, named.groups())
            test = int(person not in self.people if self.across == "subject" else camera == 1)
            paths[test].append(path)
            answers[test].append(action - 1)
        train, test = (
            FixedPart(FromFiles(split_paths, self.clip), np.array(labels, np.int64))
            for split_paths, labels in zip(paths, answers, strict=True)
        )
        return Parts(*set_aside(train, max(1, len(train.answers) // 10)), test)

    def clip(self, path: Path) -> NDArray[np.float32]:
        """Return the frames of a clip: (frames, 150)."""
        positions = skeleton.positions(self.files, path, self.folder)
        middles = (np.arange(self.frames) + 0.5) * len(positions) / self.frames
        return positions[middles.astype(np.int64)].reshape(self.frames, -1)


@dataclass
class Videos(YesNoRows):
    """Videos as features of their frames, and the actions that go on at each frame. A subclass defines `annotated`.

    A tenth of the training videos is set aside for validation. The test part is the part on which papers measure. The
    published score is the mean average precision over all steps, "mAP". A run is chosen by the negative log-likelihood
    of all actions of a step.

    Args: see `FixedRows`.
    """

    uneven = True
    actions: ClassVar[int]

    @property
    def files(self) -> Files:
        assert self.needs is not None
        return self.needs

    @property
    def question(self) -> Question:  # pyright: ignore[reportIncompatibleVariableOverride]
        channels = self.parts.train.rows[0].shape[1]
        return Flags(FeatureInputs(channels), self.actions, scores=("nats", "mAP"))

    @abstractmethod
    def annotated(self, split: str) -> dict[str, Any]:
        """Return the annotation of each video of a part, which `targets` reads."""

    @abstractmethod
    def targets(self, about: Any, steps: int) -> NDArray[np.float32]:
        """Return the actions at each step of a video, (steps, actions): 1, 0, or NaN where they are not known."""

    def read(self) -> Parts:
        parts = []
        self._about: list[Any] = []
        for split, what in (("train", "training videos"), ("test", "test videos")):
            annotations = self.annotated(split)
            self.files.check_counts({what: len(annotations)}, self.folder)
            paths = [self.files.path(f"features/{name}.npy", self.folder) for name in annotations]
            places = np.arange(len(annotations)) + len(self._about)
            self._about += annotations.values()
            parts.append(FixedPart(FromFiles(paths, self.video), places))
        return Parts(*set_aside(parts[0], max(1, len(parts[0].answers) // 10)), parts[1])

    def video(self, path: Path) -> NDArray[np.float32]:
        """Return the features of a video: (t, C)."""
        return npy.array(self.files, path, self.folder, 2).astype(np.float32)

    def answers(self, split: FixedPart) -> NDArray[Any]:
        rows = zip(split.rows, split.answers, strict=True)
        return padded([self.targets(self._about[place], len(row)) for row, place in rows], self.length)

    def lines(self, name: str, columns: int) -> list[list[str]]:
        """Return the rows of a table. Raises DataError for a row with another number of columns."""
        rows = [row for row in csv.reader(StringIO(self.files.text(name, self.folder), newline="")) if row]
        for number, row in enumerate(rows, 1):
            if len(row) != columns:
                why = f"row {number} has {len(row)} columns, expected {columns}"
                raise self.files.damaged(self.files.path(name, self.folder), why, self.folder)
        return rows


@published("charades")
@dataclass
class Charades(Videos):
    """Charades: which of 157 actions go on at each step of a video, from features of its frames.

    A step is the middle of one of t equal parts of the video.

    Args: see `Videos`.
    """

    actions = 157

    def annotated(self, split: str) -> dict[str, Any]:
        name = f"Charades_v1_{split}.csv"
        path = self.files.path(name, self.folder)
        annotations: dict[str, Any] = {}
        for row in csv.DictReader(StringIO(self.files.text(name, self.folder), newline="")):
            try:
                spans = [span.split() for span in row["actions"].split(";") if span]
                about = [(int(action[1:]), float(begin), float(end)) for action, begin, end in spans]
                annotations[row["id"]] = (float(row["length"]), about)
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                why = f"row {len(annotations) + 1} has no id, length and actions: {error!r}"
                raise self.files.damaged(path, why, self.folder) from error
            if any(not 0 <= action < self.actions for action, *_ in about):
                raise self.files.damaged(
                    path, f"row {len(annotations)} has an action that is not c000 to c156", self.folder
                )
        if not annotations:
            raise self.files.damaged(path, "it has no video", self.folder)
        return annotations

    def targets(self, about: Any, steps: int) -> NDArray[np.float32]:
        length, spans = about
        times, targets = (np.arange(steps) + 0.5) * length / steps, np.zeros((steps, self.actions), np.float32)
        for action, begin, end in spans:
            targets[(begin <= times) & (times <= end), action] = 1
        return targets


@published("ava")
@dataclass
class AVA22(Videos):
    """AVA 2.2: which of 80 actions anyone in a film does at each second from 902 to 1798, from features of the second.

    The published question also asks where each person is. A model of steps cannot answer that, so the boxes are left
    out. Seconds that are published as excluded have no target.

    Args: see `Videos`.
    """

    actions = 80
    first: ClassVar[int] = 902

    def annotated(self, split: str) -> dict[str, Any]:
        name = {"train": "train", "test": "val"}[split]
        annotations: dict[str, Any] = {}
        try:
            for video, second, *_, action, _person in self.lines(f"ava_{name}_v2.2.csv", 8):
                if not 1 <= int(action) <= self.actions:
                    raise ValueError(f"action {action}, expected from 1 to {self.actions}")
                annotations.setdefault(video, ([], []))[0].append((int(second), int(action) - 1))
            for video, second in self.lines(f"ava_{name}_excluded_timestamps_v2.2.csv", 2):
                annotations.setdefault(video, ([], []))[1].append(int(second))
        except ValueError as error:
            path = self.files.path(f"ava_{name}_v2.2.csv", self.folder)
            raise self.files.damaged(path, f"it is no table of actions: {error}", self.folder) from error
        if not annotations:
            raise self.files.damaged(
                self.files.path(f"ava_{name}_v2.2.csv", self.folder), "it has no video", self.folder
            )
        return annotations

    def targets(self, about: Any, steps: int) -> NDArray[np.float32]:
        done, excluded = about
        targets = np.zeros((steps, self.actions), np.float32)
        for second, action in done:
            if not 0 <= second - self.first < steps:
                raise DataError(f"ava: second {second} has an action, expected one of the {steps} seconds of features")
            targets[second - self.first, action] = 1
        targets[[second - self.first for second in excluded if 0 <= second - self.first < steps]] = np.nan
        return targets
