"""The pretrained forecaster with weights that were tuned on a table."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

from torch import Tensor

from scanl.models.forecasting.inputs import check_columns
from scanl.models.forecasting.pretrained import PretrainedForecaster, PretrainedState
from scanl.models.forecasting.share import Forecast
from scanl.models.heads.distributions import LEVELS, Distribution
from scanl.models.inputs import Channels
from scanl.models.saving import Saved
from scanl.models.stack import Backbone
from scanl.options import at_least
from scanl.series_columns import SeriesColumns


class TunedForecaster(Saved):
    """Forecast the next H steps of each channel of series by a `PretrainedForecaster` with weights of its own.

    It stands where a `Forecaster` does. Covariates are not read. Numbers and weights are in float64.
    """

    name: ClassVar[str] = "tuned_forecaster"
    distribution: ClassVar[Distribution] = "quantiles"

    def __init__(
        self,
        horizon: Annotated[int, at_least(1), "H, number of steps to forecast"],
        forecaster: Annotated[PretrainedForecaster, "the model that is tuned"],
        channels: Annotated[Channels, "how many targets are forecast, and the covariates of the table"] = Channels(),  # noqa: B008 (frozen)
        *,
        season: Annotated[int, at_least(1), "steps of a season; 1: none"] = 1,
        second: Annotated[int, at_least(1), "steps of a second, longer season; 1: none"] = 1,
    ) -> None:
        super().__init__()
        self.horizon, self.channels, self.season, self.second = horizon, channels, season, second
        self.forecaster = forecaster.double()
        self.targets, self.past, self.static = channels.target, channels.past, channels.static
        self.future, self.timed = channels.future, channels.timed

    @property
    def stack(self) -> Backbone:
        return self.forecaster.stack

    def init_state(self, batch_size: int) -> PretrainedState:
        """Return the state before any step of some series; each channel is a row of its own."""
        return self.forecaster.init_state(batch_size * self.targets, season=(self.season, self.second))

    def predict(
        self,
        inputs: SeriesColumns | Tensor,
        state: PretrainedState | None = None,
        *,
        levels: Sequence[float] = LEVELS,
    ) -> tuple[Forecast, PretrainedState]:
        """Read T steps, at least one, and forecast the next H after the last one: as `PretrainedForecaster.predict`.

        inputs: `SeriesColumns`, or the targets x (B, T, C) alone.
        """
        columns = inputs if isinstance(inputs, SeriesColumns) else SeriesColumns(inputs)
        check_columns(columns, self.channels, self.horizon, None)
        seasons = self.season, self.second
        return self.forecaster.predict(columns.target, state, horizon=self.horizon, season=seasons, levels=levels)
