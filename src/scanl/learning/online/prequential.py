"""The prequential loop: read a sample, answer it, score the answer once the truth is known, and then learn from it."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from scanl.data.base import IGNORED
from scanl.errors import DataError
from scanl.learning.online.answers import Answer, Answering, Frame, Truth, as_tensor
from scanl.learning.online.bank import Bank
from scanl.learning.online.scaling import Scaling, Values

Inputs = Iterable[float]


class Scorer(Protocol):
    """A reader of the scored answers, such as `scanl.learning.online.scores.Scores`."""

    def update(self, truth: Any, answer: Any, naive: Any, error: float) -> None: ...


@dataclass(slots=True)
class Sample:
    """A sample between its answer and the learning pass.

    answers: of each learner of the bank.   target: None until the truth is known.
    """

    index: int
    x: Tensor
    answers: list[Answer]
    best: int
    frame: Frame
    target: Tensor | None = None


class Prequential:
    """A model on a stream without end, in constant memory: `answer` and then `learn`, for each sample.

    The numbers of a sample are standardised by the running mean and variance of the samples before it (`Scaling`),
    which take it in once it is read; a target is by `Innovation`. A missing input is NaN. Samples are learnt in their
    order. While a truth is not known the sample waits; the pass that learns stands there, and the pass that answers
    goes on. If more than `waiting` samples wait, the first of them is read without a target.

    bank: of models that read `inputs` numbers and the last truth.   kind: numbers or a class.   scores: read each
    answer with its truth; None for none.   span: see `Scaling`.
    """

    def __init__(
        self, bank: Bank, kind: Answering, inputs: int, span: int, waiting: int = 1000, scores: Scorer | None = None
    ) -> None:
        self.bank, self.kind, self.inputs, self.scores, self.waiting = bank, kind, inputs, scores, waiting
        self.scaling = Scaling(inputs, span)
        self.count = 0  # samples that were answered
        self.given_up = 0  # samples whose truth never came
        self.queue: deque[Sample] = deque()

    def answer(self, inputs: Inputs) -> Answer:
        """Read a sample and answer it. Raises DataError for inputs of another number, before anything changes."""
        numbers, x, frame = self._read(inputs)
        self.scaling.update(numbers)
        answers = [self.kind.answer(outputs, frame) for outputs in self.bank.answer(x)]
        sample = Sample(self.count, x, answers, self.bank.best, frame)
        self.queue.append(sample)
        self.count += 1
        if len(self.queue) > self.waiting and self.queue[0].target is None:
            self.given_up += 1
            self._pass(self.queue.popleft())
            self._advance()
        return answers[sample.best]

    def _read(self, inputs: Inputs) -> tuple[Values, Tensor, Frame]:
        """Return the numbers of a sample, how the model reads them, and what is known before its answer."""
        numbers = as_numbers(inputs)
        if numbers.shape != self.scaling.mean.shape:
            raise DataError(f"a sample has shape {numbers.shape}, expected {self.scaling.mean.shape}")
        scaled = self.scaling.scaled(numbers)
        if self.kind.width:
            scaled = np.concatenate([scaled, self.kind.truths.as_input()])
        return numbers, as_tensor(scaled), self.kind.truths.frame()

    def peek(self, inputs: Inputs) -> Answer:
        """Return what `answer` would, and change nothing."""
        _, x, frame = self._read(inputs)
        return self.kind.answer(self.bank.peek(x), frame)

    def learn(self, truth: Truth, index: int | None = None) -> None:
        """Read the truth of a sample, score its answer, and learn from all samples up to the first that still waits.

        index: of the sample, counted from 0; None for the first that waits for its truth. Raises DataError, before
        anything changes, for a truth of another kind, and when no sample waits for it.
        """
        sample = self._waiting(index)
        target = self.kind.read(truth)
        errors = [self.kind.error(target, answer) for answer in sample.answers]
        if self.scores is not None:
            best = sample.best
            self.scores.update(target, sample.answers[best], sample.frame.naive, errors[best])
        self.bank.judge(errors)
        sample.target = self.kind.truths.target(target, sample.frame)
        self._advance()

    def skip(self, index: int | None = None) -> None:
        """Let a sample be read without a target: its truth never comes. index: as in `learn`."""
        self._waiting(index).target = self.kind.none
        self._advance()

    def _waiting(self, index: int | None) -> Sample:
        for sample in self.queue:
            if sample.target is None and index in (None, sample.index):
                return sample
        what = "no sample waits for a truth" if index is None else f"sample {index} waits for no truth"
        raise DataError(f"{what}; answer a sample first")

    def _advance(self) -> None:
        while self.queue and self.queue[0].target is not None:
            self._pass(self.queue.popleft())

    def _pass(self, sample: Sample) -> None:
        target = self.kind.none if sample.target is None else sample.target
        numbers = target.numpy()
        answered = bool(((numbers == numbers) & (numbers != IGNORED)).all())  # a NaN is not equal to itself
        self.bank.learn(sample.x, target, answered=answered)

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the scores that another loop of the same form needs to go on to the bit."""
        return {
            "bank": self.bank.state_dict(),
            "kind": self.kind.truths.state_dict(),
            "scaling": self.scaling.state_dict(),
            "count": self.count,
            "given_up": self.given_up,
            "queue": [
                [sample.index, sample.x, sample.answers, sample.best, list(sample.frame), sample.target]
                for sample in self.queue
            ],
            "random": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned. Raises CheckpointError for a state of another form."""
        self.bank.load_state_dict(state["bank"])
        self.kind.truths.load_state_dict(state["kind"])
        self.scaling.load_state_dict(state["scaling"])
        self.count, self.given_up = state["count"], state["given_up"]
        self.queue = deque(
            Sample(index, x.clone(), answers, best, Frame(*frame), target)
            for index, x, answers, best, frame, target in state["queue"]
        )
        torch.set_rng_state(state["random"])


def as_numbers(inputs: Inputs) -> Values:
    """Return a sample as numbers, NaN where one is missing. Raises DataError for text and for infinity."""
    try:
        numbers = np.asarray(inputs, np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"a sample is {inputs!r}, expected numbers") from error
    if np.isinf(numbers).any():
        raise DataError(f"a sample has {numbers[np.isinf(numbers)][0]}, expected finite numbers")
    return numbers
