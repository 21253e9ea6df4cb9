"""Forecasting models as darts has them. `pip install 'scanl[darts]'`; nothing else of scanl imports darts.

They are `Frames` with the face of a global model of darts.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import pandas as pd
from darts.models.forecasting.forecasting_model import (  # pyright: ignore[reportMissingImports]
    GlobalForecastingModel,
)
from darts.timeseries import TimeSeries  # pyright: ignore[reportMissingImports]
from darts.utils.likelihood_models.base import (  # pyright: ignore[reportMissingImports]
    Likelihood,
    LikelihoodType,
    quantile_names,
)

from scanl.data.base import LEVELS
from scanl.errors import ConfigError, DataError
from scanl.learning.forecasting.choose import MINUTES
from scanl.learning.forecasting.frames import Frames, levels_of

GRID = np.arange(0.5, 100) / 100  # probabilities between whose quantiles samples are drawn
MIN_ROWS = 2  # rows that a forecast needs at least


class _Forecaster(GlobalForecastingModel, ABC):
    """What both models have: they answer with medians, samples or quantiles from a frame."""

    supports_multivariate = False
    supports_probabilistic_prediction = True
    supports_sample_weight = False
    supports_optimized_historical_forecasts = False
    min_train_samples = 1

    def __init__(self, output_chunk_length: int, quantiles: Sequence[float]) -> None:
        super().__init__(add_encoders=None)
        self.horizon, self.quantiles = output_chunk_length, list(quantiles)
        self._considers_static_covariates = self.supports_static_covariates

    @abstractmethod
    def _answers(
        self, n: int, several: Sequence[TimeSeries], past: Any, future: Any, levels: Sequence[float]
    ) -> pd.DataFrame:
        """Return the forecast of `Frames` of at least the n next steps."""

    def predict(
        self,
        n: int,
        series: Any = None,
        past_covariates: Any = None,
        future_covariates: Any = None,
        num_samples: int = 1,
        verbose: bool | None = None,
        predict_likelihood_parameters: bool = False,
        show_warnings: bool = True,
        random_state: int | None = None,
    ) -> Any:
        """Forecast the n steps after each series: medians, samples, or quantiles as components."""
        if series is None:
            series = self.training_series
            past_covariates = self.past_covariate_series if past_covariates is None else past_covariates
            future_covariates = self.future_covariate_series if future_covariates is None else future_covariates
        super().predict(
            n, series, past_covariates, future_covariates, num_samples,
            predict_likelihood_parameters=predict_likelihood_parameters, show_warnings=False,
        )  # fmt: skip
        several = _several(series)
        if n > self.horizon:
            if num_samples > 1:
                raise ConfigError(f"darts: n is {n}, expected at most {self.horizon}, output_chunk_length, for samples")
            first = self.predict(self.horizon, several, past_covariates, future_covariates)
            longer = [one.append(more) for one, more in zip(several, first, strict=True)]
            last = self.predict(n - self.horizon, longer, past_covariates, future_covariates)
            forecasts = [one.append(more) for one, more in zip(first, last, strict=True)]
            return forecasts[0] if isinstance(series, TimeSeries) else forecasts
        probabilities = self.quantiles if predict_likelihood_parameters else [0.5] if num_samples == 1 else list(GRID)
        levels, columns = levels_of(probabilities)
        answers, forecasts = self._answers(n, several, past_covariates, future_covariates, levels), []
        draw = np.random.default_rng(random_state)
        for number, one in enumerate(several):
            values, names = answers.loc[answers["unique_id"] == str(number), columns].to_numpy()[:n, :, None], None
            if predict_likelihood_parameters:
                names = self.likelihood.component_names(series=one)
            elif num_samples > 1:
                drawn = draw.random((n, 1, num_samples))
                values = np.stack([np.interp(p, GRID, row[:, 0]) for p, row in zip(drawn, values, strict=True)])
            plain = names is None
            forecasts.append(self._build_forecast_series(values, one, names, plain, plain))
        return forecasts[0] if isinstance(series, TimeSeries) else forecasts

    @property
    def likelihood(self) -> Likelihood:
        return Likelihood(LikelihoodType.Quantile, quantile_names(self.quantiles))

    @property
    def output_chunk_length(self) -> int:
        return self.horizon

    @property
    def _target_window_lengths(self) -> tuple[int, int]:
        return MIN_ROWS, self.horizon

    @property
    def extreme_lags(self) -> tuple[int | None, ...]:
        past = (-MIN_ROWS, -1) if self.uses_past_covariates else (None, None)
        future = (-MIN_ROWS, self.horizon - 1) if self.uses_future_covariates else (None, None)
        return (-MIN_ROWS, self.horizon - 1, *past, *future, 0)

    @property
    def _model_encoder_settings(self) -> tuple[int, int, bool, bool, None, None]:
        return MIN_ROWS, self.horizon, self.supports_past_covariates, self.supports_future_covariates, None, None


class DartsForecaster(_Forecaster):
    """Forecast univariate series with what backtests choose, as a global model of darts.

    Args:
        output_chunk_length: steps to forecast at once.
        quantiles: of `predict_likelihood_parameters`.
        minutes, random_state: as in `Frames`.
        options: further arguments of `Frames`, such as {"season": 12} or {"layer": "lru", "steps": 300}.

    Covariates of the past, of the future and static ones are read. Without samples, a forecast is the median; more
    steps than `output_chunk_length` follow from the medians before them. The samples of each step are drawn from its
    own distribution. Fitted: `frames`, a `Frames`.
    Raises ConfigError for samples of more steps than `output_chunk_length`, and as `Frames` does.
    """

    supports_past_covariates = True
    supports_future_covariates = True
    supports_static_covariates = True

    def __init__(
        self,
        output_chunk_length: int,
        *,
        quantiles: Sequence[float] = LEVELS,
        minutes: float = MINUTES,
        random_state: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(output_chunk_length, quantiles)
        self.minutes, self.random_state, self.options = minutes, random_state, dict(options or {})

    def fit(
        self, series: Any, past_covariates: Any = None, future_covariates: Any = None, verbose: bool | None = None
    ) -> Self:
        """Train on one or several series, with their covariates."""
        super().fit(series, past_covariates, future_covariates)
        rows, roles = _rows(series, past_covariates, future_covariates)
        options = {"minutes": self.minutes, "random_state": self.random_state, **self.options}
        self.frames = Frames(self.horizon, freq=_frequency(series), **roles, **options).fit(rows)
        return self

    def _answers(
        self, n: int, several: Sequence[TimeSeries], past: Any, future: Any, levels: Sequence[float]
    ) -> pd.DataFrame:
        rows, _ = _rows(several, past, future)
        known = self._known(n, several, _several(future)) if self.frames.future else None
        return self.frames.predict(rows, known, levels)

    def _known(self, n: int, several: Sequence[TimeSeries], covariates: Sequence[TimeSeries]) -> Any:
        """Return the covariates of the future at the steps ahead; those after the n steps may be absent."""
        parts = []
        for number, (one, known) in enumerate(zip(several, covariates, strict=True)):
            times = self._generate_new_dates(self.horizon, one)
            lacking = times[:n].difference(known.time_index)
            if len(lacking):
                raise DataError(
                    f"darts: future_covariates have no row at {lacking[0]}, expected one at each of the {n} steps that "
                    "follow the series"
                )
            parts.append(_columns(known, times, "future").assign(unique_id=str(number), ds=times))
        return pd.concat(parts, ignore_index=True)


class PretrainedDartsForecaster(_Forecaster):
    """Forecast univariate series by the model in the package, as a global model of darts. `fit` trains nothing.

    Args:
        output_chunk_length, quantiles: as of `DartsForecaster`.
        season: as of `Frames.pretrained`. Each call of `predict` finds it in the series that it reads.

    No covariates are read. The rest is as of `DartsForecaster`.
    Raises ConfigError for covariates, and for samples of more steps than `output_chunk_length`.
    """

    supports_past_covariates = False
    supports_future_covariates = False
    supports_static_covariates = False

    def __init__(
        self, output_chunk_length: int, *, quantiles: Sequence[float] = LEVELS, season: int | None = None
    ) -> None:
        super().__init__(output_chunk_length, quantiles)
        self.season = season

    def fit(
        self, series: Any, past_covariates: Any = None, future_covariates: Any = None, verbose: bool | None = None
    ) -> Self:
        """Keep a single series for `predict`."""
        _refuse_covariates(past_covariates, future_covariates)
        return super().fit(series)

    def _answers(
        self, n: int, several: Sequence[TimeSeries], past: Any, future: Any, levels: Sequence[float]
    ) -> pd.DataFrame:
        _refuse_covariates(past, future)
        rows = _rows(several, None, None)[0][["unique_id", "ds", "y"]]
        return Frames.pretrained(n, season=self.season, freq=_frequency(several)).fit(rows).predict(levels=levels)


def _refuse_covariates(past: Any, future: Any) -> None:
    for role, covariates in (("past", past), ("future", future)):
        if covariates is not None:
            raise ConfigError(
                f"darts: {role}_covariates are given, expected none because the model in the package reads none; "
                "DartsForecaster reads them"
            )


def _frequency(series: Any) -> Any:
    """Return the frequency of all series; None if they differ."""
    frequencies = {one.freq for one in _several(series)}
    return frequencies.pop() if len(frequencies) == 1 else None


def _several(series: Any) -> list[TimeSeries]:
    return [] if series is None else [series] if isinstance(series, TimeSeries) else list(series)


def _columns(one: TimeSeries, times: Any, role: str) -> Any:
    """Return the components of a series at some times as columns of a role; absent ones are missing."""
    return one.to_dataframe().reindex(times).rename(columns=f"{role} {{}}".format).reset_index(drop=True)


def _rows(series: Any, past: Any, future: Any) -> tuple[Any, dict[str, list[str]]]:
    """Return the frame of `Frames`, and the names of the covariates by role."""
    frames = []
    several = _several(series)
    for number, one in enumerate(several):
        if one.width > 1:
            raise DataError(f"darts: series has {one.width} components, expected 1; give them as several series")
        values = {"unique_id": str(number), "ds": one.time_index, "y": one.values()[:, 0]}
        static = {} if one.static_covariates is None else one.static_covariates.iloc[0].to_dict()
        parts = [pd.DataFrame(values | {f"static {name}": value for name, value in static.items()})]
        for role, covariates in (("past", _several(past)), ("future", _several(future))):
            if covariates:
                if len(covariates) != len(several):
                    raise DataError(
                        f"darts: {role}_covariates are {len(covariates)} series, expected {len(several)} as in series"
                    )
                parts.append(_columns(covariates[number], one.time_index, role))
        frames.append(pd.concat(parts, axis=1))
    rows = pd.concat(frames, ignore_index=True)
    roles = ("past", "static", "future")
    return rows, {role: [name for name in rows.columns if name.startswith(f"{role} ")] for role in roles}
