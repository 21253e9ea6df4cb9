"""Chorales of Bach, note by note, from compressed MusicXML."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scanl.data.fixed import FixedPart, Parts
from scanl.data.published.music import Polyphony, roll
from scanl.data.published.sources import published
from scanl.data.readers import musicxml


@published("bach_chorales")
@dataclass
class BachChorales(Polyphony):
    """Bach's chorales: which notes sound next, a frame a quarter note. 218, 72 and 72 pieces, a split of our own.

    A frame says which notes sound at the start of a quarter note, counted from the start of the piece. A held note
    sounds in each frame that it reaches. What begins and ends between two frames is not read. Repeats are written once.
    Scores with more or fewer than four parts are left out, and a chorale whose frames equal an earlier chorale's. Of
    the others, in the order of their names, every fifth is for the test, and the fourth of every five for validation.
    This is not the split of `jsb_chorales`, nor are these its chorales, so scores do not compare with published ones.
    Several chorales harmonise the same melody, and one is there in two keys.

    Args: see `Polyphony`.
    """

    def read(self) -> Parts:
        rolls: dict[bytes, NDArray[np.float32]] = {}
        paths = sorted(self.files.below("bach", "bwv*.mxl", self.folder), key=lambda path: path.name)
        for path in paths:
            try:
                parts = musicxml.score(self.files.read(f"bach/{path.name}", self.folder)).findall("part")
                if len(parts) == 4:
                    rolls.setdefault((frames := roll(musicxml.frames(parts))).tobytes(), frames)
            except musicxml.READ_ERRORS as error:
                raise self.files.damaged(path, f"it is no score that is understood: {error}", self.folder) from error
        self.files.check_counts({"scores": len(paths), "different chorales of four parts": len(rolls)}, self.folder)
        chorales = FixedPart(list(rolls.values()), np.zeros(len(rolls), np.int64))
        fifth = np.arange(len(rolls)) % 5
        return Parts(*(chorales.take(np.flatnonzero(chosen)) for chosen in (fifth < 3, fifth == 3, fifth == 4)))
