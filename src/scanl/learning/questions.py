"""Choose the model, the answers and the loss for a source's question."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from scanl.data.base import IGNORED, LEVELS, Question
from scanl.errors import ConfigError
from scanl.layers.base import widen
from scanl.layers.state import State
from scanl.models import (
    Backbone,
    Channels,
    Features,
    Forecaster,
    LanguageModel,
    Normalization,
    SequenceClassifier,
    SequenceLabeller,
    SequenceRegressor,
    Tokens,
)

Model = LanguageModel | SequenceClassifier | SequenceRegressor | SequenceLabeller | Forecaster

FORECASTER = {"recursive": False, "lags": None, "span": None}  # options of a forecaster alone


def model_for(question: Question, stack: Backbone, options: Mapping[str, Any]) -> Model:
    """Make the model that answers a question, over a stack.

    It is a language model for tokens at every step; a labeller for classes or numbers at steps of features; a
    classifier or a regressor for one answer to the whole sequence; and a forecaster for a horizon. For a number, the
    regressor reads the last step. Raises ConfigError for an option that the model does not have.
    """
    own = {name: options.get(name, default) for name, default in FORECASTER.items()}
    tied = options.get("tie_embeddings", False)
    if question.kind != "horizon":
        for name, value in own.items():
            if value != FORECASTER[name]:
                raise ConfigError(
                    f"train: {name} is {value}, but the question of the data is not a forecast; leave out "
                    f"--{name.replace('_', '-')}"
                )
    if question.every_step and question.vocab_size is not None:
        return LanguageModel(question.vocab_size, stack, tie_embeddings=tied)
    if tied:
        raise ConfigError(
            "train: tie_embeddings is True, but the answers are not tokens of the input; leave out --tie-embeddings"
        )
    if question.kind == "horizon":
        return _forecaster(question, stack, own)
    if question.vocab_size is not None:
        inputs = Tokens(question.vocab_size)
    else:
        assert question.channels is not None
        scales = None if question.scales is None else [list(pair) for pair in question.scales]
        inputs = Features(question.channels, scales, question.missing)
    if question.kind == "number":
        answers = None if question.answer_scale is None else [list(question.answer_scale)]
        return SequenceRegressor(1, stack, inputs, distribution=question.distribution, output_scales=answers)
    if question.kind == "numbers":
        return SequenceLabeller(question.targets, stack, inputs)
    assert question.classes is not None
    kind = SequenceLabeller if question.kind == "label" else SequenceClassifier
    return kind(question.classes, stack, inputs)


def _forecaster(question: Question, stack: Backbone, options: Mapping[str, Any]) -> Forecaster:
    assert question.horizon is not None
    assert question.channels is not None
    once = question.channels - question.future * question.horizon - question.timed
    scales = None
    if question.scales is not None:  # those of the covariates that are known ahead are the same for each of the steps
        scales = [list(pair) for pair in question.scales[: once + question.future]]
    past = once - question.targets - question.static
    channels = Channels(question.targets, past, question.static, question.future, question.timed, scales)
    return Forecaster(
        question.horizon,
        stack,
        channels,
        distribution=question.distribution,
        recursive=options["recursive"],
        lags=question.season if options["lags"] is None else options["lags"],
        normalization=Normalization(options["span"]),
    )


def answer(
    question: Question, model: Model, inputs: Tensor, targets: Tensor, state: State = None
) -> tuple[Tensor, Tensor, State]:
    """Run the model and return its outputs where an answer is wanted, the targets there, and the state.

    Outputs and targets are: for tokens or classes at steps, logits (n, V) and (n,); for one class, logits (B, C) and
    classes (B,); for one number, (B,) and (B,); for numbers at steps, the n wanted ones, (n,) and (n,); for a horizon,
    the quantiles (B, H, C, Q) at `LEVELS` of the forecast after the last step, and the targets as they are.
    """
    if isinstance(model, LanguageModel):
        if question.kind == "next token":  # every step has an answer, so no step is selected
            logits, state = model(inputs, state)
            return logits.flatten(0, 1), targets.flatten(), state
        asked = targets != IGNORED
        logits, state = model.logits_at(inputs, asked, state)
        return logits, targets[asked], state
    if isinstance(model, Forecaster):
        x, more = parts(model, inputs)
        forecast, state = model.predict(x, state, levels=LEVELS, **more)
        return forecast.quantiles, targets, state
    mask = present(inputs) if question.padded else None
    outputs, state = model(inputs, state, mask=mask, timespans=_durations(question, model, inputs))
    if isinstance(model, SequenceLabeller):
        asked = targets.isfinite() if question.kind == "numbers" else targets != IGNORED
        return outputs[asked], targets[asked], state
    return (model.head.mean(outputs)[:, 0] if isinstance(model, SequenceRegressor) else outputs), targets, state


def present(inputs: Tensor) -> Tensor:
    """Return a mask (B, T) that is True at the steps of a padded batch that are not padding."""
    return ~inputs.isnan().all(-1) if inputs.is_floating_point() else inputs != IGNORED


def loss(question: Question, model: Model, inputs: Tensor, targets: Tensor, state: State) -> tuple[Tensor, State]:
    """Return the mean loss and the state; without an answer in the batch the loss is 0.

    For tokens, classes and bernoulli numbers the loss is the cross entropy. For other numbers the head defines it.
    """
    if isinstance(model, Forecaster):
        x, more = parts(model, inputs)
        return model.loss(x, targets, state, **more)
    if isinstance(model, SequenceRegressor):
        return model.loss(inputs, targets[:, None], state, timespans=_durations(question, model, inputs))
    outputs, targets, state = answer(question, model, inputs, targets, state)
    wide = widen(outputs)
    if question.kind != "numbers":
        total, count = F.cross_entropy(wide, targets, reduction="sum"), (targets != IGNORED).sum()
    else:
        error = F.binary_cross_entropy_with_logits if question.distribution == "bernoulli" else F.mse_loss
        total, count = error(wide, targets.to(wide), reduction="sum"), targets.new_tensor(targets.numel())
    return total / count.clamp(min=1), state


def _durations(question: Question, model: Model, inputs: Tensor) -> Tensor | None:
    """Return the durations of the steps for layers that take them, if all do."""
    return inputs[..., -1] if question.timed and model.stack.timed else None


def parts(model: Forecaster, inputs: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Cut the channels of the inputs as `Question` lays them out: the channels that are read now, and the others by
    name."""
    sizes = [model.targets + model.past, model.static, model.future * model.horizon, int(model.timed)]
    x, static, future, spans = inputs.split(sizes, -1)
    more: dict[str, Any] = {}
    if model.static:
        more["static"] = static[:, -1]
    if model.future:
        more["future"] = future.unflatten(-1, (model.horizon, model.future))
    if model.timed:
        more["timespans"] = spans[..., 0]
    return x, more
