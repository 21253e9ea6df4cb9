"""The class of a whole sequence, by a classifier."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scanl.data.base import Source
from scanl.data.batch import Batch
from scanl.data.questions import Class
from scanl.layers.state import State
from scanl.learning.questions.base import Answerer, Answers, FilterOptions, answers, durations, filters_of, form
from scanl.learning.series.readouts import ClassReadout
from scanl.models import Backbone, SequenceClassifier


@answers(Class)
class ClassAnswerer(Answerer[Class]):
    """A `SequenceClassifier`: logits (N, classes), and targets (N,)."""

    options = FilterOptions

    def head(self, stack: Backbone, options: Mapping[str, Any]) -> SequenceClassifier:
        classes, inputs = self.question.classes, self.question.inputs
        return SequenceClassifier(classes, stack, form(inputs), filters=filters_of(options, classes, inputs))

    def readout(self) -> ClassReadout:
        return ClassReadout(self.question.classes)

    def answers(self, model: SequenceClassifier, batch: Batch, state: State = None) -> Answers:
        logits, state = model(batch.inputs, state, mask=batch.mask, timespans=durations(model, batch))
        return Answers(logits, batch.targets, state)

    def show(self, model: SequenceClassifier, source: Source, folder: Path, seed: int) -> None:
        from scanl.learning.run.picture import save_classes

        save_classes(folder / "classes.png", source, model)
