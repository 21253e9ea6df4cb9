"""The numbers of the next steps of series, by a forecaster."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from scanl.data.base import LEVELS, Source
from scanl.data.batch import Batch, Outcomes
from scanl.data.questions import ForecastQuestion
from scanl.data.series.source import SeriesSource
from scanl.layers.state import State
from scanl.learning.questions.base import Answerer, Answers, Option, answers, listed
from scanl.models import Backbone, Channels, Forecaster, Normalization

NO_FORECAST = "the question of the data is not a forecast"


@answers(ForecastQuestion)
class ForecastAnswerer(Answerer[ForecastQuestion]):
    """A `Forecaster`, whose head has the loss: quantiles (N, H, C, Q) at `LEVELS` after the last step, and targets.

    By default a linear map adds the values of a season.
    """

    in_parts = False
    options = {  # noqa: RUF012
        "recursive": Option(False, NO_FORECAST),
        "lags": Option(None, NO_FORECAST),
        "span": Option(None, NO_FORECAST),
        "log": Option(False, NO_FORECAST),
        "start": Option([], NO_FORECAST),  # read by `scanl.learning.forecasting.choose`
        "rounded": Option(False, NO_FORECAST),
        "least": Option(None, NO_FORECAST),
        "calibrated": Option(False, NO_FORECAST),
    }

    def head(self, stack: Backbone, options: Mapping[str, Any]) -> Forecaster:
        question = self.question
        channels = Channels(
            question.target, question.past, question.static, question.future, question.timed, listed(question.scales)
        )
        return Forecaster(
            question.horizon,
            stack,
            channels,
            distribution=question.distribution,
            recursive=options["recursive"],
            lags=question.season if options["lags"] is None else options["lags"],
            normalization=Normalization(
                **{name: options[name] for name in ("span", "log", "rounded", "least", "calibrated")}
            ),
        )

    def answers(self, model: Forecaster, batch: Batch, state: State = None) -> Answers:
        x, options = columns(batch)
        forecast, state = model.predict(x, state, levels=LEVELS, **options)
        return Answers(forecast.quantiles, batch.targets, state)

    def loss(self, model: Forecaster, batch: Batch, state: State = None) -> tuple[Tensor, State]:
        x, options = columns(batch)
        return model.loss(x, batch.targets, state, **options)

    def show(self, model: Forecaster, source: Source, folder: Path, seed: int) -> None:
        from scanl.learning.run.picture import save_forecast

        save_forecast(folder / "forecast.png", cast(SeriesSource, source), model)

    def scores(self, outputs: Tensor, targets: Outcomes) -> dict[str, tuple[float, int]]:
        numbers, units = (tensor.double().cpu() for tensor in targets)
        return super().scores(outputs.double().cpu(), Outcomes(numbers, units))


def columns(batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    """Return a forecaster's inputs from a batch: the target, and its other arguments by name."""
    target, past, static, future = batch.inputs
    return target, {"past": past, "static": static, "future": future, "timespans": batch.timespans}
