"""Two dots and dashed paths: are the dots the ends of one path?"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from scanl.data.base import register
from scanl.data.batch import Batch
from scanl.data.fresh import FreshRows
from scanl.data.questions import Class, FeatureInputs


class Rules(NamedTuple):
    """Sizes of a picture, in pixels."""

    side: int
    gaps: tuple[int, ...]  # half of the gap between dashes, drawn for each picture
    length: int  # of a dash
    thickness: float
    radius: float  # of a dot
    dashes: int  # of each of the two long paths; the others have a third
    start: int  # distance of the first ends of the two paths
    continuity: float  # the larger, the straighter is a path
    others: int  # paths that distract
    brightness: float  # of dashes; a dot has 1


@dataclass
class _Pictures(FreshRows):
    metric = "accuracy"
    chance = 0.5
    question = Class(FeatureInputs(1), 2)
    rules: ClassVar[Rules]

    @property
    def length(self) -> int:
        return self.rules.side**2

    def generate(self, count: int, random: np.random.Generator, *, training: bool) -> Batch:
        from scanl.tasks.dashes import draw_dot, draw_paths  # imports numba, which takes half a second

        rules = self.rules
        pictures, answers = np.zeros((count, rules.side, rules.side), np.float32), random.integers(0, 2, count)
        for picture, connected in zip(pictures, answers, strict=True):
            paths = draw_paths(
                random, picture, int(random.choice(rules.gaps)), rules.length, rules.thickness, rules.dashes,
                rules.start, rules.continuity, rules.others, rules.brightness,
            )  # fmt: skip
            first = int(random.integers(0, 2))
            last = first if connected else 1 - first
            for row, column in (paths[first, 0, :2], paths[last, -1, 2:]):
                draw_dot(picture, row, column, rules.radius)
        return Batch(pictures.reshape(count, -1, 1), answers)


@register("pathfinder")
@dataclass
class Pathfinder(_Pictures):
    """Pathfinder: whether two dots are the ends of one dashed path, from 32 x 32 pixels. T = 1024 steps of one number.

    Two paths of 14 dashes grow in turn from ends that are 7 pixels apart. A dash is 2 pixels long and half a pixel
    thick. The gap between two dashes of a path is 2 pixels. Up to 5 paths of 4 dashes distract. Every path has a margin
    of one pixel, and no dash comes within one pixel of the margin of another path. One dot is at the first end of one
    path. The other dot is at the last end of the same path or of the other path, each with probability 1/2. Every step
    has new pictures. Pixels are in [0, 1]; dashes have a brightness of 3/4.

    These pictures follow the rules and the sizes of the generator of the Long Range Arena, but coordinates are not
    rounded. They are not the published pictures, which are in the files of the Long Range Arena.

    Args:
        seed, eval_examples: see `FreshRows`.
    Chance: 1/2.
    """

    id = "B-lra-pathfinder"
    source = (
        'Linsley et al., "Learning long-range spatial dependencies with horizontal gated recurrent units", '
        'arXiv:1805.08315, section 3; sizes: Tay et al., "Long Range Arena", arXiv:2011.04006, section 2.2.5'
    )
    rules = Rules(32, (1,), 2, 0.5, 1.5, 14, 7, 1.0, 5, 0.75)


@register("path_x")
@dataclass
class PathX(_Pictures):
    """Path-X: whether two dots are the ends of one dashed path, from 128 x 128 pixels. T = 16,384 steps of one number.

    As `pathfinder`, with dashes of 5 pixels that are 1.5 thick, gaps of 4 or 6 pixels in a picture, ends that are 20
    apart, dots with a radius of 3, up to 8 distracting paths, straighter paths and a brightness of 0.9.

    Args:
        seed, eval_examples: see `FreshRows`.
    Chance: 1/2.
    """

    id = "B-lra-pathx"
    source = Pathfinder.source
    rules = Rules(128, (2, 3), 5, 1.5, 3.0, 14, 20, 1.8, 8, 0.9)
