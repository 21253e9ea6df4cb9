"""Estimators as scikit-learn has them, and a forecaster of frames with the columns `unique_id`, `ds` and `y`.

This module imports scikit-learn and pandas; nothing else of scanl imports it. `pip install 'scanl[series,sklearn]'`.
They are trained in memory, with the loss, the optimiser and the learning rates of `scanl train`, and leave no folder.
"""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.data.rows import scale_of
from scanl.data.series import continued, series_of
from scanl.data.table import Table
from scanl.errors import ConfigError, DataError
from scanl.learning.questions import loss, model_for, parts
from scanl.learning.run.config import TrainConfig
from scanl.learning.run.optimizer import Plan, make_optimizer, rate
from scanl.models import Forecaster, SequenceClassifier, SequenceRegressor

ROWS = 256  # of a batch of predictions


def optimise(
    model: nn.Module, steps: int, lr: float, seed: int, step_loss: Callable[[int], Tensor], clip: float = 1.0
) -> None:
    """Train a model in place: `step_loss(step)` is the loss of a step."""
    config = TrainConfig(steps=steps, lr=lr, clip=clip, seed=seed)
    config.check()
    optimiser, plan = make_optimizer(model, config), Plan(steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate(plan, config.optimiser.warmup, step))
    model.train()
    for step in range(steps):
        optimiser.zero_grad()
        step_loss(step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimiser.step()
        schedule.step()
    model.eval()


class Trained:
    """The options of a model and of its training, each kept under its name, as scikit-learn and aeon want it."""

    def __init__(
        self,
        layer: str = "hawk",
        dim: int = 32,
        depth: int = 1,
        *,
        layer_options: Mapping[str, Any] | None = None,
        dropout: float = 0.0,
        steps: int = 300,
        batch_size: int = 32,
        lr: float = 3e-3,
        random_state: int = 0,
    ) -> None:
        self.layer, self.dim, self.depth = layer, dim, depth
        self.layer_options, self.dropout = layer_options, dropout
        self.steps, self.batch_size, self.lr, self.random_state = steps, batch_size, lr, random_state
        super().__init__()


class _Estimator(Trained, BaseEstimator):
    """What the two estimators have in common. X: (n, T) or (n, T, C) series of equal length; NaN is missing."""

    model_: Any  # set by `fit`

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.allow_nan = True
        tags.non_deterministic = False
        return tags

    def _read(self, X: Any, y: Any = None, **options: Any) -> tuple[Tensor, Any]:
        """Check X, and y when it fits, and return X as (n, T, C)."""
        how: dict[str, Any] = {"allow_nd": True, "ensure_all_finite": "allow-nan", "dtype": np.float32, **options}
        checked: Any = validate_data(self, X, y, **how) if y is not None else validate_data(self, X, reset=False, **how)
        x, answers = checked if y is not None else (checked, None)
        if x.ndim > 3:
            raise ValueError(f"Found array with dim {x.ndim}, expected (n, T) or (n, T, C)")
        if y is not None:
            self.channels_ = 1 if x.ndim == 2 else x.shape[2]
        found = 1 if x.ndim == 2 else x.shape[2]
        if found != self.channels_:
            raise ValueError(f"X has {found} channels, expected {self.channels_} as in fit")
        return torch.from_numpy(np.ascontiguousarray(x.reshape(*x.shape[:2], found))), answers

    def _options(self, x: Tensor) -> dict[str, Any]:
        return {
            "dim": self.dim,
            "depth": self.depth,
            "layer": self.layer,
            "layer_options": self.layer_options,
            "dropout": self.dropout,
            "input_dim": x.shape[2],
            "scales": [list(scale_of(channel.double().numpy())) for channel in x.flatten(0, 1).unbind(1)],
            "missing": True,
        }

    def _train(self, x: Tensor, step_loss: Callable[[Tensor], Tensor]) -> None:
        """Train `model_` with `step_loss(rows)`, where rows are drawn anew for each step."""
        if int(self.steps) != self.steps or self.steps < 1:
            raise ConfigError(f"{type(self).__name__}: steps is {self.steps}, expected a whole number of at least 1")
        draw = np.random.default_rng(self.random_state)
        size = min(self.batch_size, len(x))

        def once(_: int) -> Tensor:
            return step_loss(torch.from_numpy(draw.choice(len(x), size, replace=False)))

        optimise(self.model_, self.steps, self.lr, self.random_state, once)

    def _fitted(self) -> nn.Module:
        """Return the trained model. Raises NotFittedError before `fit`."""
        check_is_fitted(self)
        return self.model_

    @torch.no_grad()
    def _outputs(self, X: Any, model: nn.Module) -> Tensor:
        x, _ = self._read(X)
        return torch.cat([model(part)[0] for part in x.split(ROWS)])


class SeriesClassifier(ClassifierMixin, _Estimator):
    """Classify series, as an estimator of scikit-learn: `fit`, `predict`, `predict_proba`.

    Args:
        layer, dim, depth, layer_options, dropout: as in `SequenceClassifier`.
        steps, batch_size, lr: of training.   random_state: seed of weights and order, a whole number.

    Fitted: `classes_`, and `model_`, a `SequenceClassifier`.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train on series X (n, T) or (n, T, C) and their classes y (n,)."""
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        x, answers = self._read(X, y)
        check_classification_targets(answers)
        self.classes_, codes = np.unique(answers, return_inverse=True)
        torch.manual_seed(self.random_state)
        self.model_ = SequenceClassifier(len(self.classes_), **self._options(x))
        classes = torch.from_numpy(codes)
        self._train(x, lambda rows: F.cross_entropy(self.model_(x[rows])[0], classes[rows]))
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float32]:
        """Return the probability of each class, (n, classes)."""
        return self._outputs(X, self._fitted()).softmax(-1).numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most likely class of each series, (n,)."""
        best = self._outputs(X, self._fitted()).argmax(-1).numpy()
        return self.classes_[best]


class SeriesRegressor(RegressorMixin, _Estimator):
    """Predict one number or several for each series, as an estimator of scikit-learn: `fit`, `predict`.

    The arguments are those of `SeriesClassifier`. The loss is the squared error in units of the numbers' deviation.
    Fitted: `model_`, a `SequenceRegressor`.
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any) -> Self:
        """Train on series X (n, T) or (n, T, C) and their numbers y (n,) or (n, O)."""
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        x, answers = self._read(X, y, multi_output=True, y_numeric=True)
        self.single_ = answers.ndim == 1
        numbers = torch.from_numpy(np.asarray(answers, np.float32).reshape(len(x), -1))
        torch.manual_seed(self.random_state)
        scales = [list(scale_of(number.double().numpy())) for number in numbers.unbind(1)]
        self.model_ = SequenceRegressor(numbers.shape[1], pool="mean", output_scales=scales, **self._options(x))
        self._train(x, lambda rows: self.model_.loss(x[rows], numbers[rows])[0])
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Return the numbers of each series: (n,) or (n, O), as they were in `fit`.

        They are computed in float64. In float32 the last bits would depend on how many series are predicted at once,
        and scikit-learn does not allow that.
        """
        found = self._outputs(X, copy.deepcopy(self._fitted()).double())[..., 0].numpy()
        return found[:, 0] if self.single_ else found


class FrameForecaster:
    """Forecast frames with the columns `unique_id`, `ds` and `y`, one row a step of a series.

    Args:
        horizon: steps to forecast.
        past, static: further columns, as in `Table`.   season, distribution, sequence_length: as in `Table`.
        steps, batch_size, lr, random_state: of training.
        options: of the model: layer, dim, depth, recursive, lags, ...

    Fitted: `model`, a `Forecaster`.
    """

    def __init__(
        self,
        horizon: int,
        *,
        past: tuple[str, ...] = (),
        static: tuple[str, ...] = (),
        season: int | None = None,
        distribution: str = "gaussian",
        sequence_length: int = 128,
        steps: int = 300,
        batch_size: int = 16,
        lr: float = 3e-3,
        random_state: int = 0,
        **options: Any,
    ) -> None:
        self.horizon, self.past, self.static, self.season = horizon, past, static, season
        self.distribution, self.sequence_length = distribution, sequence_length
        self.steps, self.batch_size, self.lr, self.random_state = steps, batch_size, lr, random_state
        self.options = {"dim": 32, "depth": 1, "layer": "hawk", "tie_embeddings": False, **options}
        self.model: Forecaster | None = None

    def fit(self, frame: pd.DataFrame) -> Self:
        """Train on every row of the frame. Raises DataError as `Table` does."""
        source = Table(
            ["frame"], "forecast", "y", time="ds", series="unique_id", static=self.static, past=self.past,
            horizon=self.horizon, season=self.season, distribution=self.distribution,
            sequence_length=self.sequence_length, seed=self.random_state,
        )  # fmt: skip
        for name in ("unique_id", "ds", "y"):
            if name not in frame.columns:
                raise DataError(f"frame: it has no column {name!r}, expected unique_id, ds and y")
        self._frame = continued(frame, Path("frame"), self.horizon, time="ds", series="unique_id", constant=self.static)
        source.collection = series_of(
            self._frame, Path("frame"), target=["y"], classes=False, time="ds", series="unique_id",
            static=self.static, past=self.past, future=(),
        )  # fmt: skip
        ends = [len(one) - self.horizon for one in source.collection.each]
        source.parts = [[(i, 0, end) for i, end in enumerate(ends)], [], []]
        if source.length < 1:
            raise DataError("frame: no series has two steps to train on")
        torch.manual_seed(self.random_state)
        self.model = model = _forecaster(model_for(source.question, self.options))
        self._source = source

        def once(step: int) -> Tensor:
            inputs, targets = map(torch.from_numpy, source.batch(step, self.batch_size))
            return loss(source.question, model, inputs, targets, None)[0]

        optimise(model, self.steps, self.lr, self.random_state, once)
        return self

    def predict(self, level: float = 90.0) -> pd.DataFrame:
        """Forecast the steps after each series: `unique_id`, `ds`, the mean as `y`, and the bounds of an interval.

        level: per cent of the interval; its columns are `y-lo-90` and `y-hi-90`.
        """
        if self.model is None:
            raise ConfigError("frame: predict is called before fit, expected fit first")
        if not 0 < level < 100:
            raise ConfigError(f"frame: level is {level}, expected between 0 and 100")
        source, frames = self._source, []
        rows = source.flat
        tail = (1 - level / 100) / 2
        for i, one in enumerate(source.collection.each):
            last = len(one) - self.horizon
            places = rows.starts[i] + np.arange(max(0, last - source.length), last)
            forecast = self._forecast(rows.inputs(places[None]), (tail, 1 - tail))
            part: Any = self._frame[self._frame["unique_id"].astype(str) == one.name].tail(self.horizon)
            bounds = {
                f"y-{side}-{level:g}": forecast.quantiles[0, :, 0, k].numpy() for k, side in enumerate(("lo", "hi"))
            }
            frames.append(part[["unique_id", "ds"]].assign(y=forecast.mean[0, :, 0].numpy(), **bounds))
        return pd.concat(frames, ignore_index=True)

    def _forecast(self, inputs: NDArray[np.float32], levels: tuple[float, ...]) -> Any:
        assert self.model is not None
        x, more = parts(self.model, torch.from_numpy(inputs))
        return self.model.predict(x, levels=levels, **more)[0]


def _forecaster(model: Any) -> Forecaster:
    assert isinstance(model, Forecaster)
    return model
