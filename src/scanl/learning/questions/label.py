"""Classes of some steps of features, by a labeler."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from scanl.data.base import IGNORED
from scanl.data.batch import Batch
from scanl.data.questions import Label
from scanl.layers.base import widen
from scanl.layers.state import State
from scanl.learning.losses import losses
from scanl.learning.questions.base import Answerer, Answers, answers, durations, form, mean
from scanl.models import Backbone, SequenceLabeler


@answers(Label)
class LabelAnswerer(Answerer[Label]):
    """A `SequenceLabeler`: logits (n, classes) at the n steps that have an answer, and targets (n,)."""

    every_step = True

    def head(self, stack: Backbone, options: Mapping[str, Any]) -> SequenceLabeler:
        return SequenceLabeler(self.question.classes, stack, form(self.question.inputs))

    def answers(self, model: SequenceLabeler, batch: Batch, state: State = None) -> Answers:
        logits, state = model(batch.inputs, state, mask=batch.mask, timespans=durations(model, batch))
        return Answers(logits[batch.targets != IGNORED], self.selected(batch.targets), state)

    def predicted(self, model: SequenceLabeler, batch: Batch, outputs: Tensor, levels: Tensor) -> Tensor:
        return super().predicted(model, batch, outputs[batch.targets != IGNORED], levels)

    def loss(self, model: SequenceLabeler, batch: Batch, state: State = None) -> tuple[Tensor, State]:
        logits, state = model(batch.inputs, state, mask=batch.mask, timespans=durations(model, batch))
        # As for numbers, the steps that have an answer are not selected.
        known = batch.targets != IGNORED
        parts = losses.get(self.question.loss)(
            widen(logits).flatten(0, -2), torch.where(known, batch.targets, 0).flatten()
        )
        return mean(torch.where(known.flatten(), parts, 0), known.sum()), state

    def selected(self, targets: Any) -> Any:
        return targets[targets != IGNORED]
