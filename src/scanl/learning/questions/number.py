"""A number of a whole sequence, by a regressor that reads the last step."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from scanl.data.batch import Batch
from scanl.data.questions import Number
from scanl.layers.state import State
from scanl.learning.questions.base import Answerer, Answers, answers, durations, form, mean
from scanl.models import Backbone, SequenceRegressor


@answers(Number)
class NumberAnswerer(Answerer[Number]):
    """A `SequenceRegressor`, whose head has the loss: means (N,) of the distributions, and targets (N,)."""

    def head(self, stack: Backbone, options: Mapping[str, Any]) -> SequenceRegressor:
        scales = None if self.question.scale is None else [list(self.question.scale)]
        return SequenceRegressor(
            1, stack, form(self.question.inputs), distribution=self.question.distribution, output_scales=scales
        )

    def answers(self, model: SequenceRegressor, batch: Batch, state: State = None) -> Answers:
        parameters, state = model(batch.inputs, state, mask=batch.mask, timespans=durations(model, batch))
        return Answers(model.head.mean(parameters)[:, 0], batch.targets, state)

    def loss(self, model: SequenceRegressor, batch: Batch, state: State = None) -> tuple[Tensor, State]:
        options = {"mask": batch.mask, "timespans": durations(model, batch), "weights": batch.weights}
        loss, state = model.loss(batch.inputs, batch.targets[:, None], state, **options)
        if batch.weights is None:
            return loss, state
        return mean(loss * batch.size, (batch.weights > 0).sum()), state
