"""The next token at every step, by a language model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from scanl.data.base import IGNORED, Source
from scanl.data.batch import Batch
from scanl.data.questions import NextToken
from scanl.files import written_whole
from scanl.layers.base import widen
from scanl.layers.state import State
from scanl.learning.losses import losses
from scanl.learning.questions.base import Answerer, Answers, answers, mean
from scanl.learning.report import BYTES
from scanl.models import Backbone, LanguageModel

SAMPLE_BYTES = 600


@dataclass
class TokenOptions:
    """Options of a model whose answers are tokens of the input."""

    topic: ClassVar[str] = "model"  # of the help
    unless: ClassVar[str] = "the answers are not tokens of the input"

    tie_embeddings: Annotated[bool, "use one matrix for input and output"] = False


@answers(NextToken)
class NextTokenAnswerer(Answerer[NextToken]):
    """A `LanguageModel`. Every step has an answer, so none is selected: logits (N * T, V), and targets (N * T,)."""

    every_step = True
    divisible = True
    options = TokenOptions

    def head(self, stack: Backbone, options: Mapping[str, Any]) -> LanguageModel:
        return LanguageModel(self.question.inputs.size, stack, **options)

    def answers(self, model: LanguageModel, batch: Batch, state: State = None) -> Answers:
        logits, state = model(batch.inputs, state, starts=batch.starts)
        return Answers(logits.flatten(0, 1), batch.targets.flatten(), state)

    def loss(self, model: LanguageModel, batch: Batch, state: State = None) -> tuple[Tensor, State]:
        outputs, targets, state = self.answers(model, batch, state)
        known = targets != IGNORED
        parts = losses.get(self.question.loss)(widen(outputs), targets)
        return mean(torch.where(known, parts, 0), known.sum()), state

    def show(self, model: LanguageModel, source: Source, folder: Path, seed: int) -> None:
        show_bytes(model, source, folder, seed)

    def selected(self, targets: Any) -> Any:
        return targets.flatten()


def show_bytes(model: LanguageModel, source: Source, folder: Path, seed: int) -> None:
    """Write a sample of a model of bytes into the folder of a run."""
    if source.metric == BYTES:
        longest = model.stack.longest or SAMPLE_BYTES + 1
        with written_whole(folder / "sample.txt") as temporary:
            temporary.write_bytes(sample(model, min(SAMPLE_BYTES, longest - 1), seed))


def sample(model: LanguageModel, count: int, seed: int) -> bytes:
    """Generate `count` bytes from the beginning of a text: the prompt is the byte that separates files."""
    tokens = model.generate(torch.zeros(1, 1, dtype=torch.int64), max_new_tokens=count, temperature=0.8, seed=seed)
    return bytes(int(token) for token in tokens)
