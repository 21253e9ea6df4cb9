"""The inputs of a model, as values: tokens, features, or the channels of a series."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from scanl.models.saving import ModelPart
from scanl.options import WORDS, ConfiguredMeta, at_least

Scales = Sequence[Sequence[float]]  # (location, scale) of each channel


@dataclass(frozen=True)
class Tokens(ModelPart, metaclass=ConfiguredMeta):
    """Tokens (B, T) of any integer dtype, which are embedded."""

    vocab_size: Annotated[int, at_least(1), "V, number of different tokens"]


@dataclass(frozen=True)
class Features(ModelPart, metaclass=ConfiguredMeta):
    """Features (B, T, C), which pass through a linear map."""

    channels: Annotated[int, at_least(1), "C"]
    scales: Annotated[
        Scales | None,
        "(location, scale) of each feature, by which it is standardised first; None if the features are standardised",
    ] = None
    missing: Annotated[bool, "whether NaN in a feature means that it is missing"] = False


@dataclass(frozen=True)
class Channels(ModelPart, metaclass=ConfiguredMeta):
    """Numbers of channels of the series that a forecaster reads."""

    target: Annotated[int, at_least(1), "C, series that are forecast together"] = 1
    past: Annotated[int, at_least(0), "covariates that are known up to the present"] = 0
    static: Annotated[int, at_least(0), "S, covariates that are constant over a series"] = 0
    future: Annotated[int, at_least(0), "F, covariates that are known as far ahead as the forecast"] = 0
    timed: Annotated[
        bool,
        "whether the steps have durations, `timespans`. The durations are an input, and so is the time until each step "
        "ahead. If all layers take durations, the layers get them too",
    ] = False
    scales: Annotated[
        Scales | None,
        "(location, scale) of the target, the past, the static and the future channels, in this order, measured on "
        "the training data; None: 0 and 1",
    ] = None


WORDS |= {
    Tokens: "Tokens(vocab_size)",
    Features: "Features(channels)",
    Channels: "Channels(target=1, past=3)",
}
