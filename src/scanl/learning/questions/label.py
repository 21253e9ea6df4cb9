"""Classes of some steps of features, by a labeler."""

from collections.abc import Mapping
from typing import Any

from scanl.data.base import IGNORED
from scanl.data.batch import Batch
from scanl.data.questions import Label
from scanl.layers.state import State
from scanl.learning.questions.base import Answerer, Answers, answers, durations, form
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

    def selected(self, targets: Any) -> Any:
        return targets[targets != IGNORED]
