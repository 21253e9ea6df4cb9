"""What a model reads, as values: tokens, features, or the channels of a series."""

from collections.abc import Sequence
from dataclasses import dataclass

from scanl.errors import ConfigError
from scanl.models.saving import Options

Scales = Sequence[Sequence[float]]  # (location, scale) of each channel


@dataclass(frozen=True)
class Tokens(Options):
    """Tokens (B, T) of any integer dtype, which are embedded.

    vocab_size: V, number of different tokens.
    """

    vocab_size: int

    def __post_init__(self) -> None:
        _check("tokens", {"vocab_size": self.vocab_size}, 1)


@dataclass(frozen=True)
class Features(Options):
    """Features (B, T, C), which pass through a linear map.

    channels: C.
    scales: (location, scale) of each feature, by which it is standardised first; None if the features are standardised
        already.
    missing: NaN in a feature means that it is missing.
    """

    channels: int
    scales: Scales | None = None
    missing: bool = False

    def __post_init__(self) -> None:
        _check("features", {"channels": self.channels}, 1)


@dataclass(frozen=True)
class Channels(Options):
    """Numbers of channels of the series that a forecaster reads.

    target: C, series that are forecast together.
    past: covariates that are known up to the present.
    static: covariates that are constant over a series.
    future: F, covariates that are known as far ahead as the forecast.
    timed: whether the steps have durations, `timespans`. The durations are an input. If all layers take them, the
        layers get them too.
    scales: (location, scale) of the target, the past, the static and the future channels, in this order, measured on
        the training data; None: 0 and 1.
    """

    target: int = 1
    past: int = 0
    static: int = 0
    future: int = 0
    timed: bool = False
    scales: Scales | None = None

    def __post_init__(self) -> None:
        _check("channels", {"target": self.target}, 1)
        _check("channels", {"past": self.past, "static": self.static, "future": self.future}, 0)


def _check(who: str, sizes: dict[str, int], least: int) -> None:
    for name, size in sizes.items():
        if size < least:
            raise ConfigError(f"{who}: {name} is {size}, expected at least {least}")
