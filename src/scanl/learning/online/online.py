"""A recurrent model on a stream, by the methods of river's estimators: `predict_one` and `learn_one`."""

import copy
import io
import math
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from scanl.data.batch import Batch
from scanl.errors import CheckpointError, DataError
from scanl.learning.algorithms import algorithms
from scanl.learning.online.answers import Answer, Answering, AnswerNumbers, Truth, likeliest
from scanl.learning.online.bank import Bank
from scanl.learning.online.learner import Learner
from scanl.learning.online.prequential import Prequential, Scorer, as_numbers
from scanl.learning.online.scaling import SPAN
from scanl.learning.optimizers import OPTIMIZERS
from scanl.learning.questions import answerer
from scanl.learning.run.checkpoint import read_whole, write_checkpoint
from scanl.models import Backbone
from scanl.options import NAME, ConfiguredMeta, Range, above, at_least, between, one_of

MIN_PLACES = 16  # for the features of a mapping
COMPILE_SAMPLES = 256  # samples, which take about as long as compiling: 140 to 240 of three models
FADE = 0.999  # of the errors
WAITING = 1000

RATES = Range(
    "rates of at least 0", lambda rates, _: np.size(rates) > 0 and all(0 <= r < math.inf for r in _list(rates))
)
Fade = Annotated[float, between(0, 1), "factor by which a score fades with each answer"]
Waiting = Annotated[int, at_least(1), "samples that may wait for their truth; the first one beyond is given up"]


class Online(metaclass=ConfiguredMeta):
    """A recurrent model that learns from a stream, sample by sample, in constant memory.

    `predict_one` answers a sample and keeps nothing of it; `learn_one` reads it and learns from its truth. Where truths
    come late, `answer` reads a sample and `learn` takes its truth, see `Prequential`, which is the loop inside.

    A sample is a number, a sequence of numbers, or a mapping of names to numbers. A feature of a mapping takes a place
    when it first has a number in a sample that is read. It is missing before, and wherever it is absent later. There
    are twice as many places as the first sample has features, and at least 16, or as many as `begin` says. A feature
    that finds no place is not read, which is a warning.

    Each rate has a copy of the stack. Input map and head are drawn when the first sample has been read, from the state
    that torch's generator has now. Of several rates the best so far answers, see `Bank`.

    Attributes: loop, None before the first sample; kind.
    """

    config: Mapping[str, Any]

    def __init__(
        self,
        stack: Annotated[Backbone, "body of the model, such as `Stack(16, 1, 'lru')`"],
        kind: Annotated[Answering | None, "`AnswerNumbers` or `AnswerClass`; None: one number"] = None,
        *,
        lr: Annotated[float | Sequence[float], RATES, "learning rate; of several, the best so far answers"] = 1e-3,
        algorithm: Annotated[str, NAME, "how the gradient is computed: a registered algorithm, such as bptt"] = "bptt",
        algorithm_options: Annotated[Mapping[str, Any] | None, "options of the algorithm"] = None,
        optimizer: Annotated[str, one_of(OPTIMIZERS), f"how the weights change: {', '.join(OPTIMIZERS)}"] = "adamw",
        weight_decay: Annotated[float, at_least(0), "weight decay, only on the weights of linear maps"] = 0.0,
        clip: Annotated[float, above(0), "largest norm of the gradient"] = 1.0,
        block: Annotated[int, at_least(1), "samples of an update"] = 1,
        compile_after: Annotated[
            int | None,
            at_least(0),
            "answers, and updates, after which each runs as one kernel of the CPU, which takes about a second to "
            "compile; none: never",
        ] = COMPILE_SAMPLES,
        span: Annotated[int, at_least(2), "numbers after which the past fades in the running means"] = SPAN,
        fade: Fade = FADE,
        waiting: Waiting = WAITING,
        scores: Annotated[Scorer | None, "reads each answer with its truth, such as `Scores`"] = None,
    ) -> None:
        self.kind = AnswerNumbers(span=span) if kind is None else copy.deepcopy(kind)  # it has a state
        self.loop: Prequential | None = None
        self._names: list[Hashable] = []  # of the features that have places
        self._full = False  # whether a feature found none
        self._random = torch.get_rng_state()

    def begin(self, inputs: int) -> Prequential:
        """Make and return the loop for samples of `inputs` numbers, which the first sample does otherwise.

        Raises ConfigError for options that do not fit.
        """
        options = self.config
        width, block = inputs + self.kind.width, options["block"]
        task = answerer(self.kind.question(width))
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random)
            model = task.model(options["stack"])
        learners = []
        for rate in _list(options["lr"]):
            own = copy.deepcopy(model)
            algorithm = algorithms.get(options["algorithm"])(task.loss, **(options["algorithm_options"] or {}))
            algorithm.check(own, Batch(torch.zeros(1, block, width), self.kind.none.repeat_interleave(block, 1)))
            optimizer = OPTIMIZERS[options["optimizer"]](own, rate, options["weight_decay"])
            learners.append(Learner(own, algorithm, optimizer, block, options["clip"], options["compile_after"]))
        bank = Bank(learners, options["fade"])
        self.loop = Prequential(bank, self.kind, inputs, options["span"], options["waiting"], options["scores"])
        return self.loop

    def predict_one(self, x: Any) -> Any:
        """Return the answer to a sample, a number, a list of numbers or a class, and change nothing.

        Before the first sample is read it is 0 or None.
        """
        answer = self._peek(x)
        return likeliest(answer) if isinstance(answer, dict) else answer

    def predict_proba_one(self, x: Any) -> dict[Any, float]:
        """Return the probability of each class that has been seen, and change nothing."""
        return self._peek(x)

    def _peek(self, x: Any) -> Answer:
        if self.loop is None:  # as if all outputs were 0
            return self.kind.answer(torch.zeros_like(self.kind.none), self.kind.truths.frame())
        return self.loop.peek(self._numbers(x, self.loop))

    def learn_one(self, x: Any, y: Truth) -> None:
        """Read a sample and its truth, and learn from it.

        Raises DataError, before anything changes, for a number that is not finite and for a truth of another kind.
        """
        truth = self.kind.read(y)
        loop = self._met(x)
        loop.answer(self._numbers(x, loop))
        loop.learn(truth, loop.count - 1)

    def answer(self, x: Any) -> Answer:
        """Read a sample, whose truth comes later, and answer it, a class by the probabilities of all."""
        loop = self._met(x)
        return loop.answer(self._numbers(x, loop))

    def learn(self, truth: Truth, index: int | None = None) -> None:
        """Learn the truth of the sample `index`, counted from 0; None: of the first that waits."""
        if self.loop is None:
            raise DataError("no sample waits for a truth; answer a sample first")
        self.loop.learn(truth, index)

    def _numbers(self, x: Any, loop: Prequential) -> Any:
        if not isinstance(x, Mapping):
            return np.atleast_1d(as_numbers(x))
        known = [_number(x.get(name)) for name in self._names]
        return known + [math.nan] * (loop.inputs - len(known))

    def _met(self, x: Any) -> Prequential:
        """Return the loop, made for the first sample, with a place for each feature that has its first number."""
        if not isinstance(x, Mapping):
            if self.loop is not None:
                return self.loop
            numbers = as_numbers(x)
            if numbers.ndim > 1:
                raise DataError(f"a sample has shape {numbers.shape}, expected a number or (n,)")
            return self.begin(numbers.size)
        for name, value in x.items():
            if math.isinf(_number(value)):
                raise DataError(f"Online: feature {name!r} is {value}, expected a finite number")
        new = sorted(
            (name for name in x.keys() - set(self._names) if not math.isnan(_number(x[name]))),
            key=lambda name: (str(name), type(name).__name__),
        )
        loop = self.loop or self.begin(max(MIN_PLACES, 2 * len(new)))
        free = loop.inputs - len(self._names)
        self._names += new[:free]
        if len(new) > free and not self._full:
            self._full = True
            warnings.warn(
                f"Online: feature {new[free]!r} is not read because all {loop.inputs} places are taken, nor "
                "is any that comes later; begin with more",
                stacklevel=3,
            )
        return loop

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the scores that another learner of the same options needs to go on to the bit."""
        loop = None if self.loop is None else {"inputs": self.loop.inputs, **self.loop.state_dict()}
        return {"names": self._names, "full": self._full, "loop": loop}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned. Raises CheckpointError for a state of another form."""
        try:
            self._names, self._full, self.loop = list(state["names"]), state["full"], None
            if state["loop"] is not None:
                self.begin(state["loop"]["inputs"]).load_state_dict(state["loop"])
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"Online: the state is of another form: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write `state_dict` to a file, whole or not at all."""
        write_checkpoint(self.state_dict(), Path(path))

    def load(self, path: str | Path) -> None:
        """Go on from a file of `save`. Raises CheckpointError when it is damaged, or has another form."""
        self.load_state_dict(read_whole(Path(path), "Online.save"))

    def __getstate__(self) -> dict[str, Any]:
        """Return the options, and the state of the loop as bytes: its kernels cannot be copied."""
        torch.save(self.state_dict(), stored := io.BytesIO())
        return vars(self) | {"loop": stored.getvalue()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.load_state_dict(torch.load(io.BytesIO(state["loop"]), weights_only=True))


def progressive(stream: Iterable[tuple[Any, Truth]], learner: Any, metric: Any) -> Any:
    """Return `metric` after it has read the answer to each sample of a stream, which is given before it is learnt.

    stream: pairs of a sample and its truth.   learner: an `Online`, or an estimator of river.   metric: one of river,
    or another object with `update(truth, answer)`.
    """
    by_label = getattr(metric, "requires_labels", True)
    for x, y in stream:
        metric.update(y, learner.predict_one(x) if by_label else learner.predict_proba_one(x))
        learner.learn_one(x, y)
    return metric


def _list(rates: float | Sequence[float]) -> list[float]:
    return np.atleast_1d(rates).tolist()


def _number(value: Any) -> float:
    """Return a feature as a number; NaN for text, and for a missing one."""
    return float(value) if isinstance(value, int | float | np.number | np.bool_) else math.nan
