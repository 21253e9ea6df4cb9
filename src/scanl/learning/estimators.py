"""Estimators as scikit-learn has them. `scanl.learning.frames` has a forecaster of frames.

This module imports scikit-learn: `pip install 'scanl[sklearn]'`. They are trained in memory, with the loss, the
optimizer and the learning rates of `scanl train`, and leave no folder.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from numbers import Integral, Real
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
from scanl.learning.forecasting import check_levels
from scanl.learning.optimizers import OPTIMIZERS
from scanl.learning.run.config import TrainConfig
from scanl.learning.run.plan import Plan, rate
from scanl.models import Features, SequenceClassifier, SequenceRegressor, Stack
from scanl.models.stack import Backbone
from scanl.whole import is_whole, whole_number

ROWS, STEPS = 256, 2**16  # most series, and most steps of all series, that are read at once in a prediction
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
    """Return the outputs of a model for series x (n, T, C), on the processor.

    At most `ROWS` series and `STEPS` steps are read at once. A longer series is read in pieces, with the state between
    them, unless a layer reads future steps.
    """
    device, stack = next(model.parameters()).device, model.stack
    at_once = x.shape[1] if isinstance(stack, Backbone) and stack.bidirectional else STEPS
    answers = []
    for rows in x.split(max(1, min(ROWS, STEPS // x.shape[1]))):
        output, state = None, None
        for piece in rows.split(at_once, 1):
            output, state = model(piece.to(device), state)
        answers.append(output)
    return torch.cat(answers).cpu()


@dataclass(eq=False, repr=False)
class Trained:
    """The options of a model and of its training, each kept under its name, as scikit-learn and aeon want it.

    layer, dim, depth: of the `Stack`.   stack_options: its further arguments, by name.
    steps, batch_size, lr: of training.
    random_state: seed of weights and order: a whole number; or a RandomState, a Generator, or None for the global
    generator of NumPy, which give another seed at each fit.
    device: of torch, on which the model is trained and stays; None: the processor.
    verbose: 1 prints the loss ten times in a fit; 0 prints nothing.
    early_stopping: whether to hold out series, measure their loss after each pass over the others, end when it has not
    fallen for `n_iter_no_change` passes, and return to the weights with the smallest one.
    validation_fraction: share of the series that are held out, of each class alike.
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
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10

    def __post_init__(self) -> None:
        super().__init__()


@dataclass(eq=False, repr=False)
class _Estimator(Trained, BaseEstimator):
    """The base class of the two estimators. X: (n, T) or (n, T, C) series of equal length; NaN is missing.

    warm_start: whether a further `fit` trains the weights of the last one on. The scales of the first fit stay,
    and X must have its form.
    """

    warm_start: bool = field(default=False, kw_only=True)
    model_: Any = field(init=False, repr=False)  # set by `fit`

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.allow_nan = True
        tags.non_deterministic = False
        return tags

    def _read(self, X: Any, y: Any = None, **options: Any) -> tuple[Tensor, Any]:
        """Check X, and y when it fits, and return X as (n, T, C) in float64, because the model standardises it."""
        reset = y is not None and not self._warm
        _refuse_unequal(type(self).__name__, X)
        how: dict[str, Any] = {"allow_nd": True, "ensure_all_finite": "allow-nan", "dtype": np.float64, **options}
        checked: Any = validate_data(self, X, *(() if y is None else (y,)), reset=reset, **how)
        x, answers = checked if y is not None else (checked, None)
        if x.ndim > 3:
            raise ValueError(f"Found array with dim {x.ndim}, expected (n, T) or (n, T, C)")
        if reset:
            self.channels_ = 1 if x.ndim == 2 else x.shape[2]
        channels = 1 if x.ndim == 2 else x.shape[2]
        if channels != self.channels_:
            raise ValueError(f"X has {channels} channels, expected {self.channels_} as in fit")
        return torch.from_numpy(np.ascontiguousarray(x.reshape(*x.shape[:2], channels))), answers

    @property
    def _warm(self) -> bool:
        """Whether a fit goes on with the weights of the last one."""
        return self.warm_start and hasattr(self, "model_")

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
        who = type(self).__name__
        check_sizes(who, steps=self.steps, batch_size=self.batch_size, n_iter_no_change=self.n_iter_no_change)
        draw = np.random.default_rng(seed)
        device = next(self.model_.parameters()).device
        factors = None if _equal(weights) else torch.from_numpy(weights / weights.mean())
        learnt, check = self._split(targets, draw)
        size = min(self.batch_size, len(learnt))
        best, smallest, misses = None, np.inf, 0

        def loss_of(rows: Tensor) -> Tensor:
            of_rows = None if factors is None else factors[rows].to(device)
            return self._loss(x[rows].to(device), targets[rows].to(device), of_rows)

        def once(_: int) -> Tensor:
            return loss_of(learnt[torch.from_numpy(draw.choice(len(learnt), size, replace=False))])

        def after(step: int, loss: float) -> bool:
            nonlocal best, smallest, misses
            line = self.verbose and (step + 1) * LINES // self.steps > step * LINES // self.steps
            if line:
                print(f"{who}: step {step + 1} of {self.steps}, loss {loss:.4g}")
            if not len(check) or (step + 1) % -(-len(learnt) // size):
                return False
            self.model_.eval()
            with torch.no_grad():
                losses = [
                    loss_of(rows).item() * len(rows) for rows in check.split(max(1, min(ROWS, STEPS // x.shape[1])))
                ]
            self.model_.train()
            if sum(losses) < smallest:
                best, smallest, misses = copy.deepcopy(self.model_.state_dict()), sum(losses), 0
            else:
                misses += 1
            if self.verbose and misses == self.n_iter_no_change:
                print(f"{who}: stopped at step {step + 1}, the loss of the series that are held out does not fall")
            return misses == self.n_iter_no_change

        optimize(self.model_, self.steps, self.lr, seed, once, after=after)
        if best is not None:
            self.model_.load_state_dict(best)

    def _split(self, targets: Tensor, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return the rows to learn from and the rows that are held out, of every class or size of number alike."""
        n, fraction = len(targets), self.validation_fraction
        if not self.early_stopping:
            return torch.arange(n), torch.arange(0)
        if not isinstance(fraction, Real) or not 0 < fraction < 1:
            raise ConfigError(
                f"{type(self).__name__}: validation_fraction is {fraction!r}, expected a number between 0 and 1"
            )
        rows = draw.permutation(n)
        rows = rows[np.argsort(targets.reshape(n, -1)[:, 0].numpy()[rows], kind="stable")]
        places = np.floor((np.arange(int(n * fraction)) + draw.uniform()) / fraction).astype(np.int64)
        if not len(places):
            raise DataError(
                f"{type(self).__name__}: X has {n} series, of which a validation_fraction of {fraction:g} is none; "
                "expected one to hold out because of early_stopping"
            )
        places = np.minimum(places, n - 1)
        return torch.from_numpy(np.delete(rows, places)), torch.from_numpy(rows[places])

    def _fitted(self) -> nn.Module:
        """Return the trained model. Raises NotFittedError before `fit`."""
        check_is_fitted(self)
        return self.model_


@dataclass(eq=False, repr=False)
class SeriesClassifier(ClassifierMixin, _Estimator):
    """Classify series, as an estimator of scikit-learn: `fit`, `predict`, `predict_proba`.

    Args:
        layer, dim, depth, stack_options, steps, batch_size, lr, random_state, device, verbose, early_stopping,
        validation_fraction, n_iter_no_change: as in `Trained`.
        warm_start: whether a further `fit` trains the weights of the last one on, with its classes and scales.
        pool: what the class is read from: "mean" of the steps' features, or the "last" one, which knows where in the
            series a number stood if the layer remembers it.
        class_weight: weights of the classes' losses: a dict by class, in which 1 stands for a class that is absent;
            or "balanced" for the inverse of each class's share; None: 1.

    Fitted: `classes_`, and `model_`, a `SequenceClassifier`.
    """

    pool: Any = field(default="mean", kw_only=True)
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
        classes, codes = np.unique(answers, return_inverse=True)
        if self._warm and classes.tolist() != self.classes_.tolist():
            raise ValueError(
                f"{type(self).__name__}: y has the classes {classes.tolist()}, expected {self.classes_.tolist()} of "
                "the last fit because of warm_start"
            )
        self.classes_ = classes
        of_loss = weights * self._class_weights(codes, weights)[codes]
        who = type(self).__name__
        seed, device = seed_of(who, self.random_state), device_of(who, self.device)
        with seeded(seed, device):
            if not self._warm:
                inputs = self._inputs(x, weights)
                self.model_ = SequenceClassifier(len(classes), self._stack(), inputs, pool=self.pool)
            self.model_.to(device)
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


@dataclass(eq=False, repr=False)
class SeriesRegressor(RegressorMixin, _Estimator):
    """Predict one number or several for each series, as an estimator of scikit-learn: `fit`, `predict`.

    Args: as in `SeriesClassifier`, but for pool and class_weight.
        distribution: of the numbers, one of `scanl.models.heads`. With "points", the loss is the squared error in units
            of the numbers' deviation. The others, such as "gaussian", have intervals.

    Fitted: `model_`, a `SequenceRegressor`.
    """

    distribution: str = field(default="points", kw_only=True)

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
        count = 1 if answers.ndim == 1 else answers.shape[1]
        if self._warm and count != self.model_.outputs:
            raise ValueError(
                f"{type(self).__name__}: y has {count} numbers of a series, expected {self.model_.outputs} of the last "
                "fit because of warm_start"
            )
        self.single_ = answers.ndim == 1
        numbers = torch.from_numpy(np.asarray(answers, np.float64).reshape(len(x), -1))
        counted = torch.from_numpy(weights > 0)
        x, numbers, weights = x[counted], numbers[counted], weights[counted.numpy()]
        scales = [list(_scale(number.numpy()[:, None], weights)) for number in numbers.unbind(1)]
        who = type(self).__name__
        seed, device = seed_of(who, self.random_state), device_of(who, self.device)
        with seeded(seed, device):
            if not self._warm:
                self.model_ = SequenceRegressor(
                    count,
                    self._stack(),
                    self._inputs(x, weights),
                    pool="mean",
                    distribution=self.distribution,
                    output_scales=scales,
                )
            self.model_.to(device)
            self._train(x, numbers, weights, seed)
        return self

    def _loss(self, x: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        return self.model_.loss(x, targets, weights=weights)[0]

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Return the numbers of each series: (n,) or (n, O), as they were in `fit`.

        They are computed in float64. In float32 the last bits would depend on how many series are predicted at once,
        and scikit-learn does not allow that.
        """
        model, parameters = self._parameters(X)
        numbers = model.head.mean(parameters).numpy()
        return numbers[:, 0] if self.single_ else numbers

    def predict_interval(self, X: Any, levels: Sequence[float] | None = None) -> Any:
        """Return a frame of pandas: a row for each series, with its number and intervals that contain it.

        Columns: `y`, as in `predict`, and for each level the bounds `y-lo-80` and `y-hi-80`; of several numbers `y0`,
        `y0-lo-80` and so on.   levels: per cents of the intervals; None: 80 and 95, or as far as the distribution goes.
        Raises ConfigError if the distribution is "points".
        """
        import pandas as pd

        who = type(self).__name__
        model = self._fitted()
        levels = check_levels(who, self.distribution, levels)
        if not levels:
            raise ConfigError(
                f"{who}: distribution is {self.distribution!r}, expected one with intervals because of "
                "predict_interval; 'gaussian' has them"
            )
        model, parameters = self._parameters(X)
        sides = [(side, level) for level in levels for side in ("lo", "hi")]
        tails = [(1 - level / 100) / 2 if side == "lo" else (1 + level / 100) / 2 for side, level in sides]
        means = model.head.mean(parameters)
        bounds = model.head.quantiles(parameters, torch.tensor(tails, dtype=torch.float64))
        columns = {}
        for number in range(model.outputs):
            name = "y" if self.single_ else f"y{number}"
            columns[name] = means[:, number].numpy()
            for place, (side, level) in enumerate(sides):
                columns[f"{name}-{side}-{level:g}"] = bounds[:, number, place].numpy()
        return pd.DataFrame(columns)

    @torch.no_grad()
    def _parameters(self, X: Any) -> tuple[Any, Tensor]:
        """Return the model in float64 on the processor, and the parameters (n, O, P) of the numbers' distributions."""
        model: Any = copy.deepcopy(self._fitted()).double()
        parameters = outputs(model, self._read(X)[0])
        return model.cpu(), parameters


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
