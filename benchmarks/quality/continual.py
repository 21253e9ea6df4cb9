"""Predict bouncing glyphs of three kinds, one kind after the other, and measure what is kept and what carries over.

    python benchmarks/quality/continual.py            # both learners, in order and mixed: about 15 minutes on one core
    python benchmarks/quality/continual.py p_tncn     # one of them

After Ororbia et al., arXiv:1810.07411: one pass, batch 1, an optimizer's step after every frame. MNIST's
digits, then Fashion-MNIST, then letters from A to J that are drawn from the fonts of matplotlib, in the place of
NotMNIST, which no package has. Frames are pooled to `--side` pixels a side. After each kind all three are scored on
new sequences: the mean squared error of a pixel over the last 10 of 20 frames.

forgetting: how much higher the error of a former kind is than its lowest former one, the mean over the former kinds.
zero-shot: the error of the next kind, of which nothing was seen. `mixed` has the three kinds by turns, which bounds the
others from above. `copy` is the error of the last frame as the answer.
"""

import argparse
import string
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from scanl.data.batch import Batch
from scanl.data.files import folders
from scanl.data.published.get import get
from scanl.data.questions import FeatureInputs, Numbers
from scanl.learning.algorithms import TBPTT, Algorithm, PTNCNLearning
from scanl.learning.questions import answerer
from scanl.models import PTNCN, Stack
from scanl.models.whole.ptncn import ptncn_loss
from scanl.tasks.bouncing import ITEM, ITEMS, SIDE, BouncingDigits

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser

LEARNERS = ("p_tncn", "tbptt")
KINDS = ("mnist", "fashion_mnist", "letters")
ORDERS = ("in order", "mixed")
SCORED = 10  # frames at the end of a sequence


@dataclass
class BouncingLetters(BouncingDigits):
    """Letters from A to J in the fonts that matplotlib ships; every fifth font is for tests."""

    @cached_property
    def images(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        from matplotlib import font_manager
        from matplotlib.ft2font import FT2Font

        shipped = Path(font_manager.__file__).parent / "mpl-data" / "fonts" / "ttf"
        letters = string.ascii_uppercase[:10]
        fonts = [FT2Font(str(path)) for path in sorted(shipped.glob("*.ttf"))]
        fonts = [font for font in fonts if set(map(ord, letters)) <= set(font.get_charmap())]
        parts: tuple[list[NDArray[np.uint8]], list[NDArray[np.uint8]]] = ([], [])
        for index, font in enumerate(fonts):
            font.set_size(22, 72)
            for letter in letters:
                font.set_text(letter)
                font.draw_glyphs_to_bitmap()
                glyph = np.asarray(font.get_image())[:ITEM, :ITEM]
                frame = np.zeros((ITEM, ITEM), np.uint8)
                top, left = (ITEM - glyph.shape[0]) // 2, (ITEM - glyph.shape[1]) // 2
                frame[top : top + glyph.shape[0], left : left + glyph.shape[1]] = glyph
                parts[index % 5 == 4].append(frame)
        return np.stack(parts[0]), np.stack(parts[1])


def source(kind: str) -> BouncingDigits:
    return BouncingLetters(seed=0) if kind == "letters" else BouncingDigits(seed=0, items=kind)


def frames(kind: str, count: int, seed: int, side: int, *, training: bool) -> Tensor:
    """Return sequences of pooled frames (count, 20, side²)."""
    batch = source(kind).generate(count, np.random.default_rng(seed), training=training).tensors()
    video = torch.cat([batch.inputs, batch.targets[:, -1:]], 1).view(-1, 1, SIDE, SIDE)
    return F.avg_pool2d(video, SIDE // side).view(count, -1, side * side)


class Learner:
    """A model that learns from a stream of frames."""

    def __init__(self, name: str, size: int, width: int, rate: float) -> None:
        torch.manual_seed(0)
        self.algorithm: Algorithm
        if name == "p_tncn":
            self.model = PTNCN(size, width, output="sigmoid")
            self.algorithm = PTNCNLearning(ptncn_loss)
        else:
            task = answerer(Numbers(FeatureInputs(size), size))
            self.model = task.model(Stack(width, 1, "gru", channel_mixer="none"))
            self.algorithm = TBPTT(task.loss, every=1, window=5)
        self.optimizer = torch.optim.Adam(self.model.parameters(), rate)

    def learn(self, video: Tensor) -> None:
        """Learn from a sequence (T, D), frame by frame."""
        kept = self.algorithm.init(self.model, 1)
        for now, following in pairwise(video):
            self.optimizer.zero_grad()
            loss, kept = self.algorithm.update(self.model, kept, Batch(now[None, None], following[None, None]))
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def error(self, videos: Tensor) -> float:
        """Return the mean squared error of the last predictions of sequences (N, T, D)."""
        answers, _ = self.model(videos[:, :-1], None)
        return F.mse_loss(answers[:, -SCORED:], videos[:, -SCORED:]).item()


def run(results: Results, name: str, order: str, chosen: argparse.Namespace) -> None:
    key = {"learner": name, "order": order, "side": chosen.side, "width": chosen.width, "sequences": chosen.sequences}
    if results.has(**key):
        return
    scored = {kind: frames(kind, chosen.scored, 1, chosen.side, training=False) for kind in KINDS}
    taught = [frames(kind, chosen.sequences, 2, chosen.side, training=True) for kind in KINDS]
    if order == "mixed":
        mixed = torch.stack(taught, 1).flatten(0, 1)
        taught = list(mixed.chunk(len(KINDS)))
    learner, errors, begin = Learner(name, chosen.side**2, chosen.width, chosen.rate), [], time.perf_counter()
    for kind, videos in zip(KINDS, taught, strict=True):
        for video in videos:
            learner.learn(video)
        errors.append([learner.error(scored[kind]) for kind in KINDS])
        after = kind if order == "in order" else "a third of the stream"
        results.add(
            **key, after=after, **dict(zip(KINDS, errors[-1], strict=True)),
            forgetting=forgetting(errors), zero_shot=zero_shot(errors), minutes=(time.perf_counter() - begin) / 60,
        )  # fmt: skip


def copy(results: Results, chosen: argparse.Namespace) -> None:
    """Add the errors of the last frame as the answer."""
    key = {"learner": "copy", "side": chosen.side}
    if not results.has(**key):
        scored = {kind: frames(kind, chosen.scored, 1, chosen.side, training=False) for kind in KINDS}
        results.add(
            **key,
            **{kind: F.mse_loss(v[:, -SCORED - 1 : -1], v[:, -SCORED:]).item() for kind, v in scored.items()},
        )


def forgetting(errors: Sequence[Sequence[float]]) -> float | None:
    """Return the mean rise over the lowest former error, of the kinds before the last; None where there is none."""
    former = range(len(errors) - 1)
    rises = [errors[-1][kind] - min(row[kind] for row in errors[kind:-1]) for kind in former]
    return sum(rises) / len(rises) if rises else None


def zero_shot(errors: Sequence[Sequence[float]]) -> float | None:
    """Return the error of the kind that comes next; None after the last."""
    return errors[-1][len(errors)] if len(errors) < len(errors[-1]) else None


def main() -> None:
    made = parser(__doc__, LEARNERS)
    made.add_argument("--sequences", type=int, default=50, help="of a kind")
    made.add_argument("--scored", type=int, default=50, help="sequences of a kind")
    made.add_argument("--side", type=int, default=32, help="pixels of a frame's side: 64, 32, 16 or 8")
    made.add_argument("--width", type=int, default=128, help="units of a layer")
    made.add_argument("--rate", type=float, default=1e-3, help="of Adam; at 0 nothing is forgotten")
    made.add_argument("--orders", nargs="+", choices=ORDERS, default=ORDERS)
    chosen = parse(made)
    if chosen.quick:
        chosen.sequences, chosen.scored, chosen.side, chosen.width = 2, 2, 8, 8
    for items in ITEMS:
        if not folders[items].folder().exists():
            get(folders[items])
    results = Results("continual", chosen)
    copy(results, chosen)
    for name in chosen.names:
        for order in chosen.orders:
            run(results, name, order, chosen)


if __name__ == "__main__":
    main()
