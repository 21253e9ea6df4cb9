"""A classifier and a forecaster as aeon has them. `pip install 'scanl[aeon]'`; nothing else of scanl imports aeon.

They are trained as the estimators for scikit-learn are, in memory.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import numpy as np
import torch
from aeon.classification import BaseClassifier  # pyright: ignore[reportMissingImports]
from aeon.forecasting.base import (  # pyright: ignore[reportMissingImports]
    BaseForecaster,
    DirectForecastingMixin,
    IterativeForecastingMixin,
)
from numpy.typing import NDArray
from torch import Tensor

from scanl.data.series.rows import scale_of
from scanl.errors import DataError
from scanl.learning.descent import optimize, seeded
from scanl.learning.estimators import SeriesClassifier
from scanl.learning.estimators.options import EstimatorOptions, StackOptions
from scanl.learning.series.examples import ROWS, outputs
from scanl.models import Channels, Forecaster


class AeonClassifier(EstimatorOptions, BaseClassifier):
    """Classify series, as a classifier of aeon. X is (n, channels, T), or a list of (channels, t) of unequal length.

    Args: as in `EstimatorOptions`. A series that is shorter than the longest of `fit` begins with missing numbers, as
    in `Table`. A longer series is read whole. Fitted: `model_`, a `SeriesClassifier`.
    """

    _tags = {  # noqa: RUF012
        "X_inner_type": ["np-list", "numpy3D"],
        "capability:missing_values": True,
        "capability:multivariate": True,
        "capability:unequal_length": True,
        "algorithm_type": "deeplearning",
    }

    def _fit(self, X: Any, y: Any) -> Self:
        self.steps_ = max(series.shape[1] for series in X)
        self.model_ = SeriesClassifier(**self.get_params(deep=False)).fit(_rows(X, self.steps_), y)
        return self

    def _predict(self, X: Any) -> NDArray[Any]:
        return self.classes_[self._predict_proba(X).argmax(-1)]

    def _predict_proba(self, X: Any) -> NDArray[np.float32]:
        probabilities = np.empty((len(X), len(self.classes_)), np.float32)
        lengths = np.array([max(self.steps_, series.shape[1]) for series in X])
        for steps in np.unique(lengths):
            (places,) = np.nonzero(lengths == steps)
            for chunk in np.array_split(places, -(-len(places) // ROWS)):
                rows = torch.from_numpy(_rows([X[place] for place in chunk], steps))
                probabilities[chunk] = outputs(self.model_.model_, rows).softmax(-1).numpy()
        return probabilities

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> dict[str, Any]:
        return {"method": "stack", "layer": "lru", "dim": 8, "steps": 3}


@dataclass(eq=False, repr=False)
class AeonForecaster(StackOptions, DirectForecastingMixin, IterativeForecastingMixin, BaseForecaster):
    """Forecast one series, as a forecaster of aeon: `predict(y)` is the mean of the number `horizon` steps after y.

    Args:
        horizon: H. A `Forecaster` is trained that forecasts the next H steps at once.
        lags: last values that a linear map adds.   sequence_length: steps of the windows that are learnt.
        The others as in `StackOptions`.

    `predict` reads all of y. Fitted: `model_`, a `Forecaster`.
    """

    _tags = {"capability:missing_values": True}  # noqa: RUF012

    horizon: int = 1
    _: KW_ONLY
    lags: int = 1
    sequence_length: int = 128
    batch_size: int = 16

    def __post_init__(self) -> None:
        BaseForecaster.__init__(self, horizon=self.horizon, axis=1)

    def _fit(self, y: Any, exog: Any = None) -> Self:
        series = torch.as_tensor(np.asarray(y, np.float64).reshape(-1))
        length = min(self.sequence_length, len(series) - self.horizon)
        if length < 1:
            raise DataError(
                f"{type(self).__name__}: y has {len(series)} steps, expected at least {self.horizon + 1} because the "
                f"horizon is {self.horizon}"
            )
        draw = np.random.default_rng(self.random_state)
        windows = series.unfold(0, length + self.horizon, 1)

        def once(_: int) -> Tensor:
            rows = windows[torch.from_numpy(draw.integers(0, len(windows), self.batch_size))]
            targets = rows[:, 1:].unfold(1, self.horizon, 1)[..., None]
            return self.model_.loss(rows[:, :length, None], targets)[0]

        with seeded(self.random_state):
            channels = Channels(scales=[list(scale_of(series.numpy()))])
            self.model_ = Forecaster(self.horizon, self._stack(), channels, lags=self.lags)
            optimize(self.model_, self._steps, self.lr, self.random_state, once)
        return self

    def _predict(self, y: Any, exog: Any = None) -> float:
        x = torch.as_tensor(np.asarray(y, np.float64).reshape(1, -1, 1))
        return float(self.model_.predict(x)[0].mean[0, -1, 0])

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> dict[str, Any]:
        return {"layer": "lru", "dim": 8, "steps": 3}


def _rows(X: Any, steps: int) -> NDArray[np.float64]:
    """Return series (channels, t) as one array (n, steps, channels); shorter ones begin with NaN."""
    rows = np.full((len(X), steps, X[0].shape[0]), np.nan)
    for place, series in zip(rows, X, strict=True):
        place[steps - series.shape[1] :] = series.T
    return rows
