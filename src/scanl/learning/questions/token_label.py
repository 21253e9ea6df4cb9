"""Tokens at some steps of tokens, by a language model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scanl.data.base import IGNORED, Source
from scanl.data.batch import Batch
from scanl.data.questions import TokenLabel
from scanl.layers.state import State
from scanl.learning.questions.base import Answerer, Answers, answers
from scanl.learning.questions.next_token import TokenOptions, show_bytes
from scanl.models import Backbone, LanguageModel


@answers(TokenLabel)
class TokenLabelAnswerer(Answerer[TokenLabel]):
    """A `LanguageModel`, with logits at the n steps alone that have an answer: (n, V), and targets (n,)."""

    every_step = True
    options = TokenOptions

    def head(self, stack: Backbone, options: Mapping[str, Any]) -> LanguageModel:
        return LanguageModel(self.question.inputs.size, stack, **options)

    def answers(self, model: LanguageModel, batch: Batch, state: State = None) -> Answers:
        logits, state = model.logits_at(batch.inputs, batch.targets != IGNORED, state)
        return Answers(logits, self.selected(batch.targets), state)

    def show(self, model: LanguageModel, source: Source, folder: Path, seed: int) -> None:
        show_bytes(model, source, folder, seed)

    def selected(self, targets: Any) -> Any:
        return targets[targets != IGNORED]
