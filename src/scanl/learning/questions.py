"""Choose the model, the answers and the loss for a source's question."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from scanl.data.base import IGNORED, Question
from scanl.errors import ConfigError
from scanl.layers.base import widen
from scanl.layers.state import State
from scanl.models import LanguageModel, SequenceClassifier

Model = LanguageModel | SequenceClassifier


def model_for(question: Question, options: Mapping[str, Any]) -> Model:
    """Make a language model for answers at every step, or a classifier for one answer to the whole sequence.

    For a number, the classifier has one logit and reads the last step.
    """
    if question.kind == "numbers":
        raise ConfigError("train: no model gives numbers at every step yet; `generate` and `solve` of the task work")
    if question.every_step:
        if question.vocab_size is None:
            raise ConfigError(f"train: no model gives a {question.kind} at every step of features yet; give tokens")
        return LanguageModel(question.vocab_size, **options)
    given = dict(options)
    if given.pop("tie_embeddings"):
        raise ConfigError(
            "train: tie_embeddings is True, but the answers are no tokens of the input; leave out --tie-embeddings"
        )
    reads = {"vocab_size": question.vocab_size, "input_dim": question.channels}
    if question.kind == "number":
        return SequenceClassifier(1, pool="last", **reads, **given)
    assert question.classes is not None
    return SequenceClassifier(question.classes, **reads, **given)


def answer(
    question: Question, model: Model, inputs: Tensor, targets: Tensor, state: State = None
) -> tuple[Tensor, Tensor, State]:
    """Run the model and return its outputs where an answer is wanted, the targets there, and the state.

    For answers at steps: logits (n, V) and tokens (n,). For a class: logits (B, C) and classes (B,). For a number:
    numbers (B,) and numbers (B,).
    """
    if isinstance(model, LanguageModel):
        if question.kind == "next token":  # every step has an answer, so no step is selected
            logits, state = model(inputs, state)
            return logits.flatten(0, 1), targets.flatten(), state
        asked = targets != IGNORED
        logits, state = model.logits_at(inputs, asked, state)
        return logits, targets[asked], state
    timespans = inputs[..., -1] if question.timed and model.stack.timed else None
    mask = present(inputs) if question.padded else None
    outputs, state = model(inputs, state, mask=mask, timespans=timespans)
    return (outputs[:, 0] if question.kind == "number" else outputs), targets, state


def present(inputs: Tensor) -> Tensor:
    """Return which steps of a padded batch are of its sequences: (B, T) bool."""
    return ~inputs.isnan().all(-1) if inputs.is_floating_point() else inputs != IGNORED


def loss(question: Question, model: Model, inputs: Tensor, targets: Tensor, state: State) -> tuple[Tensor, State]:
    """Return the mean loss and the state. The loss is cross entropy, or the squared error for numbers."""
    outputs, targets, state = answer(question, model, inputs, targets, state)
    measure = F.mse_loss if question.kind == "number" else F.cross_entropy
    return measure(widen(outputs), targets), state
