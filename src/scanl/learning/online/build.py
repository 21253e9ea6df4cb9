"""Make a prequential loop from options."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from scanl.data.batch import Batch
from scanl.learning.algorithms import algorithms
from scanl.learning.online.answers import Answering
from scanl.learning.online.bank import Bank
from scanl.learning.online.learner import Learner
from scanl.learning.online.prequential import Prequential, Scorer
from scanl.learning.optimizers import OPTIMIZERS
from scanl.learning.questions import answerer
from scanl.learning.run.config import make_stack

SPAN = 10_000  # numbers after which the past fades in the running means
FADE = 0.999  # of the errors
COMPILE_AFTER = 2000  # samples, which take about as long as compiling


def make_loop(
    kind: Answering,
    inputs: int,
    stack: Any,
    *,
    algorithm: str,
    algorithm_options: Mapping[str, Any] = MappingProxyType({}),
    optimizer: str = "adamw",
    lr: Sequence[float],
    weight_decay: float = 0.0,
    clip: float = 1.0,
    block: int = 1,
    compile_after: int | None = COMPILE_AFTER,
    span: int = SPAN,
    fade: float = FADE,
    waiting: int = 1000,
    seed: int = 0,
    scores: Scorer | None = None,
) -> Prequential:
    """Make the loop of a model over `stack`, a `StackConfig`, with a learner for each rate in `lr`.

    All learners begin with the same weights. The other arguments are options of `scanl learn`. Raises ConfigError for
    options that do not fit.
    """
    task = answerer(kind.question(inputs + kind.width))
    learners = []
    for rate in lr:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = task.model(make_stack(stack))
        chosen = algorithms.get(algorithm)(task.loss, **algorithm_options)
        first = Batch(torch.zeros(1, block, inputs + kind.width), kind.none().repeat_interleave(block, 1))
        chosen.check(model, first)
        steps = OPTIMIZERS[optimizer](model, rate, weight_decay)
        learners.append(Learner(model, chosen, steps, block, clip, compile_after))
    return Prequential(Bank(learners, fade), kind, inputs, span, waiting, scores)
