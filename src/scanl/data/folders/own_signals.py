"""A folder of your own recordings or pictures: a model predicts each sample from the samples before it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import padded, register
from scanl.data.fixed import FixedPart, FromFiles, Parts
from scanl.data.folders.folders import Folders, Kind, Pictures, Sounds, below
from scanl.data.folders.signals import Picture, Recording
from scanl.data.published.audio import QuantizedAudio
from scanl.data.series.columns import KINDS as TABLES
from scanl.errors import DataError

SOUNDS = Sounds()


@register("signals")
@dataclass
class OwnSignals(QuantizedAudio, Folders):
    """Signals: each sample of your own recordings, or each number of your own pictures, from those before it, in 256
    steps.

    The files are as for `folders`, recordings of one channel or pictures; folders in the folder are no
    classes. Recordings are in 256 steps of the mu-law of the range of each recording, and are cut into pieces; the last
    piece may be shorter. The numbers of a picture come from the top left, row by row, the colours of a pixel in turn.
    If the folder has nothing but the folders `train`, `test` and perhaps `validation`, these are the parts. Otherwise
    the files are split by the digests of their paths.

    Args:
        data: one folder.
        validation, test: fractions of the files in these parts, if there are no folders for the parts.
        sequence_length: samples of a piece of a recording.
        seed, eval_examples: see `FixedRows`.   folder: not used.
    Chance: 8 bits.
    """

    asks = "generate"
    uneven = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    kinds: ClassVar[Sequence[Kind]] = (SOUNDS, Pictures())
    expected = f"a folder of recordings or of pictures, or a table of {', '.join(TABLES)}"
    where = ""
    hint = "; a text is learnt without --question"

    @property
    def metric(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "bits per dimension" if isinstance(self.signal, Picture) else "bits per sample"

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.signal.steps

    @cached_property
    def signal(self) -> Recording | Picture:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(self._files[0], Pictures):
            width, height, numbers = self._shared
            return Picture((height, width, numbers), np.arange(height * width * numbers))
        channels, rate = self._shared
        if channels != 1:
            raise DataError(f"{self.name}: {self.root} has recordings of {channels} channels, expected 1; mix them")
        return Recording(rate, self.sequence_length, self.encode, self.decode)

    def _by_class(self, folder: Path) -> dict[str, list[Path]]:
        return {"": below(folder)}

    def _classes(self, splits: Sequence[Mapping[str, Sequence[Path]]]) -> list[str]:
        return [""]

    def _named(self, of: str, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def read(self) -> Parts:
        return Parts(*(self._part([path for path, _ in split]) for split in self._files[2]))

    def _part(self, paths: Sequence[Path]) -> FixedPart:
        is_picture = isinstance(self.signal, Picture)
        pieces = [
            (path, start)
            for path in paths
            for start in range(0, self.length if is_picture else SOUNDS.steps(path), self.length)
        ]
        rows = FromFiles([path for path, _ in pieces], self.tokens, [(start,) for _, start in pieces])
        return FixedPart(rows, np.zeros(len(pieces), np.int64))

    def tokens(self, path: Path, start: int) -> NDArray[np.int64]:
        """Return the tokens of a picture, or of the piece of a recording that begins at a step."""
        if isinstance(self.signal, Picture):
            return self.signal.read(path)
        if path not in self._ranges:
            samples = SOUNDS.row(path)
            self._ranges[path] = samples.min(), samples.max()
        piece = SOUNDS.read(path, start, self.length)[:, 0]
        # The quantisation scales by the range of its input, so the recording's extremes are added.
        return self.encode(np.append(piece, self._ranges[path]))[:-2]

    @cached_property
    def _ranges(self) -> dict[Path, tuple[np.floating[Any], np.floating[Any]]]:
        """The lowest and the highest sample of the recordings that were read."""
        return {}

    def _tokens(self, rows: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
        return padded(rows, self.length)
