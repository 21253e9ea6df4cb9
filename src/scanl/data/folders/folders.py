"""A folder of your own files, with a folder for each class: texts, recordings or pictures."""

import hashlib
import wave
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import check_shares, own_options, padded, register
from scanl.data.batch import Batch
from scanl.data.fixed import FixedPart, FixedRows, FromFiles, Parts
from scanl.data.questions import Class, FeatureInputs, Question, Vocabulary
from scanl.errors import DataError
from scanl.options import Portion, Positive, Range

PARTS = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}  # folders that say the parts
MAX_READ_BYTES = 2**27  # bytes of files that are read whole before training
COLORS = ("P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")  # kinds of pixels that Pillow has, with 8 bits a number


class Kind(ABC):
    """Converter of files of one kind into rows."""

    endings: ClassVar[tuple[str, ...]]
    plural: ClassVar[str]
    uneven: ClassVar[bool] = False  # whether rows may end early

    @abstractmethod
    def read(self, path: Path) -> NDArray[Any]:
        """Return a row (t,) of tokens or (t, C) of features. Raises DataError for a damaged file."""

    def row(self, path: Path) -> NDArray[Any]:
        """Call `read`. Raises DataError for an empty file too."""
        row = self.read(path)
        if len(row) == 0:
            raise DataError(f"folders: {path} is empty; leave it out")
        return row

    @abstractmethod
    def about(self, path: Path) -> tuple[Any, str]:
        """Return the properties that all files must share, and the words for them, from the head of a file."""

    @abstractmethod
    def question(self, classes: int, shared: Any) -> Question:
        """Return the question, from what all files share."""


class Texts(Kind):
    """Bytes."""

    endings = (".txt", ".md", ".html", ".xml", ".json", ".csv", ".log", ".py")
    plural = "texts"
    uneven = True

    def read(self, path: Path) -> NDArray[Any]:
        try:
            return np.frombuffer(path.read_bytes(), np.uint8)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error

    def about(self, path: Path) -> tuple[Any, str]:
        return None, ""

    def question(self, classes: int, shared: Any) -> Question:
        return Class(Vocabulary(256), classes)


class Sounds(Kind):
    """Samples of 16 bits, divided by 2^15; a step has a number for each channel."""

    endings = (".wav",)
    plural = "recordings"
    uneven = True

    def _parts(self, path: Path, start: int = 0, max_steps: int | None = None) -> tuple[int, int, int, bytes]:
        """Return the numbers of channels, of samples a second and of steps, and the samples of steps from `start` on.

        max_steps: read at most these; None: read all steps from `start` on.
        """
        try:
            with path.open("rb") as content, wave.open(content) as file:
                channels, width, rate, steps, *_ = file.getparams()
                file.setpos(start)
                count = steps - start if max_steps is None else min(max_steps, steps - start)
                samples = file.readframes(count)
        except (OSError, wave.Error, EOFError) as error:
            raise DataError(f"{path} is no WAV file: {error}") from error
        if width != 2:
            raise DataError(f"{path} has samples of {8 * width} bits, expected 16")
        offset, size = 2 * channels * start, 2 * channels * count
        if len(samples) != size:
            raise DataError(f"{path} is cut off: it has {offset + len(samples)} of {offset + size} bytes")
        return channels, rate, steps, samples

    def read(self, path: Path, start: int = 0, max_steps: int | None = None) -> NDArray[Any]:
        channels, _, _, samples = self._parts(path, start, max_steps)
        return (np.frombuffer(samples, "<i2").reshape(-1, channels) / np.float32(2**15)).astype(np.float32)

    def steps(self, path: Path) -> int:
        """Return the number of steps, from the head of a file."""
        return self._parts(path, max_steps=0)[2]

    def about(self, path: Path) -> tuple[Any, str]:
        channels, rate, *_ = self._parts(path, max_steps=0)
        return (channels, rate), f"{channels} channels at {rate} Hz"

    def question(self, classes: int, shared: Any) -> Question:
        return Class(FeatureInputs(shared[0]), classes)


class Pictures(Kind):
    """Pixels from the top left, row by row, divided by 255; a step has one number, or three of a colour.

    Transparency is left out.
    """

    endings = (".png", ".jpg", ".jpeg", ".bmp")
    plural = "pictures"

    modes: ClassVar[Mapping[str, str]] = {**dict.fromkeys(("1", "L", "LA"), "L"), **dict.fromkeys(COLORS, "RGB")}

    def _parts(self, path: Path, *, with_pixels: bool) -> tuple[int, int, int, NDArray[Any]]:
        """Return the width, the height, the numbers of a pixel and, of the whole file, the pixels."""
        from PIL import Image

        try:
            with Image.open(path) as file:
                if file.mode not in self.modes:
                    raise DataError(f"{path} has pixels of kind {file.mode}, expected 8 bits for each number")
                mode = self.modes[file.mode]
                pixels = np.asarray(file.convert(mode)) if with_pixels else np.empty(0, np.uint8)
                return *file.size, len(mode), pixels
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{path} is no picture: {error}") from error

    def read(self, path: Path) -> NDArray[Any]:
        width, height, numbers, pixels = self._parts(path, with_pixels=True)
        return pixels.reshape(width * height, numbers).astype(np.float32) / 255

    def about(self, path: Path) -> tuple[Any, str]:
        width, height, numbers, _ = self._parts(path, with_pixels=False)
        return (width, height, numbers), f"{width} x {height} pixels of {numbers} numbers"

    def question(self, classes: int, shared: Any) -> Question:
        return Class(FeatureInputs(shared[2]), classes)


KINDS: tuple[Kind, ...] = (Texts(), Sounds(), Pictures())


@register("folders")
@dataclass
class Folders(FixedRows):
    """Folders: to which class a text, a recording or a picture of your own belongs; the folders are the classes.

    Texts are read as bytes, recordings (.wav, 16 bits) as samples in [-1, 1], pictures (.png, .jpg, .bmp) as pixels in
    [0, 1], from the top left, row by row. All files are of one kind; all recordings have one rate and as many channels,
    all pictures one size. If the folder has folders `train`, `test` and perhaps `validation` with the classes inside,
    these are the parts. Otherwise each class is split by the digests of the files' names. So nearly every file stays in
    its part when other files are added. Files are read when a batch needs them. Before training all files are checked.
    If they have more than 128 MiB together, only their heads are.

    Args:
        data: one folder.
        validation, test: fractions of the files of each class in these parts, if there are no folders for the parts.
        sequence_length: most steps that are read of a text or a recording.
        seed, eval_examples: see `FixedRows`.   folder: not used.
    Chance: the share of the most frequent class in the test part.
    """

    asks: ClassVar[str] = "classify"  # the option `--question`
    kinds: ClassVar[Sequence[Kind]] = KINDS  # of files that it reads
    expected: ClassVar[str] = "a folder with one folder for each class"
    where: ClassVar[str] = " in the folders of its classes"  # the files are
    hint: ClassVar[str] = ""  # for files of other kinds
    is_own: ClassVar[bool] = True

    data: Annotated[Sequence[str | Path], Range("one folder: --data FOLDER", lambda folders, _: len(folders) == 1)] = ()
    validation: Portion = 0.1
    test: Portion = 0.2
    sequence_length: Positive = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shares(self.name, self.validation, self.test)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        return ("question", *(name for name in super().option_names() if name != "folder"))

    @classmethod
    def open(cls, options: Mapping[str, Any]) -> "Folders":
        names = ("data", "validation", "test", "sequence_length", "seed", "eval_examples")
        return cls(**{name: options[name] for name in names}, **own_options(cls, options))

    @property
    def root(self) -> Path:
        return Path(self.data[0])

    @cached_property
    def _files(self) -> tuple[Kind, list[str], list[list[tuple[Path, int]]]]:
        """The kind of the files, the names of the classes, and of every part the files with their classes."""
        if not self.root.is_dir():
            raise DataError(f"{self.name}: {self.root} is not a folder, expected {self.expected}")
        splits = self._splits()
        kind = self._kind([path for split in splits for paths in split.values() for path in paths])
        classes = self._classes(splits)
        self._deal(splits)
        return kind, classes, [[(p, classes.index(c)) for c in sorted(split) for p in split[c]] for split in splits]

    def _splits(self) -> list[dict[str, list[Path]]]:
        """The files of each class in each part, where folders say the parts; otherwise all are in the first."""
        parted = [folder for folder in _folders(self.root) if folder.name.lower() in PARTS]
        others = [folder for folder in _folders(self.root) if folder not in parted]
        if others and any(map(_folders, parted)):
            raise DataError(
                f"{self.name}: {self.root} has the folders {others[0].name!r} and {parted[0].name!r}, expected only "
                "parts or only classes"
            )
        if not parted or others:
            return [self._by_class(self.root), {}, {}]
        splits: list[dict[str, list[Path]]] = [{}, {}, {}]
        for folder in parted:
            for name, paths in self._by_class(folder).items():
                splits[PARTS[folder.name.lower()]].setdefault(name, []).extend(paths)
        return splits

    def _by_class(self, folder: Path) -> dict[str, list[Path]]:
        return {subfolder.name: below(subfolder) for subfolder in _folders(folder)}

    def _classes(self, splits: Sequence[Mapping[str, Sequence[Path]]]) -> list[str]:
        """The names of the classes. Raises DataError unless the files can be learnt from."""
        classes = sorted(splits[0])
        if len(classes) < 2:
            raise DataError(f"folders: {self.root} has the classes {classes} to train on, expected two or more")
        if empty := [name for name in classes if not splits[0][name]]:
            raise DataError(f"folders: the class {empty[0]!r} has no file to train on; leave its folder out")
        for index, name in ((1, "validation"), (2, "test")):
            if new := sorted(splits[index].keys() - splits[0].keys()):
                raise DataError(
                    f"folders: the class {new[0]!r} is in the {name} part but not in the training part, so it cannot "
                    "be learnt"
                )
        return classes

    def _kind(self, paths: Sequence[Path]) -> Kind:
        known = ", ".join(ending for kind in self.kinds for ending in kind.endings)
        if not paths:
            raise DataError(f"{self.name}: {self.root} has no file{self.where}, expected files of {known}{self.hint}")
        by_ending = {ending: kind for kind in self.kinds for ending in kind.endings}
        for path in paths:
            if path.suffix.lower() not in by_ending:
                why = f"has the format {path.suffix or 'none'!r}, expected one of {known}{self.hint}"
                raise DataError(f"{self.name}: {path} {why}")
        first = by_ending[paths[0].suffix.lower()]
        for path in paths:
            if (other := by_ending[path.suffix.lower()]) is not first:
                kinds = f"{first.plural} and {other.plural}"
                raise DataError(f"{self.name}: {paths[0]} and {path} are {kinds}, expected files of one kind")
        return first

    def _deal(self, splits: list[dict[str, list[Path]]]) -> None:
        """Fill the parts that no folder says, from the training part: a share of each class."""
        remaining = 1.0 if splits[2] else 1 - self.test  # of all files, when the validation part is dealt
        for index, share in ((2, self.test), (1, self.validation / remaining)):
            if splits[index]:
                continue
            for name, paths in splits[0].items():
                order = sorted(paths, key=lambda path: hashlib.sha256(self._named(name, path).encode()).digest())
                count = round(share * len(order))
                splits[index][name], splits[0][name] = order[:count], order[count:]

    def _named(self, of: str, path: Path) -> str:
        """The name by which a file of a class is dealt to a part."""
        return f"{of}/{path.name}"

    @cached_property
    def _shared(self) -> Any:
        """The properties that all files share, read from the head of each."""
        kind, _, parts = self._files
        paths = [path for split in parts for path, _ in split]
        first, words = kind.about(paths[0])
        for path in paths:
            other, other_words = kind.about(path)
            if other != first:
                raise DataError(f"{self.name}: {paths[0]} has {words} and {path} has {other_words}, expected all alike")
        return first

    @cached_property
    def question(self) -> Question:  # pyright: ignore[reportIncompatibleVariableOverride]
        kind, classes, _ = self._files
        return kind.question(len(classes), self._shared)

    @property
    def uneven(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._files[0].uneven

    @property
    def chance(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        answers = self.parts.test.answers
        return float(np.bincount(answers).max() / len(answers))

    @cached_property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(self._files[0], Pictures):
            return self._shared[0] * self._shared[1]
        return self.sequence_length

    def read(self) -> Parts:
        kind, _, parts = self._files
        return Parts(
            *(
                FixedPart(
                    FromFiles([path for path, _ in split], kind.row), np.array([label for _, label in split], np.int64)
                )
                for split in parts
            )
        )

    def check(self) -> None:
        super().check()
        assert self.question
        paths = [path for split in self._files[2] for path, _ in split]
        if sum(path.stat().st_size for path in paths) <= MAX_READ_BYTES:
            for path in paths:
                self._files[0].row(path)  # raises for a file that is damaged behind its head

    @property
    def class_names(self) -> list[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The names of the classes, in the order of their numbers."""
        return self._files[1]

    def unlabeled(self, paths: Sequence[Path]) -> Batch:
        """Return files as a batch without answers. Raises DataError for a file of another kind or form."""
        kind = self._files[0]
        if (other := self._kind(paths)) is not kind:
            raise DataError(f"{self.name}: {paths[0]} is one of {other.plural}, expected {kind.plural} as in training")
        self._refuse_others(paths)
        return self._examples(FixedPart([kind.row(path) for path in paths], np.zeros(len(paths), np.int64)))

    def elsewhere(self, path: Path) -> "Folders":
        """Return a source whose test part is all of another folder. The classes are as here."""
        other = replace(self, data=[path])
        splits = other._splits()
        paths: dict[str, list[Path]] = {}
        for split in splits:
            for name, files in split.items():
                paths.setdefault(name, []).extend(files)
        kind = other._kind([file for files in paths.values() for file in files])
        if new := sorted(paths.keys() - set(self.class_names)):
            raise DataError(f"{self.name}: the class {new[0]!r} of {path} is not in the training part")
        if kind is not self._files[0]:
            raise DataError(f"{self.name}: {path} has {kind.plural}, expected {self._files[0].plural} as in training")
        test = [(file, self.class_names.index(name)) for name in sorted(paths) for file in paths[name]]
        self._refuse_others([file for file, _ in test])
        other._files = kind, self.class_names, [[], [], test]
        other._shared = self._shared
        return other

    def _refuse_others(self, paths: Sequence[Path]) -> None:
        """Raise DataError for a file whose form is not that of training."""
        kind, _, parts = self._files
        first = next(path for split in parts for path, _ in split)
        for path in paths:
            other, words = kind.about(path)
            if other != self._shared:
                expected = kind.about(first)[1]
                raise DataError(f"{self.name}: {path} has {words}, expected {expected} as in training")

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        if isinstance(self._files[0], Pictures):
            return np.stack(rows)
        return padded(rows, self.length)

    @cached_property
    def _digest(self) -> str:
        """The digest of the files' names, parts and sizes, because reading all files may take minutes."""
        digest = hashlib.sha256(self.name.encode())
        for number, split in enumerate(self._files[2]):
            for path, label in split:
                digest.update(f"{number} {label} {path.parent.name}/{path.name} {path.stat().st_size}\n".encode())
        return digest.hexdigest()


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def below(folder: Path) -> list[Path]:
    """Return all files below a folder but the hidden ones."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
