"""Polyphonic music: which notes sound in the next frame of a piece."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import padded
from scanl.data.fixed import FixedPart, Parts
from scanl.data.published.sources import kind
from scanl.data.published.yes_no import YesNoRows
from scanl.data.questions import FeatureInputs, Flags
from scanl.data.readers.pickles import plain

LOWEST, NOTES = 21, 88  # of a piano, as MIDI numbers them


@dataclass
class Polyphony(YesNoRows):
    """A set of pieces, frame by frame. A frame says which of 88 notes sound, from MIDI's 21 to 108.

    Each frame is predicted from the frames before it, and the first from silence. Every frame of a part counts the same
    in the score. A subclass defines `read`, which makes the rows by `roll`.

    Args: see `FixedRows`.
    """

    uneven = True
    question = Flags(FeatureInputs(NOTES), NOTES)

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return padded([np.concatenate([row[:1] * 0, row[:-1]]) for row in rows], self.length)

    def answers(self, split: FixedPart) -> NDArray[Any]:
        return padded(list(split.rows), self.length)


@kind
@dataclass
class PublishedPieces(Polyphony):
    """A published set of pieces, with its split. A frame is an eighth note, or a quarter note in the chorales.

    Every frame of a part counts the same in the score, as published. The file is a pickle. It is read without running
    the code in it.

    Args: see `FixedRows`.
    """

    readers: ClassVar[Mapping[str, Callable[..., Any]]] = {"pickles": plain}
    splits: ClassVar[Sequence[tuple[str, ...]]] = [("whole",)]

    def read(self) -> Parts:
        files = self.files
        ((name,),) = files.laid_out(self.folder).parts.values()
        path = files.path(name, self.folder)
        pieces = plain(files.read(name, self.folder), files, path, self.folder)
        if not isinstance(pieces, dict) or not {"train", "valid", "test"} <= pieces.keys():
            raise files.damaged(path, "it has no parts train, valid and test", self.folder)
        parts = []
        for split, what in (("train", "training"), ("valid", "validation"), ("test", "test")):
            try:
                rolls = [roll(piece) for piece in pieces[split]]
            except (TypeError, ValueError) as error:
                raise files.damaged(path, f"a piece is no list of frames of notes: {error}", self.folder) from error
            files.check_counts({f"{what} pieces": len(rolls)}, self.folder)
            parts.append(FixedPart(rolls, np.zeros(len(rolls), np.int64)))
        return Parts(*parts)


def roll(piece: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """Return the notes that sound in each frame, (t, 88), from their MIDI numbers. Raises ValueError if they are not a
    piece."""
    if not isinstance(piece, list | tuple) or not len(piece):
        raise ValueError("it has no frame")
    frames = np.zeros((len(piece), NOTES), np.float32)
    for frame, notes in zip(frames, piece, strict=True):
        for note in notes:
            if not isinstance(note, int) or not LOWEST <= note < LOWEST + NOTES:
                raise ValueError(f"note {note!r}, expected from {LOWEST} to {LOWEST + NOTES - 1}")
            frame[note - LOWEST] = 1
    return frames
