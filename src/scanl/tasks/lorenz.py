"""Chaotic flows of Lorenz, sampled at regular times."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import register
from scanl.data.questions import FeatureInputs, Numbers
from scanl.options import Range, at_least
from scanl.tasks.stream import Sample, StreamTask

Point = NDArray[np.float64]
DROPPED_STEPS = 1000  # steps until the state is on the attractor


def lorenz63(x: Point) -> Point:
    """Return the velocity of Lorenz' three equations, with σ = 10, ρ = 28, β = 8/3."""
    return np.array([10 * (x[1] - x[0]), x[0] * (28 - x[2]) - x[1], x[0] * x[1] - 8 / 3 * x[2]])


def lorenz96(x: Point, forcing: float = 8.0) -> Point:
    """Return the velocity (x_{i+1} - x_{i-2}) x_{i-1} - x_i + F, where i goes round in a circle."""
    around = np.concatenate([x[-2:], x, x[:1]])  # `np.roll` takes most of the time
    return (around[3:] - around[:-3]) * around[1:-2] - x + forcing


def rk4(velocity: Any, x: Point, step: float) -> Point:
    """Return the state after a step of the classical Runge-Kutta method of fourth order."""
    a = velocity(x)
    b = velocity(x + step / 2 * a)
    c = velocity(x + step / 2 * b)
    d = velocity(x + step * c)
    return x + step / 6 * (a + 2 * b + 2 * c + d)


@dataclass
class Flow(StreamTask):
    """The next state of a flow, from the present one. Abstract.

    The state is integrated by the classical Runge-Kutta method, one step a sample. Its numbers are standardised by the
    constants of the class. Noise is added to what is seen, and so to the truths, which are seen later.

    Args:
        seed, eval_examples, length: see `StreamTask`.
        step: time between two samples.
        noise: standard deviation of normal noise, in units of the numbers' own deviation.
    """

    metric = "mean squared error"
    count: ClassVar[int]
    mean: ClassVar[Any]
    deviation: ClassVar[Any]

    step: Annotated[float, Range("more than 0 and at most 0.1", lambda step, _: 0 < step <= 0.1)] = 0.01
    noise: Annotated[float, at_least(0)] = 0.0

    @abstractmethod
    def velocity(self, x: Point) -> Point:
        """Return dx/dt."""

    @abstractmethod
    def start(self, random: np.random.Generator) -> Point:
        """Return a state near the attractor."""

    def samples(self, random: np.random.Generator) -> Iterator[Sample]:
        x = self.start(random)
        for _ in range(DROPPED_STEPS):
            x = rk4(self.velocity, x, self.step)
        seen = self._seen(x, random)
        while True:
            x = rk4(self.velocity, x, self.step)
            before, seen = seen, self._seen(x, random)
            yield before, seen

    def _seen(self, x: Point, random: np.random.Generator) -> list[float]:
        standard = (x - self.mean) / self.deviation
        return (standard + self.noise * random.standard_normal(self.count)).tolist()


@register("lorenz63")
@dataclass
class Lorenz63(Flow):
    """Lorenz-63: the next state of three coupled equations.

    .. math:: \\dot x = 10 (y - x), \\quad \\dot y = x (28 - z) - y, \\quad \\dot z = x y - 8/3 z

    Args: see `Flow`.
    """

    source = 'Lorenz, "Deterministic Nonperiodic Flow", J. Atmos. Sci. 20, 1963, eq. (25) to (27)'
    question = Numbers(FeatureInputs(3), 3)
    count = 3
    mean: ClassVar = np.array([0.0, 0.0, 23.5])
    deviation: ClassVar = np.array([7.9, 9.0, 8.6])

    def velocity(self, x: Point) -> Point:
        return lorenz63(x)

    def start(self, random: np.random.Generator) -> Point:
        return np.array([1.0, 1.0, 25.0]) + random.standard_normal(3)


@register("lorenz96")
@dataclass
class Lorenz96(Flow):
    """Lorenz-96: the next state of 20 numbers on a circle, forced by 8.

    .. math:: \\dot x_i = (x_{i+1} - x_{i-2}) x_{i-1} - x_i + 8

    Args: see `Flow`.
    """

    source = 'Lorenz, "Predictability: A Problem Partly Solved", ECMWF Seminar, 1996, eq. (1), with F = 8'
    question = Numbers(FeatureInputs(20), 20)
    count = 20
    mean: ClassVar = 2.3
    deviation: ClassVar = 3.6

    def velocity(self, x: Point) -> Point:
        return lorenz96(x)

    def start(self, random: np.random.Generator) -> Point:
        return 8 + random.standard_normal(self.count)
