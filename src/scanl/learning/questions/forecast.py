"""The numbers of the next steps of series, by a forecaster."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

from torch import Tensor

from scanl.data.base import LEVELS, Source
from scanl.data.batch import Batch, Outcomes
from scanl.data.questions import ForecastQuestion
from scanl.data.series.source import SeriesSource
from scanl.layers.state import State
from scanl.learning.questions.base import Answerer, Answers, answers, listed
from scanl.models import (
    Backbone,
    Channels,
    Forecaster,
    Normalization,
    PretrainedShare,
    TunedForecaster,
    pretrained_forecaster,
)
from scanl.models.forecasting.pretrained import DIGEST
from scanl.options import NAME, between


@dataclass
class ForecastOptions:
    """Options of a forecaster, except what its question determines."""

    topic: ClassVar[str] = "forecast"  # of the help
    unless: ClassVar[str] = "the question of the data is not a forecast"

    recursive: Annotated[bool, "one step at a time, from the kept state; else all steps at once"] = False
    lags: Annotated[int | None, "how many last values a linear map adds to the forecast; none: a season"] = None
    span: Annotated[float | None, "numbers after which the past fades in its normalisation; none: never"] = None
    log: Annotated[bool, "normalise the logarithm of the targets"] = False
    start: Annotated[  # read by `scanl.learning.forecasting.choose`
        list[str],
        NAME,
        "simple forecasts, such as seasonal or drift(12), with whose mean the map of the last values "
        "starts and stays; `scanl.learning.forecasting.lag_maps` lists them",
    ] = field(default_factory=list)
    rounded: Annotated[bool, "round the forecast to whole numbers"] = False
    least: Annotated[float | None, "no number is below this one; none: no limit"] = None
    calibrated: Annotated[bool, "intervals have factors from backtests, and one of the last errors"] = False
    pretrained: Annotated[float, between(0, 1), "share of the model in the package in the forecast"] = 0.0


@answers(ForecastQuestion)
class ForecastAnswerer(Answerer[ForecastQuestion]):
    """A `Forecaster`, whose head has the loss: quantiles (N, H, C, Q) at `LEVELS` after the last step, and targets.

    By default a linear map adds the values of a season.
    """

    in_parts = False
    options = ForecastOptions

    def head(self, stack: Backbone, options: Mapping[str, Any]) -> Forecaster:
        question = self.question
        share = options["pretrained"]
        beside = PretrainedShare(share, question.season, question.second, DIGEST) if share else None
        return Forecaster(
            question.horizon,
            stack,
            self._channels(),
            distribution=question.distribution,
            recursive=options["recursive"],
            lags=question.season if options["lags"] is None else options["lags"],
            normalization=Normalization(
                **{name: options[name] for name in ("span", "log", "rounded", "least", "calibrated")}, beside=beside
            ),
        )

    def tuned(self) -> TunedForecaster:
        """Return the model in the package as a forecaster of the question, to be tuned."""
        question = self.question
        seasons = {"season": question.season, "second": question.second}
        return TunedForecaster(question.horizon, copy.deepcopy(pretrained_forecaster()), self._channels(), **seasons)

    def _channels(self) -> Channels:
        question = self.question
        return Channels(
            question.target, question.past, question.static, question.future, question.timed, listed(question.scales)
        )

    def answers(self, model: Forecaster | TunedForecaster, batch: Batch, state: State = None) -> Answers:
        forecast, state = model.predict(batch.inputs, state, levels=LEVELS)
        return Answers(forecast.quantiles, batch.targets, state)

    def loss(self, model: Forecaster, batch: Batch, state: State = None) -> tuple[Tensor, State]:
        return model.loss(batch.inputs, batch.targets, state)

    def show(self, model: Forecaster, source: Source, folder: Path, seed: int) -> None:
        from scanl.learning.run.picture import save_forecast

        save_forecast(folder / "forecast.png", cast(SeriesSource, source), model)

    def scores(self, outputs: Tensor, targets: Outcomes) -> dict[str, tuple[float, int]]:
        numbers, units = (tensor.double().cpu() for tensor in targets)
        return super().scores(outputs.double().cpu(), Outcomes(numbers, units))
