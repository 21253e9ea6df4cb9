"""What a synthetic task is, the registry of tasks, and the order in which training reads one."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scanl.errors import ConfigError, nearest
from scanl.registry import Registry

IGNORED = -100  # the target where nothing is scored; what torch's cross entropy leaves out
Seed = int | Sequence[int]

# The second number of the seeds that begin with a run's: what is learnt from, and what never is.
TRAINING, WHILE_TRAINING, AFTER_TRAINING = 0, 1, 2


class Examples(NamedTuple):
    """inputs: (N, T) int64 tokens, or (N, T, C) float32 features.

    targets: (N, T) int64, the token that answers each step, IGNORED where none is asked for; or (N,) float32, the
    number that answers the whole sequence.
    """

    inputs: NDArray[Any]
    targets: NDArray[Any]


@dataclass(frozen=True)
class Task(ABC):
    """A generator of examples whose best score is known, as is the score of guessing.

    A subclass is a frozen dataclass of its options: it gives `_generate`, `solve`, `chance` and what `check` refuses.
    The class variables are what `scanl tasks` prints and the tests read.

    length: n of the source, which says how many steps that makes; any, so that a model can be scored at other lengths
    than it was trained at.
    vocab_size: V, number of tokens, special ones included; None where the inputs are features.
    """

    name: ClassVar[str] = ""  # set by `register`
    id: ClassVar[str] = ""  # in the sheet of systems
    source: ClassVar[str] = ""
    metric: ClassVar[str] = "accuracy"  # over all scored tokens; or "mean squared error"
    best: ClassVar[float] = 1.0
    channels: ClassVar[int] = 0  # C of the features

    length: int
    vocab_size: int | None

    def __post_init__(self) -> None:
        for option in options(type(self)):
            value, kind = getattr(self, option.name), option.type
            assert isinstance(kind, type)
            if type(value) is not kind and not (kind is float and type(value) is int):
                raise ConfigError(f"{self.name}: {option.name} is {value!r}, expected {kind.__name__}")
        self.check()

    @abstractmethod
    def check(self) -> None:
        """ConfigError for options out of range."""

    @abstractmethod
    def _generate(self, count: int, random: np.random.Generator) -> Examples: ...

    @abstractmethod
    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        """The answers found from the inputs alone, by going through them step by step: as targets, any where not asked.

        Shares no code with the generator: that a task can be solved, and that its targets are right, is shown by the
        one scoring `best` on the other's examples.
        """

    @property
    @abstractmethod
    def chance(self) -> float:
        """What guessing scores: the best that can be done, in expectation, without reading the inputs."""

    def generate(self, count: int, seed: Seed) -> Examples:
        """`count` independent examples, always the same ones for a seed (an int, or several, at least 0)."""
        return self._generate(count, np.random.default_rng(seed))

    def scores(self, answers: NDArray[Any], targets: NDArray[Any]) -> NDArray[np.float64]:
        """(n,) the score of everything that is asked for, whose mean is the score: 1 or 0, or the squared error."""
        if self.vocab_size is None:
            return (answers.astype(np.float64) - targets) ** 2
        asked = targets != IGNORED
        return (answers[asked] == targets[asked]).astype(np.float64)

    def reaches(self, score: float, wanted: float) -> bool:
        """Whether a score is as good as another one."""
        return score >= wanted if self.best > self.chance else score <= wanted

    def _require(self, right: bool, option: str, expected: str) -> None:
        if not right:
            raise ConfigError(f"{self.name}: {option} is {getattr(self, option)}, expected {expected}")


def draw_distinct(
    random: np.random.Generator, count: int, among: int, size: int, weights: NDArray[np.floating[Any]] | None = None
) -> NDArray[np.int64]:
    """(count, size): in each row distinct integers below `among`, in the order of drawing without replacement.

    weights: (among,) probabilities, up to a factor; equal without. The first of independent exponential waiting times
    are such draws: what is left after a draw waits on as if nothing had happened.
    """
    waits = random.standard_exponential((count, among))
    if weights is not None:
        waits /= weights
    first = np.argpartition(waits, size - 1, axis=1)[:, :size]
    order = np.argsort(np.take_along_axis(waits, first, 1), axis=1)
    return np.take_along_axis(first, order, 1)


@dataclass(frozen=True)
class FreshExamples:
    """Training examples that no other step reads: each batch is a pure function of (seed, step)."""

    task: Task
    seed: int

    def batch(self, step: int, size: int, rank: int = 0, world: int = 1) -> Examples:
        """The examples of one process, as `text.Order.batch`: its rows of what one process would read alone."""
        whole = self.task.generate(size * world, (self.seed, TRAINING, step))
        mine = slice(rank * size, (rank + 1) * size)
        return Examples(whole.inputs[mine], whole.targets[mine])


registry: Registry[Task] = Registry("task")
register, names, get = registry.add, registry.names, registry.get


def options(cls: type[Task]) -> list[Any]:
    """The dataclass fields that a caller may set; a vocabulary that is fixed is not one of them."""
    return [field for field in fields(cls) if field.init]


def summary(cls: type[Task]) -> str:
    """The first line of a task's docstring."""
    return inspect.cleandoc(cls.__doc__ or "").splitlines()[0]


def build(name: str, **given: Any) -> Task:
    """Make a registered task: `build("adding", length=500)`.

    Unknown names and options raise ConfigError with the nearest known one.
    """
    cls = get(name)
    known = [option.name for option in options(cls)]
    for option in given:
        if option not in known:
            raise nearest(f"option of {name}", option, known)
    return cls(**given)
