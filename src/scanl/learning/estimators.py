"""Estimators as scikit-learn has them. `scanl.learning.frames` has a forecaster of frames.

This module imports scikit-learn: `pip install 'scanl[sklearn]'`. They are trained in memory, with the loss, the
optimizer and the learning rates of `scanl train`, and leave no folder.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.data.rows import scale_of
from scanl.errors import ConfigError, DataError
from scanl.learning.descent import descend
from scanl.learning.optimizers import OPTIMIZERS
from scanl.learning.run.config import TrainConfig
from scanl.learning.run.plan import Plan, rate
from scanl.models import Features, SequenceClassifier, SequenceRegressor, Stack
from scanl.whole import whole_number

ROWS = 256  # of a batch of predictions


def check_sizes(who: str, **sizes: Any) -> None:
    """Raise ConfigError for a size that is no whole number of at least 1."""
    for name, size in sizes.items():
        if not isinstance(size, Integral) or size < 1:
            raise ConfigError(f"{who}: {name} is {size!r}, expected a whole number of at least 1")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw weights and dropout from a seed. Afterwards torch's global generator is as it was before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def optimize(
    model: nn.Module, steps: int, lr: float, seed: int, step_loss: Callable[[int], Tensor], clip: float = 1.0
) -> None:
    """Train a model in place: `step_loss(step)` is the loss of a step.

    Raises DivergenceError as `descend` does.
    """
    config = TrainConfig.of(steps=steps, lr=lr, clip=clip, seed=seed)
    config.check()
    chosen, plan = config.training, Plan(steps)
    optimizer = OPTIMIZERS[chosen.optimizer](model, chosen.lr, chosen.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(plan, chosen.warmup, step))
    model.train()
    descend(list(model.parameters()), optimizer, schedule, steps, step_loss, clip)
    model.eval()


class Trained:
    """The options of a model and of its training, each kept under its name, as scikit-learn and aeon want it.

    layer, dim, depth: of the `Stack`.   stack_options: its further arguments, by name.
    """

    def __init__(
        self,
        layer: str = "hawk",
        dim: int = 32,
        depth: int = 1,
        *,
        stack_options: Mapping[str, Any] | None = None,
        steps: int = 300,
        batch_size: int = 32,
        lr: float = 3e-3,
        random_state: int = 0,
    ) -> None:
        self.layer, self.dim, self.depth = layer, dim, depth
        self.stack_options = stack_options
        self.steps, self.batch_size, self.lr, self.random_state = steps, batch_size, lr, random_state
        super().__init__()


class _Estimator(Trained, BaseEstimator):
    """The base class of the two estimators. X: (n, T) or (n, T, C) series of equal length; NaN is missing."""

    model_: Any  # set by `fit`

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.allow_nan = True
        tags.non_deterministic = False
        return tags

    def _read(self, X: Any, y: Any = None, **options: Any) -> tuple[Tensor, Any]:
        """Check X, and y when it fits, and return X as (n, T, C) in float64, because the model standardises it."""
        _refuse_unequal(type(self).__name__, X)
        how: dict[str, Any] = {"allow_nd": True, "ensure_all_finite": "allow-nan", "dtype": np.float64, **options}
        checked: Any = validate_data(self, X, y, **how) if y is not None else validate_data(self, X, reset=False, **how)
        x, answers = checked if y is not None else (checked, None)
        if x.ndim > 3:
            raise ValueError(f"Found array with dim {x.ndim}, expected (n, T) or (n, T, C)")
        if y is not None:
            self.channels_ = 1 if x.ndim == 2 else x.shape[2]
        channels = 1 if x.ndim == 2 else x.shape[2]
        if channels != self.channels_:
            raise ValueError(f"X has {channels} channels, expected {self.channels_} as in fit")
        return torch.from_numpy(np.ascontiguousarray(x.reshape(*x.shape[:2], channels))), answers

    def _stack(self) -> Stack:
        return Stack(self.dim, self.depth, self.layer, **(self.stack_options or {}))

    def _inputs(self, x: Tensor) -> Features:
        scales = [list(scale_of(channel.numpy())) for channel in x.flatten(0, 1).unbind(1)]
        return Features(x.shape[2], scales, missing=True)

    def _train(self, x: Tensor, step_loss: Callable[[Tensor], Tensor]) -> None:
        """Train `model_` with `step_loss(rows)`, where rows are drawn anew for each step."""
        check_sizes(type(self).__name__, steps=self.steps, batch_size=self.batch_size)
        draw = np.random.default_rng(self.random_state)
        size = min(self.batch_size, len(x))

        def once(_: int) -> Tensor:
            return step_loss(torch.from_numpy(draw.choice(len(x), size, replace=False)))

        optimize(self.model_, self.steps, self.lr, self._seed, once)

    @property
    def _seed(self) -> int:
        return whole_number(type(self).__name__, "random_state", self.random_state)

    def _fitted(self) -> nn.Module:
        """Return the trained model. Raises NotFittedError before `fit`."""
        check_is_fitted(self)
        return self.model_

    @torch.no_grad()
    def _outputs(self, X: Any, model: nn.Module) -> Tensor:
        x, _ = self._read(X)
        return torch.cat([model(rows)[0] for rows in x.split(ROWS)])


class SeriesClassifier(ClassifierMixin, _Estimator):
    """Classify series, as an estimator of scikit-learn: `fit`, `predict`, `predict_proba`.

    Args:
        layer, dim, depth, stack_options: as in `Trained`.
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
        classes = torch.from_numpy(codes)
        with seeded(self._seed):
            self.model_ = SequenceClassifier(len(self.classes_), self._stack(), self._inputs(x))
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

    Args: see `SeriesClassifier`. The loss is the squared error in units of the numbers' deviation.
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
        numbers = torch.from_numpy(np.asarray(answers, np.float64).reshape(len(x), -1))
        scales = [list(scale_of(number.numpy())) for number in numbers.unbind(1)]
        with seeded(self._seed):
            self.model_ = SequenceRegressor(
                numbers.shape[1], self._stack(), self._inputs(x), pool="mean", output_scales=scales
            )
            self._train(x, lambda rows: self.model_.loss(x[rows], numbers[rows])[0])
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Return the numbers of each series: (n,) or (n, O), as they were in `fit`.

        They are computed in float64. In float32 the last bits would depend on how many series are predicted at once,
        and scikit-learn does not allow that.
        """
        numbers = self._outputs(X, copy.deepcopy(self._fitted()).double())[..., 0].numpy()
        return numbers[:, 0] if self.single_ else numbers


def _refuse_unequal(who: str, X: Any) -> None:
    """Raise DataError for a list of series that do not have one shape."""
    if not isinstance(X, list | tuple):
        return
    try:
        shapes = {np.shape(series) for series in X}
    except ValueError:
        raise DataError(f"{who}: a series of X has steps of different channels, expected (T,) or (T, C)") from None
    if len(shapes) > 1:
        steps = sorted(shape[0] if shape else 1 for shape in shapes)
        raise DataError(
            f"{who}: X has series of {steps[0]} to {steps[-1]} steps, expected one shape, not {len(shapes)}; let the "
            "shorter ones begin with NaN"
        )
