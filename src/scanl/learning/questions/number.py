"""A number of a whole sequence, by a regressor that reads the last step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.data.questions import Number
from scanl.layers.state import State
from scanl.learning.descent import descend
from scanl.learning.questions.base import Answerer, Answers, FilterOptions, answers, durations, filters_of, form, mean
from scanl.learning.series.readouts import NumberReadout
from scanl.models import Backbone, SequenceRegressor
from scanl.models.heads.distributions import HEADS

REST_STEPS, REST_LR = 300, 0.03  # by which the distribution of errors is learnt: two numbers, or eleven


@answers(Number)
class NumberAnswerer(Answerer[Number]):
    """A `SequenceRegressor`, whose head has the loss: means (N,) of the distributions, and targets (N,)."""

    options = FilterOptions

    def head(self, stack: Backbone, options: Mapping[str, Any]) -> SequenceRegressor:
        scales, inputs = None if self.question.scale is None else [list(self.question.scale)], self.question.inputs
        return SequenceRegressor(
            1,
            stack,
            form(inputs),
            distribution=self.question.distribution,
            output_scales=scales,
            filters=filters_of(options, 1, inputs),
        )

    def readout(self) -> NumberReadout | None:
        if HEADS[self.question.distribution].counts:
            return None
        return NumberReadout(torch.tensor([self.question.scale or (0.0, 1.0)], dtype=torch.float64))

    def rest(self, model: SequenceRegressor, targets: Tensor, beside: Tensor) -> None:
        """Let the head alone say how far the numbers lie from the filters' answers: the same for all series."""
        super().rest(model, targets, beside)
        head, nothing = model.head, torch.zeros(len(targets), model.stack.dim)
        numbers, shift = model.answer(targets[:, None]), model.answer(beside)
        optimizer = torch.optim.Adam([head.bias], REST_LR)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, REST_STEPS)
        descend([head.bias], optimizer, schedule, REST_STEPS, lambda _: head.loss(head(nothing, shift), numbers).mean())

    def answers(self, model: SequenceRegressor, batch: Batch, state: State = None) -> Answers:
        parameters, state = model(batch.inputs, state, mask=batch.mask, timespans=durations(model, batch))
        return Answers(model.head.mean(parameters)[:, 0], batch.targets, state)

    def predicted(self, model: SequenceRegressor, batch: Batch, outputs: Tensor, levels: Tensor) -> Tensor:
        mean, quantiles = model.head.mean(outputs)[:, :1], model.head.quantiles(outputs, levels)[:, 0]
        return torch.cat([mean, quantiles], 1)

    def loss(self, model: SequenceRegressor, batch: Batch, state: State = None) -> tuple[Tensor, State]:
        options = {"mask": batch.mask, "timespans": durations(model, batch), "weights": batch.weights}
        loss, state = model.loss(batch.inputs, batch.targets[:, None], state, **options)
        if batch.weights is None:
            return loss, state
        return mean(loss * batch.size, (batch.weights > 0).sum()), state
