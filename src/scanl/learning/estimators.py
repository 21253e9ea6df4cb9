"""Estimators as scikit-learn has them. `scanl.learning.frames` has a forecaster of frames.

This module imports scikit-learn: `pip install 'scanl[sklearn]'`. They are trained in memory, with the loss, the
optimizer and the learning rates of `scanl train`, and leave no folder.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from numbers import Integral
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.class_weight import compute_class_weight
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
from scanl.whole import is_whole, whole_number

ROWS = 256  # of a batch of predictions
LINES = 10  # that `verbose` prints in a fit


def check_sizes(who: str, **sizes: Any) -> None:
    """Raise ConfigError for a size that is no whole number of at least 1."""
    for name, size in sizes.items():
        if not isinstance(size, Integral) or size < 1:
            raise ConfigError(f"{who}: {name} is {size!r}, expected a whole number of at least 1")


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Draw weights and dropout from a seed, also on a GPU. Afterwards torch's generators are as they were before."""
    gpus = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed)
        yield


def optimize(
    model: nn.Module,
    steps: int,
    lr: float,
    seed: int,
    step_loss: Callable[[int], Tensor],
    clip: float = 1.0,
    after: Callable[[int, float], bool] | None = None,
) -> None:
    """Train a model in place: `step_loss(step)` is the loss of a step. `after` is as in `descend`.

    Raises DivergenceError as `descend` does.
    """
    config = TrainConfig.of(steps=steps, lr=lr, clip=clip, seed=seed)
    config.check()
    chosen, plan = config.training, Plan(steps)
    optimizer = OPTIMIZERS[chosen.optimizer](model, chosen.lr, chosen.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(plan, chosen.warmup, step))
    model.train()
    descend(list(model.parameters()), optimizer, schedule, steps, step_loss, clip, after)
    model.eval()


def seed_of(who: str, random_state: Any) -> int:
    """Return the seed of a fit. A whole number is the seed; a generator of NumPy draws one, at each fit anew.

    random_state: a whole number, a RandomState, a Generator, or None for the global generator of NumPy.
    """
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**31))
    if random_state is None or isinstance(random_state, np.random.RandomState):
        return int(check_random_state(random_state).randint(2**31 - 1))
    if not is_whole(random_state):
        raise ConfigError(
            f"{who}: random_state is {random_state!r}, expected a whole number of at least 0, a RandomState, a "
            "Generator, or None"
        )
    return whole_number(who, "random_state", random_state)


def device_of(who: str, device: Any) -> torch.device:
    """Return a device of torch on which tensors can be made; None is the processor."""
    try:
        chosen = torch.device("cpu" if device is None else device)
        torch.empty(0, device=chosen)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{who}: device is {device!r}, expected a device of torch that runs here, such as 'cpu' or 'cuda'; {reason}"
        ) from None
    return chosen


@torch.no_grad()
def outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Return the outputs of a model for series x (n, T, C), in batches, on the processor."""
    device = next(model.parameters()).device
    return torch.cat([model(rows.to(device))[0].cpu() for rows in x.split(ROWS)])


@dataclass(eq=False, repr=False)
class Trained:
    """The options of a model and of its training, each kept under its name, as scikit-learn and aeon want it.

    layer, dim, depth: of the `Stack`.   stack_options: its further arguments, by name.
    steps, batch_size, lr: of training.
    random_state: seed of weights and order: a whole number; or a RandomState, a Generator, or None for the global
    generator of NumPy, which give another seed at each fit.
    device: of torch, on which the model is trained and stays; None: the processor.
    verbose: 1 prints the loss ten times in a fit; 0 prints nothing.
    """

    layer: str = "hawk"
    dim: int = 32
    depth: int = 1
    _: KW_ONLY
    stack_options: Mapping[str, Any] | None = None
    steps: int = 300
    batch_size: int = 32
    lr: float = 3e-3
    random_state: Any = 0
    device: Any = None
    verbose: int = 0

    def __post_init__(self) -> None:
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

    def _weights(self, sample_weight: Any, n: int) -> NDArray[np.float64]:
        """Return the weight of each series, (n,), of which a positive one exists."""
        if sample_weight is None:
            return np.ones(n)
        who = type(self).__name__
        weights = np.asarray(sample_weight, np.float64)
        if weights.ndim == 0:
            weights = np.full(n, weights)
        if weights.shape != (n,):
            raise DataError(f"{who}: sample_weight has shape {weights.shape}, expected {(n,)} because of X")
        if not np.isfinite(weights).all() or (weights < 0).any():
            raise DataError(
                f"{who}: sample_weight is from {weights.min():g} to {weights.max():g}, expected finite numbers of at "
                "least 0"
            )
        if not weights.any():
            raise DataError(f"{who}: sample_weight is zero for every series, expected one weight above zero")
        return weights

    def _stack(self) -> Stack:
        return Stack(self.dim, self.depth, self.layer, **(self.stack_options or {}))

    def _inputs(self, x: Tensor, weights: NDArray[np.float64]) -> Features:
        scales = [list(_scale(channel.numpy(), weights)) for channel in x.unbind(2)]
        return Features(x.shape[2], scales, missing=True)

    def _loss(self, x: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """Return the mean loss of series and their targets, each multiplied by its weight."""
        raise NotImplementedError

    def _train(self, x: Tensor, targets: Tensor, weights: NDArray[np.float64], seed: int) -> None:
        """Train `model_` with rows that are drawn anew for each step. weights: (n,), of the losses."""
        check_sizes(type(self).__name__, steps=self.steps, batch_size=self.batch_size)
        draw = np.random.default_rng(seed)
        size, device = min(self.batch_size, len(x)), next(self.model_.parameters()).device
        of_mean = None if _equal(weights) else torch.from_numpy(weights / weights.mean())

        def once(_: int) -> Tensor:
            rows = torch.from_numpy(draw.choice(len(x), size, replace=False))
            factors = None if of_mean is None else of_mean[rows].to(device)
            return self._loss(x[rows].to(device), targets[rows].to(device), factors)

        optimize(self.model_, self.steps, self.lr, seed, once, after=self._after)

    def _after(self, step: int, loss: float) -> bool:
        """Print a line now and then, if `verbose`."""
        if self.verbose and ((step + 1) * LINES // self.steps > step * LINES // self.steps):
            print(f"{type(self).__name__}: step {step + 1} of {self.steps}, loss {loss:.4g}")
        return False

    def _fitted(self) -> nn.Module:
        """Return the trained model. Raises NotFittedError before `fit`."""
        check_is_fitted(self)
        return self.model_


@dataclass(eq=False, repr=False)
class SeriesClassifier(ClassifierMixin, _Estimator):
    """Classify series, as an estimator of scikit-learn: `fit`, `predict`, `predict_proba`.

    Args:
        layer, dim, depth, stack_options, steps, batch_size, lr, random_state, device, verbose: as in `Trained`.
        class_weight: weights of the classes' losses: a dict by class, in which 1 stands for a class that is absent;
            or "balanced" for the inverse of each class's share; None: 1.

    Fitted: `classes_`, and `model_`, a `SequenceClassifier`.
    """

    class_weight: Any = field(default=None, kw_only=True)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on series X (n, T) or (n, T, C) and their classes y (n,).

        sample_weight: (n,), of the series' losses, and of the mean and deviation by which X is standardised; None: 1.
        A weight of 0 equals the absence of the series. A weight of 2 equals the series twice, up to rounding, if
        `batch_size` is at least the number of series, repeated ones too. In smaller batches it does so in the mean
        over batches only, because the series drawn are others.
        """
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        x, answers = self._read(X, y)
        check_classification_targets(answers)
        weights = self._weights(sample_weight, len(x))
        counted = weights > 0
        x, answers, weights = x[torch.from_numpy(counted)], answers[counted], weights[counted]
        self.classes_, codes = np.unique(answers, return_inverse=True)
        of_loss = weights * self._class_weights(codes, weights)[codes]
        who = type(self).__name__
        seed, device = seed_of(who, self.random_state), device_of(who, self.device)
        with seeded(seed, device):
            self.model_ = SequenceClassifier(len(self.classes_), self._stack(), self._inputs(x, weights)).to(device)
            self._train(x, torch.from_numpy(codes), of_loss, seed)
        return self

    def _class_weights(self, codes: NDArray[Any], weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the weight of each class. Balanced, every class has the same sum of weights."""
        if self.class_weight is None:
            return np.ones(len(self.classes_))
        if isinstance(self.class_weight, Mapping):
            return compute_class_weight(dict(self.class_weight), classes=self.classes_, y=self.classes_)
        if self.class_weight != "balanced":
            raise ConfigError(
                f"{type(self).__name__}: class_weight is {self.class_weight!r}, expected 'balanced', a dict of weights "
                "by class, or None"
            )
        sums = np.bincount(codes, weights, len(self.classes_))
        return sums.sum() / (len(sums) * sums)

    def _loss(self, x: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        losses = F.cross_entropy(self.model_(x)[0], targets, reduction="none")
        return (losses if weights is None else losses * weights.to(losses.dtype)).mean()

    def predict_proba(self, X: Any) -> NDArray[np.float32]:
        """Return the probability of each class, (n, classes)."""
        model = self._fitted()
        return outputs(model, self._read(X)[0]).softmax(-1).numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most likely class of each series, (n,)."""
        model = self._fitted()
        return self.classes_[outputs(model, self._read(X)[0]).argmax(-1).numpy()]


class SeriesRegressor(RegressorMixin, _Estimator):
    """Predict one number or several for each series, as an estimator of scikit-learn: `fit`, `predict`.

    Args: as in `Trained`. The loss is the squared error in units of the numbers' deviation.
    Fitted: `model_`, a `SequenceRegressor`.
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on series X (n, T) or (n, T, C) and their numbers y (n,) or (n, O).

        sample_weight: as in `SeriesClassifier.fit`; y is standardised by these weights too.
        """
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        x, answers = self._read(X, y, multi_output=True, y_numeric=True)
        weights = self._weights(sample_weight, len(x))
        self.single_ = answers.ndim == 1
        numbers = torch.from_numpy(np.asarray(answers, np.float64).reshape(len(x), -1))
        counted = torch.from_numpy(weights > 0)
        x, numbers, weights = x[counted], numbers[counted], weights[counted.numpy()]
        scales = [list(_scale(number.numpy()[:, None], weights)) for number in numbers.unbind(1)]
        who = type(self).__name__
        seed, device = seed_of(who, self.random_state), device_of(who, self.device)
        with seeded(seed, device):
            self.model_ = SequenceRegressor(
                numbers.shape[1], self._stack(), self._inputs(x, weights), pool="mean", output_scales=scales
            ).to(device)
            self._train(x, numbers, weights, seed)
        return self

    def _loss(self, x: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        return self.model_.loss(x, targets, weights=weights)[0]

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Return the numbers of each series: (n,) or (n, O), as they were in `fit`.

        They are computed in float64. In float32 the last bits would depend on how many series are predicted at once,
        and scikit-learn does not allow that.
        """
        model = copy.deepcopy(self._fitted()).double()
        numbers = outputs(model, self._read(X)[0])[..., 0].numpy()
        return numbers[:, 0] if self.single_ else numbers


def _scale(values: NDArray[np.float64], weights: NDArray[np.float64]) -> tuple[float, float]:
    """Return mean and deviation of the numbers of series (n, T), each of which has a weight."""
    if _equal(weights):
        return scale_of(values.reshape(-1))
    return scale_of(values.reshape(-1), np.repeat(weights, values.shape[1]))


def _equal(weights: NDArray[np.float64]) -> bool:
    return bool((weights == weights[0]).all())


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
