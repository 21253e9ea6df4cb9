"""Numbers at every step, by a labeler."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.data.questions import Numbers
from scanl.layers.base import widen
from scanl.layers.state import State
from scanl.learning.losses import losses
from scanl.learning.questions.base import Answerer, Answers, answers, durations, form, mean
from scanl.models import Backbone, SequenceLabeler


@answers(Numbers)
class NumbersAnswerer(Answerer[Numbers]):
    """A `SequenceLabeler` with an output for each number: the outputs at the n targets, (n,), and the targets (n,)."""

    every_step = True

    def head(self, stack: Backbone, options: Mapping[str, Any]) -> SequenceLabeler:
        return SequenceLabeler(self.question.count, stack, form(self.question.inputs))

    def answers(self, model: SequenceLabeler, batch: Batch, state: State = None) -> Answers:
        outputs, state = model(batch.inputs, state, mask=batch.mask, timespans=durations(model, batch))
        return Answers(outputs[batch.targets.isfinite()], self.selected(batch.targets), state)

    def selected(self, targets: Any) -> Any:
        return targets[targets.isfinite()]

    def loss(self, model: SequenceLabeler, batch: Batch, state: State = None) -> tuple[Tensor, State]:
        outputs, state = model(batch.inputs, state, mask=batch.mask, timespans=durations(model, batch))
        # The numbers that are known are not selected: their count would be needed before the operations are known.
        wide, known = widen(outputs), batch.targets.isfinite()
        parts = losses.get(self.question.loss)(wide, torch.where(known, batch.targets, 0).to(wide))
        return mean(torch.where(known, parts, 0), known.sum()), state
