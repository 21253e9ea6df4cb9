"""A forecast, and the share of the pretrained forecaster in a mean with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from scanl.errors import CheckpointError, ShapeError
from scanl.layers import state as states
from scanl.layers.state import State
from scanl.models.saving import ModelPart
from scanl.options import WORDS, ConfiguredMeta, at_least, between


def as_series(who: str, x: Tensor) -> Tensor:
    """Return x (B, T, C) as series (B C, T). Raises ShapeError for another shape, or an infinite number."""
    if x.ndim != 3 or not x.shape[1] or not x.is_floating_point():
        raise ShapeError(
            f"{who}: x is {x.dtype} of shape {tuple(x.shape)}, expected real numbers (B, T, C), T at least 1"
        )
    if bool(x.isinf().any()):
        raise ShapeError(f"{who}: x has an infinite number, expected finite ones, and NaN for none")
    return x.transpose(1, 2).flatten(0, 1)


def check_series(who: str, known: int, read: int) -> None:
    """Raise ShapeError unless a state is of as many series as are read."""
    if known != read:
        raise ShapeError(f"{who}: state has {known} series, expected {read} because of x")


class Forecast(NamedTuple):
    """A forecast of the next H steps of C targets, in their units and in float64.

    mean: (B, H, C).   quantiles: (B, H, C, Q), at the levels of the call.
    """

    mean: Tensor
    quantiles: Tensor


@dataclass(frozen=True)
class PretrainedShare(ModelPart, metaclass=ConfiguredMeta):
    """Share of the pretrained forecaster's numbers and quantiles in the mean with those of a trained one."""

    share: Annotated[float, between(0, 1), "share of the pretrained forecaster"]
    season: Annotated[int, at_least(1), "steps of a season that it reads; 1: none"] = 1
    second: Annotated[int, at_least(1), "steps of a second, longer season; 1: none"] = 1
    digest: Annotated[str | None, "SHA-256 of its file; None: that of the file in the package"] = None

    def init_state(self, batch_size: int, targets: int) -> State:
        """Return the state of the pretrained forecaster before any step: (B, C, ...) each."""
        state = self._model().init_state(batch_size * targets, season=(self.season, self.second))
        return states.map_leaves(lambda leaf: leaf.unflatten(0, (batch_size, targets)), state)

    def mixed(
        self, forecast: Forecast, x: Tensor, state: State, horizon: int, levels: Sequence[float]
    ) -> tuple[Forecast, State]:
        """Return the mean of a forecast and of that after steps x (B, T, C), and the state after them.

        A series without a value has the first one alone.
        """
        before = states.map_leaves(lambda leaf: leaf.flatten(0, 1), state)
        other, after = self._model().predict(x, before, horizon=horizon, levels=levels)
        both = (
            torch.where(theirs.isnan(), ours, torch.lerp(ours, theirs.to(ours), self.share))
            for ours, theirs in zip(forecast, (part.to(x.device) for part in other), strict=True)
        )
        batch = (len(x), x.shape[2])
        return Forecast(*both), states.map_leaves(lambda leaf: leaf.unflatten(0, batch), after)

    def _model(self) -> Any:  # its module imports this one
        from scanl.models.forecasting.pretrained import DIGEST, pretrained_forecaster

        if self.digest not in (None, DIGEST):
            raise CheckpointError(
                f"forecaster: the digest of the pretrained model was {self.digest[:12]} in training, expected that of "
                f"this package, {DIGEST[:12]}; train again, or install the version of then"
            )
        return pretrained_forecaster()


WORDS[PretrainedShare] = "PretrainedShare(0.5)"
