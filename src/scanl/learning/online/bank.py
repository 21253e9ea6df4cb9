"""Several learning rates side by side on one stream: the best so far answers."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from scanl.errors import DivergenceError
from scanl.learning.online.learner import Learner


class Bank:
    r"""Learners that all read and learn the same samples. The one with the least fading error answers.

    .. math:: M_t = (e_t + \alpha S_{t-1}) / (1 + \alpha N_{t-1})

    S and N are the sums of the errors e and of their weights; M is their quotient. Before the first error, and among
    equals, the first learner answers.

    Source: Gama, Sebastião and Rodrigues, "On Evaluating Stream Learning Algorithms", Machine Learning 90(3), 2013,
    eq. (4).
    """

    def __init__(self, learners: Sequence[Learner], fade: float) -> None:
        self.learners, self.fade = list(learners), fade
        self.sums = [0.0] * len(self.learners)

    @property
    def best(self) -> int:
        """Index of the learner that answers. All have the same N, so the sums are compared."""
        return min(range(len(self.sums)), key=self.sums.__getitem__)

    def answer(self, x: Tensor) -> list[Tensor]:
        """Read one step, and return the outputs of each learner.

        A learner whose outputs are not finite answers no more. Raises DivergenceError when none is left.
        """
        outputs = [learner.answer(x) for learner in self.learners]
        for i, output in enumerate(outputs):
            if not all(map(math.isfinite, output.flatten().tolist())):
                self._retire(i, DivergenceError("the outputs are not finite; try a smaller rate"))
        return outputs

    def peek(self, x: Tensor) -> Tensor:
        """Return the outputs of the best learner for one step, and change nothing."""
        return self.learners[self.best].peek(x)

    def _retire(self, i: int, error: DivergenceError) -> None:
        self.sums[i] = math.inf
        if all(map(math.isinf, self.sums)):
            raise error

    def judge(self, errors: Sequence[float]) -> None:
        """Read the error of each learner's answer to one sample."""
        self.sums = [
            total if math.isinf(total) else error + self.fade * total
            for error, total in zip(errors, self.sums, strict=True)
        ]

    def learn(self, x: Tensor, target: Tensor, *, answered: bool) -> None:
        """Let every learner read a step again with its target, see `Learner.learn`.

        A learner that diverges answers no more. Raises DivergenceError when none is left.
        """
        for i, learner in enumerate(self.learners):
            if math.isfinite(self.sums[i]):
                try:
                    learner.learn(x, target, answered=answered)
                except DivergenceError as error:
                    self._retire(i, error)

    def state_dict(self) -> dict[str, Any]:
        """Return the learners' states and their errors."""
        return {"sums": self.sums, "learners": [learner.state_dict() for learner in self.learners]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.sums = list(state["sums"])
        for learner, stored in zip(self.learners, state["learners"], strict=True):
            learner.load_state_dict(stored)
