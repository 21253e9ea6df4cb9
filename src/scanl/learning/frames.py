"""A forecaster of frames with the columns `unique_id`, `ds` and `y`.

This module imports pandas and scikit-learn: `pip install 'scanl[series,sklearn]'`. The forecaster is trained in memory,
with the loss, the optimizer and the learning rates of `scanl train`, and leaves no folder.
"""

from dataclasses import fields
from numbers import Real
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import pandas as pd
import torch

from scanl.data.batch import Batch
from scanl.data.questions import Forecast
from scanl.data.series import continued
from scanl.data.table import Table
from scanl.errors import ConfigError, DataError, nearest
from scanl.learning.estimators import check_sizes, optimize, seeded
from scanl.learning.questions.forecast import ForecastAnswerer, columns
from scanl.learning.run.config import StackConfig, make_stack
from scanl.models import Forecaster
from scanl.whole import whole_number

COLUMNS = ("unique_id", "ds", "y")
STACK = [field.name for field in fields(StackConfig)]
HEAD = list(ForecastAnswerer.options)
PATH = Path("frame")  # stands for the frame in messages


class FrameForecaster:
    """Forecast frames with the columns `unique_id`, `ds` and `y`, one row a step of a series.

    Args:
        horizon: steps to forecast.
        past, static: further columns, as in `Table`.   season, distribution, sequence_length: as in `Table`.
        freq: how far a step is from the next: an offset of pandas or its alias, such as "D", "B" or "ME"; a number if
            the times are numbers. None: what pandas infers for each series. As in `Table`, steps that are absent are
            missing numbers if they are few.
        steps, batch_size, lr, random_state: of training.
        options: of the model: arguments of `Stack` such as layer, dim and depth; recursive, lags and span.

    Fitted: `model`, a `Forecaster`.
    """

    def __init__(
        self,
        horizon: int,
        *,
        past: tuple[str, ...] = (),
        static: tuple[str, ...] = (),
        season: int | None = None,
        freq: Any = None,
        distribution: str = "gaussian",
        sequence_length: int = 128,
        steps: int = 300,
        batch_size: int = 16,
        lr: float = 3e-3,
        random_state: int = 0,
        **options: Any,
    ) -> None:
        stack = {"dim": 32, "depth": 1, **{name: options[name] for name in options.keys() & set(STACK)}}
        head = {name: options[name] for name in options.keys() & set(HEAD)}
        if "future" in options:
            raise ConfigError(
                f"FrameForecaster: future is {options['future']!r}, expected none because predict gets no values of "
                "later steps; use scanl train --future or scanl.models.Forecaster"
            )
        for name in options:
            if name not in (*STACK, *HEAD):
                raise nearest("option of FrameForecaster", name, [*STACK, *HEAD])
        self.horizon, self.past, self.static, self.season, self.freq = horizon, past, static, season, freq
        self.distribution, self.sequence_length = distribution, sequence_length
        self.steps, self.batch_size, self.lr, self.random_state = steps, batch_size, lr, random_state
        self.stack, self.head = StackConfig(**stack), head
        self.model: Forecaster | None = None

    def fit(self, frame: pd.DataFrame) -> Self:
        """Train on every row of the frame.

        Raises DataError as `Table` does, and when it is not known when the steps after a series are.
        """
        source = Table(
            ["frame"], "forecast", "y", time="ds", series="unique_id", static=self.static, past=self.past,
            horizon=self.horizon, season=self.season, freq=self.freq, distribution=self.distribution,
            sequence_length=self.sequence_length, seed=self.random_state,
        )  # fmt: skip
        if not isinstance(frame, pd.DataFrame):
            raise DataError(f"frame: it is of type {type(frame).__name__}, expected a DataFrame of pandas")
        check_sizes("frame", steps=self.steps, batch_size=self.batch_size, horizon=self.horizon)
        for name in COLUMNS:
            if name not in frame.columns:
                raise DataError(f"frame: it has no column {name!r}, expected unique_id, ds and y")
        if not frame.columns.is_unique:
            twice = frame.columns[frame.columns.duplicated()][0]
            raise DataError(f"frame: it has two columns called {twice!r}; rename one")
        if frame.empty:
            raise DataError("frame: it has no rows, expected a row for each step of a series")
        frame, _ = source.without_gaps(frame.reset_index(drop=True), PATH)
        training = source.collect(frame, PATH)
        self._frame = continued(
            frame, PATH, self.horizon, time="ds", series="unique_id", constant=self.static, freq=self.freq
        )
        source.collection = source.collect(self._frame, PATH, training)
        source.asking.check_answers(source.collection, "y")
        ends = [len(member) - self.horizon for member in source.collection.series]
        source.parts = [[(i, 0, end) for i, end in enumerate(ends)], [], []]
        if source.length < 1:
            raise DataError("frame: no series has two steps to train on")
        self._source, seed = source, whole_number("frame", "random_state", self.random_state)

        def once(step: int) -> torch.Tensor:
            return method.objective(model, source.batch(step, self.batch_size).tensors())[0]

        with seeded(seed):
            method = ForecastAnswerer(cast(Forecast, source.question))
            model = method.model(make_stack(self.stack), self.head)
            optimize(model, self.steps, self.lr, seed, once)
        self.model = model
        return self

    def predict(self, level: float = 90.0) -> pd.DataFrame:
        """Forecast the steps after each series: `unique_id`, `ds`, the mean as `y`, and the bounds of an interval.

        level: per cent of the interval; its columns are `y-lo-90` and `y-hi-90`.
        """
        if self.model is None:
            raise ConfigError("frame: predict is called before fit, expected fit first")
        if not isinstance(level, Real) or not 0 < level < 100:
            raise ConfigError(f"frame: level is {level}, expected between 0 and 100, one number")
        source, frames = self._source, []
        rows = source.asking.flat
        tail = (1 - level / 100) / 2
        for i, member in enumerate(source.collection.series):
            last = len(member) - self.horizon
            places = rows.starts[i] + np.arange(max(0, last - source.length), last)
            inputs = rows.columns(places[None], self.horizon), rows.durations(places[None], self.horizon)
            x, more = columns(Batch(inputs[0], None, timespans=inputs[1]).tensors())
            forecast, _ = self.model.predict(x, levels=(tail, 1 - tail), **more)
            future: Any = self._frame[self._frame["unique_id"].astype(str) == member.name].tail(self.horizon)
            bounds = {
                f"y-{side}-{level:g}": forecast.quantiles[0, :, 0, k].numpy() for k, side in enumerate(("lo", "hi"))
            }
            frames.append(future[["unique_id", "ds"]].assign(y=forecast.mean[0, :, 0].numpy(), **bounds))
        return pd.concat(frames, ignore_index=True)
