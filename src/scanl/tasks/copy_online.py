"""The copy task as a stream: pattern after pattern, without a reset between them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from scanl.data.base import IGNORED, register
from scanl.data.questions import FeatureInputs, Label
from scanl.options import Natural, Positive, at_least
from scanl.tasks.stream import Sample, StreamTask


@register("copy_online")
@dataclass
class CopyOnline(StreamTask):
    """Copy online: the symbols of a pattern after a delay, one pattern after the other without a reset.

    A pattern of `pattern` symbols is shown, then `delay` steps without any, then a mark, and then `pattern` steps
    without any, at which the symbols are to be repeated in their order.

    Differs from the paper: there a step has seven random bits, and the state is reset before each
    pattern; here a step has one of `symbols` symbols, so that chance is known, and nothing is reset.

    Args:
        seed, eval_examples, length: see `StreamTask`.
        pattern: symbols of a pattern.
        delay: steps between the pattern and the mark.
        symbols: number of different symbols.

    inputs: one-hot symbols, and the mark.
    """

    source = (
        'Zucchet, Meier, Schug, Mujika and Sacramento, "Online Learning of Long-Range Dependencies", arXiv:2305.15947, '
        "section 5.1"
    )
    metric = "accuracy"
    question = Label(FeatureInputs(9), 8)

    pattern: Positive = 10
    delay: Natural = 7
    symbols: Annotated[int, at_least(2)] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self.question = Label(FeatureInputs(self.symbols + 1), self.symbols)
        self.chance = 1 / self.symbols

    def samples(self, random: np.random.Generator) -> Iterator[Sample]:
        shown = np.eye(self.symbols + 1).tolist()
        empty, mark = [0.0] * (self.symbols + 1), shown[-1]
        while True:
            drawn = random.integers(self.symbols, size=self.pattern).tolist()
            yield from ((shown[symbol], IGNORED) for symbol in drawn)
            yield from ((step, IGNORED) for step in [empty] * self.delay + [mark])
            yield from ((empty, symbol) for symbol in drawn)
