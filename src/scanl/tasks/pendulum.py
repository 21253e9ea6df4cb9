"""A pendulum in noisy pictures at irregular times."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import register
from scanl.data.fixed import FixedPart, FixedRows, Parts
from scanl.data.questions import FeatureInputs, Numbers
from scanl.options import at_least, within

SIDE, FRAMES, INNER = 24, 100, 100
STEP, GRAVITY, FRICTION, NOISE = 0.01, 9.81, 0.1, 0.1
REACH, WIDTH, CANVAS = 55.0, 8.0, 128.0  # of the line, in pixels of a picture of 128 x 128


def swing(angle: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.float64]:
    """Return the angles of pendulums that are let go: (N, 100), one each 0.01 s.

    A rod of length and mass 1 has d2a/dt2 = (3 g / l) sin a - 0.1 da/dt, with a from the upright position. Its speed
    gets normal noise of standard deviation 0.1 after each 0.01 s. Semi-implicit Euler, 100 steps in 0.01 s.
    """
    speed, angles = np.zeros_like(angle), []
    for _ in range(FRAMES):
        for _ in range(INNER):
            speed = speed + (3 * GRAVITY * np.sin(angle) - FRICTION * speed) * STEP / INNER
            angle = angle + speed * STEP / INNER
        speed = speed + random.normal(0, NOISE, angle.shape)
        angle = angle % (2 * np.pi)
        angles.append(angle)
    return np.stack(angles, 1) - np.pi


def draw(angles: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Draw pendulums as white lines from the centre of a black picture: (..., 24, 24).

    A pixel is as bright as the part of it that the line covers, found from its distance to the line.
    """
    scale = SIDE / CANVAS
    rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5 - SIDE / 2
    x, y = (axis[..., None, None] for axis in (np.sin(angles), np.cos(angles)))
    along = np.clip(columns * x + rows * y, 0, REACH * scale)
    distance = np.hypot(columns - along * x, rows - along * y)
    covered = np.clip(WIDTH / 2 * scale + 0.5 - distance, 0, 1)
    return np.round(255 * covered).astype(np.uint8)


def spoil(images: NDArray[np.uint8], random: np.random.Generator) -> NDArray[np.uint8]:
    """Mix pictures (N, 100, 24, 24) with noise whose strength wanders over time; the first five stay clean."""
    count = len(images)
    share = np.empty((count, FRAMES))
    share[:, 0] = random.random(count)
    for frame in range(1, FRAMES):
        share[:, frame] = np.clip(share[:, frame - 1] + random.uniform(-0.2, 0.2, count), 0, 1)
    low, high = random.uniform(0, 0.25, (count, 1)), random.uniform(0.75, 1, (count, 1))
    share = np.clip((share - low) / (high - low), 0, 1)
    share[:, :5] = 1
    weight = share[..., None, None]
    return (weight * images + (1 - weight) * random.uniform(0, 255, images.shape)).astype(np.uint8)


@register("pendulum")
@dataclass
class Pendulum(FixedRows):
    """Pendulum: the sine and cosine of its angle, from noisy pictures of 24 x 24 pixels at irregular times.

    A sequence has 100 pictures, 0.01 s apart, and 50 random ones of them are seen. A step has the 576 pixels, divided
    by 255, and the time since the step before, in units of 0.01 s. For layers that take `timespans`, this time is also
    the duration of the step. T = 50. 2,000 sequences are for training, 1,000 for validation, 1,000 for the test. The
    published sequences were drawn by another program from other random numbers. These follow the same rules, but their
    pixels differ.

    Args:
        seed, eval_examples: see `FixedRows`.   folder: not used.
        count: number of training sequences; the other parts have half as many.
        observed: pictures that are seen, of 100.
    Chance: 1/2, the variance of the two answers.
    """

    id = "B-pendulum"
    source = (
        'Becker et al., "Recurrent Kalman Networks", arXiv:1905.07357; Schirmer et al., "Modeling Irregular Time '
        'Series with Continuous Recurrent Units", arXiv:2111.11344, section 5.2'
    )
    metric = "mean squared error"
    chance = 0.5
    timed = True
    question = Numbers(FeatureInputs(SIDE * SIDE + 1), 2)

    count: Annotated[int, at_least(2)] = 2000
    observed: Annotated[int, within(1, FRAMES)] = 50

    @property
    def length(self) -> int:
        return self.observed

    def read(self) -> Parts:
        random = np.random.default_rng(42)
        train, test = self._part(random, self.count), self._part(random, self.count // 2)
        return Parts(train, self._part(np.random.default_rng(43), self.count // 2), test)

    def _part(self, random: np.random.Generator, count: int) -> FixedPart:
        angles = swing(random.uniform(0, 2 * np.pi, count), random)
        images = spoil(draw(angles + random.normal(0, 1e-5, angles.shape)), random)
        steps = np.sort(random.permuted(np.tile(np.arange(FRAMES), (count, 1)), axis=1)[:, : self.observed], axis=1)
        rows = np.empty((count, self.observed, SIDE * SIDE + 1), np.float32)
        rows[..., :-1] = np.take_along_axis(images, steps[..., None, None], 1).reshape(count, self.observed, -1) / 255
        rows[..., -1] = np.diff(steps, axis=1, prepend=-1)
        angles = np.take_along_axis(angles, steps, 1)
        return FixedPart(rows, np.stack([np.sin(angles), np.cos(angles)], 2).astype(np.float32))
