"""Train a model of the library in memory: what several benchmarks of learning share."""

import time

from torch import Tensor

from scanl.data.base import Source
from scanl.learning import TrainConfig
from scanl.learning.descent import optimize
from scanl.learning.questions import Model, answerer


def learn(model: Model, *stages: tuple[Source, TrainConfig]) -> float:
    """Train the model in place for the steps of one configuration after the other, and return the minutes.

    The learning rate, its schedule over all steps and the seed are those of the last configuration.
    """
    sizes = [(source, config.source.batch_size) for source, config in stages for _ in range(_steps(config))]
    last = stages[-1][1]

    def once(step: int) -> Tensor:
        source, size = sizes[step]
        return answerer(source.question).loss(model, source.batch(step, size).tensors())[0]

    begin = time.perf_counter()
    optimize(model, len(sizes), last.training.lr, last.run.seed, once)
    return (time.perf_counter() - begin) / 60


def _steps(config: TrainConfig) -> int:
    assert config.training.steps is not None
    return config.training.steps
