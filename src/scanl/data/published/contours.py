"""The published pictures of Pathfinder and Path-X, in the form of the Long Range Arena."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scanl.data.fixed import FixedPart, FixedRows, FromFiles, Parts
from scanl.data.published.sources import kind
from scanl.data.questions import Class, FeatureInputs
from scanl.data.readers import png
from scanl.options import Positive

HARD_FOLDER = "curv_contour_length_14"


@kind
@dataclass
class PublishedPathfinder(FixedRows):
    """Published pictures of dashed paths: whether two dots are the ends of one path.

    The pictures of the hard level, in the numeric order of the lists in `metadata`, are split at random into 80, 10 and
    10 % by torch's generator with the seed 42, as in the programs of S4 and S5. Pixels are in [0, 1]. A list is text,
    as in the Long Range Arena, or an array of strings, as the authors' generator writes it. Pictures are read when a
    batch needs them.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        side: pixels of a side; with `folder`, another size of the release is read, 64 or 256.
    """

    question = Class(FeatureInputs(1), 2)

    side: Positive = 32

    @property
    def length(self) -> int:
        return self.side**2

    def read(self) -> Parts:
        lists = self.files.below(f"{HARD_FOLDER}/metadata", "*.npy", self.folder)
        if odd := [path for path in lists if not path.stem.isdigit()]:
            raise self.files.damaged(odd[0], "its name is no number", self.folder)
        paths: list[Path] = []
        answers: list[int] = []
        for path in sorted(lists, key=lambda path: int(path.stem)):
            for folder, name, label in self._list(path):
                paths.append(path.parents[1] / folder / name)
                answers.append(label)
        self.files.check_counts({"pictures": len(paths)}, self.folder)
        order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(42)).numpy()
        tenth = len(paths) // 10
        cuts = order[: len(order) - 2 * tenth], order[len(order) - 2 * tenth : len(order) - tenth], order[-tenth:]
        labels = np.array(answers, np.int64)
        return Parts(*(FixedPart(FromFiles([paths[i] for i in cut], self.picture), labels[cut]) for cut in cuts))

    def _list(self, path: Path) -> list[tuple[str, str, int]]:
        """Return folder, name and label of each picture of a list: the fields 1, 2 and 4 of a line or row."""
        try:
            content = path.read_bytes()
            if content.startswith(b"\x93NUMPY"):
                rows: Sequence[Any] = np.load(BytesIO(content), allow_pickle=False).astype(str).tolist()
            else:
                rows = [line.split() for line in content.decode("ascii").splitlines()]
            pictures = [(folder, name, int(label)) for folder, name, _, label, *_ in rows]
        except (OSError, ValueError, TypeError) as error:
            raise self.files.damaged(path, f"it is no list of pictures: {error}", self.folder) from error
        if not pictures or any(label not in (0, 1) for *_, label in pictures):
            raise self.files.damaged(path, "it has no picture, or one with a label that is not 0 or 1", self.folder)
        return pictures

    def picture(self, path: Path) -> NDArray[np.uint8]:
        """Return the grey pixels of a file: (side ** 2, 1)."""
        pixels = png.pixels(self.files, path, self.folder, "L")
        if pixels.shape != (self.side, self.side):
            why = f"it has {pixels.shape[1]} x {pixels.shape[0]} pixels, expected {self.side} x {self.side}"
            raise self.files.damaged(path, why, self.folder)
        return pixels.reshape(-1, 1)

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return (np.stack(rows) / np.float32(255)).astype(np.float32)
