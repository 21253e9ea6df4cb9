"""The base class of synthetic tasks, their registry, and the source that feeds a task to a training run."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from scanl.data import base
from scanl.data.base import IGNORED as IGNORED
from scanl.data.base import Entry, Exam, Source
from scanl.data.batch import Batch as Batch
from scanl.data.fresh import AFTER_TRAINING, TRAINING, WHILE_TRAINING
from scanl.data.questions import FeatureInputs, Number, Question, TokenLabel, Vocabulary
from scanl.errors import nearest
from scanl.options import check, options
from scanl.registry import Registry
from scanl.whole import whole_number

Seed = int | Sequence[int]

COUNT = 1000  # default number of examples that `scanl eval` scores


@dataclass(frozen=True)
class Task(Entry, ABC):
    """A generator of examples whose best score and chance score are known.

    A subclass is a frozen dataclass of its options and their ranges. It defines `_generate`, `solve` and `chance`. Its
    class variables are printed by `scanl tasks` and read by the tests.

    length: n as the paper in `source` counts it; a task's docstring says how many steps that makes. It can change
    after training, so that a model is scored at other lengths.
    vocab_size: V, number of tokens including special ones; None where the inputs are features.

    inputs: (N, T) int64 tokens, or (N, T, C) float32 features.   targets: by default (N, T) int64, the right token at
    each step, IGNORED where there is no target; or for features (N,) float32, the right number for the whole sequence.
    A task with another `question` has the targets of that.
    """

    metric: ClassVar[str] = "accuracy"  # over all scored tokens; or "mean squared error"
    best: ClassVar[float] = 1.0
    channels: ClassVar[int] = 0  # C of the features

    length: int
    vocab_size: int | None

    def __post_init__(self) -> None:
        check(self.name, options(type(self)), vars(self))

    @abstractmethod
    def _generate(self, count: int, random: np.random.Generator) -> Batch: ...

    @abstractmethod
    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        """Find the answers from the inputs alone, step by step. Steps without a target may have any value.

        It uses no code of the generator. When it scores `best` on generated examples, the task is solvable and its
        targets are right.
        """

    @property
    @abstractmethod
    def chance(self) -> float:
        """Chance score: the best expected score without reading the inputs."""

    def generate(self, count: int, seed: Seed) -> Batch:
        """Generate `count` independent examples, always the same for a seed (an int or several, at least 0)."""
        several = seed if isinstance(seed, Sequence) and not isinstance(seed, str) else [seed]
        numbers = [whole_number(self.name, "seed", number) for number in several]
        return self._generate(count, np.random.default_rng(numbers))

    def scores(self, answers: NDArray[Any], targets: NDArray[Any]) -> NDArray[np.float64]:
        """Score the answers at each target (n,): 1 or 0 for a token or class, the squared error for a number."""
        if np.issubdtype(targets.dtype, np.floating):
            is_target = ~np.isnan(targets)
            return (answers[is_target].astype(np.float64) - targets[is_target]) ** 2
        is_target = targets != IGNORED
        return (answers[is_target] == targets[is_target]).astype(np.float64)

    @property
    def question(self) -> Question:
        """The question of the task: a token at some steps; for features, a number for the whole sequence."""
        if self.vocab_size is not None:
            return TokenLabel(Vocabulary(self.vocab_size))
        return Number(FeatureInputs(self.channels))

    @property
    def exam(self) -> "Task":
        """The task that is asked after training, where training has easier examples too; by default this one."""
        return self

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        return ("seed", "eval_examples", *options(cls))

    @classmethod
    def open(cls, options: Mapping[str, Any]) -> Source:
        return FreshExamples(build(cls.name, **options["data_options"]), options["seed"], options["eval_examples"])

    def reaches(self, score: float, threshold: float) -> bool:
        """Whether `score` is at least as good as `threshold`."""
        return score >= threshold if self.best > self.chance else score <= threshold

    def __str__(self) -> str:
        """Name the task with all its options: `adding length=500`."""
        values = " ".join(f"{name}={getattr(self, name)}" for name in options(type(self)))
        return f"{self.name} {values}"


def draw_distinct(
    random: np.random.Generator, count: int, among: int, size: int, weights: NDArray[np.floating[Any]] | None = None
) -> NDArray[np.int64]:
    """Draw `size` integers below `among` without replacement for each of `count` rows: (count, size), in drawing order.

    weights: (among,) probabilities up to a common factor; equal if None. Each integer gets an exponential waiting time
    with its weight as rate; the first `size` to arrive are the draws. This is exact because the exponential
    distribution has no memory.
    """
    waits = random.standard_exponential((count, among))
    if weights is not None:
        waits /= weights
    first = np.argpartition(waits, size - 1, axis=1)[:, :size]
    order = np.argsort(np.take_along_axis(waits, first, 1), axis=1)
    return np.take_along_axis(first, order, 1)


@dataclass
class FreshExamples(Source):
    """A task as a source. Each batch is a pure function of (seed, step), and no two steps use the same example.

    Args:
        task: generates the examples.
        seed: seed of the examples. Training never uses the examples of measurements.
        eval_examples: number of examples in a measurement.
    """

    task: Task
    seed: int
    eval_examples: int = 512

    def __post_init__(self) -> None:
        task = self.task
        self.metric, self.chance, self.question = task.metric, task.chance, task.question

    def check(self) -> None:
        """Do nothing: there is no file to read, and the task has checked its options."""

    def batch(self, step: int, size: int, rank: int = 0, world: int = 1) -> Batch:
        batch = self.task.generate(size * world, (self.seed, TRAINING, step))
        rows = slice(rank * size, (rank + 1) * size)
        return batch.rows(rows)

    def digest(self) -> str:
        """Digest of the first example, because other versions of numpy may draw other random numbers."""
        first = self.task.generate(1, self.seed)
        return hashlib.sha256(first.inputs.tobytes() + first.targets.tobytes()).hexdigest()

    def unseen(self, step: int) -> Iterator[Batch]:
        return groups(self.task, self.eval_examples, (self.seed, WHILE_TRAINING, step))

    def exam(self, *, sample: bool = False, count: int | None = None) -> Exam:
        """Return an exam on fresh examples. count: number of examples; None for `COUNT`."""
        task = self.task.exam
        if count is None:
            count = self.eval_examples if sample else COUNT
        title = f"{task.metric} on {count:,} fresh examples of {task}:"
        examples = groups(task, count, (self.seed, AFTER_TRAINING))
        return Exam(title, examples, {"chance": task.chance, "best": task.best}, ".4g")

    def __str__(self) -> str:
        return f"examples of {self.task}; {self.metric}: chance {self.task.chance:.4g}, best {self.task.best:g}"


def groups(task: Task, count: int, seed: Sequence[int], tokens: int = 2**16) -> Iterator[Batch]:
    """Generate `count` examples in groups that form batches, of at most 64 examples and about `tokens` steps."""
    at_once = max(1, min(64, tokens // task.generate(1, seed).inputs.shape[1]))
    for number, begin in enumerate(range(0, count, at_once)):
        yield task.generate(min(at_once, count - begin), (*seed, number))


T = TypeVar("T", bound=Task)
registry: Registry[Task] = Registry("task", listed="`scanl tasks`", use="scanl train --data {name}")
names, get = registry.names, registry.get


def register(name: str) -> Callable[[type[T]], type[T]]:
    """Decorator: register a task under `name`, as a task and as a source."""

    def add(cls: type[T]) -> type[T]:
        return base.register(name)(registry.add(name)(cls))

    return add


def build(name: str, **arguments: Any) -> Task:
    """Make a registered task: `build("adding", length=500)`.

    Unknown names and options raise ConfigError with the nearest known one.
    """
    cls = get(name)
    for option in arguments:
        if option not in options(cls):
            raise nearest(f"option of {name}", option, options(cls))
    return cls(**arguments)
