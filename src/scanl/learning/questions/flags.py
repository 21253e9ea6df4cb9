"""Answers of yes and no at every step, by a labeler."""

from typing import Any

from scanl.data.batch import Batch
from scanl.data.questions import Flags
from scanl.layers.state import State
from scanl.learning.questions.base import Answers, answers, durations
from scanl.learning.questions.numbers import NumbersAnswerer
from scanl.models import SequenceLabeler


@answers(Flags)
class FlagsAnswerer(NumbersAnswerer):
    """Logits (n, C) of the n steps with an answer, and the targets there (n, C), NaN where one is not known."""

    def answers(self, model: SequenceLabeler, batch: Batch, state: State = None) -> Answers:
        outputs, state = model(batch.inputs, state, mask=batch.mask, timespans=durations(model, batch))
        return Answers(outputs[batch.targets.isfinite().any(-1)], self.selected(batch.targets), state)

    def selected(self, targets: Any) -> Any:
        return targets[targets.isfinite().any(-1)]
