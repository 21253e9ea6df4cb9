"""Animal learning: a cue, a time without anything, and then what the cue announces."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated

import numpy as np

from scanl.data.base import register
from scanl.data.questions import FeatureInputs, Numbers
from scanl.options import Fraction, Natural, Range
from scanl.tasks.stream import Sample, StreamTask

CUES, ONES = 6, 3  # bits of a pattern, and how many are 1


def _up_to(other: str) -> Range:
    return Range(f"1 to {other}={{{other}}}", lambda value, options: 1 <= value <= options[other], relation=True)


@dataclass
class Conditioning(StreamTask):
    """Trials that follow each other without end. Abstract.

    A trial begins with a cue. Between `least_wait` and `most_wait` steps later comes the event, if the cue announces
    one, and between `least_rest` and `most_rest` steps after that the next trial; both are uniform. The truth is the
    discounted sum of future events, as far as the present trial goes.

    .. math:: y_t = \\gamma^{\\tau - t - 1}

    τ is the step of the event of this trial; after it, and without one, y is 0.

    Args:
        seed, eval_examples, length: see `StreamTask`.
        least_wait, most_wait: steps from the cue to the event.
        least_rest, most_rest: steps from there to the end of the trial.
        gamma: γ.
    """

    metric = "mean squared error"

    least_wait: Annotated[int, _up_to("most_wait")] = 24
    most_wait: int = 36
    least_rest: Annotated[int, _up_to("most_rest")] = 80
    most_rest: int = 120
    gamma: Fraction = 0.9

    @abstractmethod
    def cues(self, random: np.random.Generator) -> Iterator[tuple[list[float], bool]]:
        """Yield the cue of each trial, and whether it announces the event."""

    def noise(self, random: np.random.Generator) -> list[float]:
        """Return the further inputs of a step, which mean nothing."""
        return []

    def samples(self, random: np.random.Generator) -> Iterator[Sample]:
        for cue, announces in self.cues(random):
            wait = int(random.integers(self.least_wait, self.most_wait + 1))
            steps = wait + int(random.integers(self.least_rest, self.most_rest + 1)) + 1
            for t in range(steps):
                event = float(announces and t == wait)
                truth = self.gamma ** (wait - t - 1) if announces and t < wait else 0.0
                yield [*(cue if t == 0 else [0.0] * len(cue)), event, *self.noise(random)], [truth]


@register("trace_conditioning")
@dataclass
class TraceConditioning(Conditioning):
    """Trace conditioning: how soon an event follows that a cue has announced some time ago.

    Args: see `Conditioning`.

    inputs: the cue and the event, 0 or 1.
    """

    source = (
        'Javed, White and Sutton, "Scalable Online Recurrent Learning Using Columnar Neural Networks", '
        'arXiv:2103.05787; waits and rests: Javed et al., "Online Real-Time Recurrent Learning Using Sparse '
        'Connections and Selective Learning", arXiv:2302.05326; after Rafiee et al., "From Eye-blinks to State '
        'Construction: Diagnostic Benchmarks for Online Representation Learning", Adaptive Behavior, 2022'
    )
    question = Numbers(FeatureInputs(2), 1)

    def cues(self, random: np.random.Generator) -> Iterator[tuple[list[float], bool]]:
        while True:
            yield [1.0], True


@register("trace_patterning")
@dataclass
class TracePatterning(Conditioning):
    """Trace patterning: how soon an event follows, which half of the patterns of six cues announce.

    A cue is a pattern of three ones among six bits. Of the 20 patterns 10, drawn with the stream, announce the event.
    Distractor number k is 1 with probability 1 / (10 k) at every step.

    Args:
        distractors: how many.
        The others: see `Conditioning`.

    inputs: the six cues, the event, and the distractors, 0 or 1.
    """

    source = TraceConditioning.source
    question = Numbers(FeatureInputs(CUES + 1 + 5), 1)

    distractors: Natural = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.question = Numbers(FeatureInputs(CUES + 1 + self.distractors), 1)

    def cues(self, random: np.random.Generator) -> Iterator[tuple[list[float], bool]]:
        patterns = [[float(i in ones) for i in range(CUES)] for ones in combinations(range(CUES), ONES)]
        announcing = set(random.permutation(len(patterns))[: len(patterns) // 2].tolist())
        while True:
            chosen = int(random.integers(len(patterns)))
            yield patterns[chosen], chosen in announcing

    def noise(self, random: np.random.Generator) -> list[float]:
        draws = random.random(self.distractors)
        return [float(draw * 10 * k < 1) for k, draw in enumerate(draws, 1)]
