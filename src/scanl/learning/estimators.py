"""Estimators as scikit-learn has them. `scanl.learning.forecasting.frames` has a forecaster of frames.

This module imports scikit-learn: `pip install 'scanl[sklearn]'`. By default an estimator is `RandomFilters` with a
readout in closed form, whose choices the series decide that are left out one by one. A stack is trained in memory, with
the loss, the optimizer and the learning rates of `scanl train`. No folder is left.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, fields
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

from scanl.data.series.rows import scale_of
from scanl.errors import ConfigError, DataError
from scanl.learning.descent import descend
from scanl.learning.forecasting.forecasts import check_levels
from scanl.learning.forecasting.leave_one_out import PENALTIES, Fit, fit_ridge
from scanl.learning.forecasting.readout import Ridge
from scanl.learning.optimizers import OPTIMIZERS
from scanl.learning.run.config import TrainConfig
from scanl.learning.run.plan import RunLength, rate
from scanl.models import Features, RandomFilters, SequenceClassifier, SequenceRegressor, Stack
from scanl.models.stack import Backbone
from scanl.whole import is_whole, whole_number

ROWS, STEPS = 256, 2**16  # most series, and most steps of all series, that are read at once in a prediction
LINES = 10  # that `verbose` prints in a fit
LAYER, TRAINING_STEPS = "hawk", 300  # of a stack, where they are left open
LONGEST = 0.25  # time constant of the filters, in lengths of the series
# Series, and most filters for more of them: the readout takes the time of features cubed.
MANY_SERIES, FILTERS_OF_MANY = 2048, 512
MEMORY = 2**24  # most filters times series
PIECEWISE = 256  # filters whose readout is learnt from series that come in pieces
SHARPNESS = tuple(np.geomspace(0.5, 20, 40))  # factors of the scores before the softmax


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
    chosen, plan = config.training, RunLength(steps)
    optimizer = OPTIMIZERS[chosen.optimizer](model, chosen.lr, chosen.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(plan, chosen.warmup, step))
    try:
        model.train()
        descend(list(model.parameters()), optimizer, schedule, steps, step_loss, clip, after)
    finally:
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
    device = next(model.parameters()).device
    stack = getattr(model, "stack", None)
    at_once = x.shape[1] if isinstance(stack, Backbone) and stack.bidirectional else STEPS
    answers = []
    for rows in x.split(max(1, min(ROWS, STEPS // x.shape[1]))):
        output, state = None, None
        for piece in rows.split(at_once, 1):
            output, state = model(piece.to(device), state)
        answers.append(output)
    return torch.cat(answers).cpu()


METHODS = ("filters", "stack")
OF_FILTERS, OF_STACK = ({"method": method} for method in METHODS)


@dataclass(eq=False, repr=False)
class Trained:
    """The options of a model and of its training, each kept under its name, as scikit-learn and aeon want it.

    method: "filters", the model is `RandomFilters` with a readout in closed form; or "stack", a stack is trained: hawk
    and 300 steps where layer and steps are None. An option of the other method raises ConfigError.

    Of a stack:
    layer, dim, depth: of the `Stack`.   stack_options: its further arguments, by name.
    steps, batch_size, lr: of training.
    early_stopping: whether to hold out series, measure their loss after each pass over the others, end when it has not
    fallen for `n_iter_no_change` passes, and return to the weights with the smallest one.
    validation_fraction: share of the series that are held out, of each class alike.

    Of filters:
    filter_options: arguments of `RandomFilters`, by name.   penalty: of its readout. What is left open is chosen.

    Of both:
    random_state: seed of weights and order: a whole number; or a RandomState, a Generator, or None for the global
    generator of NumPy, which give another seed at each fit.
    device: of torch, on which a stack is trained and stays; None: the processor, where filters always are.
    verbose: 1 prints the loss ten times in a fit; 0 prints nothing.
    """

    layer: str | None = field(default=None, metadata=OF_STACK)
    dim: int = field(default=32, metadata=OF_STACK)
    depth: int = field(default=1, metadata=OF_STACK)
    _: KW_ONLY
    stack_options: Mapping[str, Any] | None = field(default=None, metadata=OF_STACK)
    steps: int | None = field(default=None, metadata=OF_STACK)
    batch_size: int = field(default=32, metadata=OF_STACK)
    lr: float = field(default=3e-3, metadata=OF_STACK)
    method: str = "filters"
    filter_options: Mapping[str, Any] | None = field(default=None, metadata=OF_FILTERS)
    penalty: float | None = field(default=None, metadata=OF_FILTERS)
    random_state: Any = 0
    device: Any = None
    verbose: int = 0
    early_stopping: bool = field(default=False, metadata=OF_STACK)
    validation_fraction: float = 0.1  # scikit-learn's checks set these two of any estimator
    n_iter_no_change: int = 10

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def _trains(self) -> bool:
        """Whether the method is a stack. Raises ConfigError for another method, and for an option of the other one."""
        who = type(self).__name__
        if self.method not in METHODS:
            raise ConfigError(f"{who}: method is {self.method!r}, expected one of {', '.join(METHODS)}")
        for option in fields(self):
            value, owner = getattr(self, option.name, option.default), option.metadata.get("method", self.method)
            if owner != self.method and value is not option.default and value != option.default:
                raise ConfigError(
                    f"{who}: {option.name} is {value!r}, expected {option.default!r} because method is "
                    f"{self.method!r}; give method={owner!r}, or leave the option out"
                )
        return self.method == "stack"


@dataclass(eq=False, repr=False)
class _Estimator(Trained, BaseEstimator):
    """The base class of the two estimators. X: (n, T) or (n, T, C) series of equal length; NaN is missing.

    warm_start: whether a further `fit` trains the weights of the last one on. The scales of the first fit stay,
    and X must have its form.
    """

    warm_start: bool = field(default=False, kw_only=True, metadata=OF_STACK)
    model_: Any = field(init=False, repr=False)  # set by `fit`
    trained_: bool = field(init=False, repr=False)  # whether `model_` is a stack
    choice_: dict[str, Any] = field(init=False, repr=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.allow_nan = True
        tags.non_deterministic = False
        return tags

    def _read(self, X: Any, y: Any = None, reset: bool | None = None, **options: Any) -> tuple[Tensor, Any]:
        """Check X, and y when it fits, and return X as (n, T, C) in float64, because the model standardises it.

        reset: whether the form of X is that of all further series; None: in a fit that is no warm start.
        """
        reset = y is not None and not self._warm if reset is None else reset
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
        return self.warm_start and getattr(self, "trained_", False)

    @property
    def _is_first(self) -> bool:
        """Whether the series that come are the first piece: no stack, or no readout in pieces, is there to go on."""
        return not (getattr(self, "trained_", False) if self._trains else hasattr(self, "ridge_"))

    def _begin_anew(self, model: nn.Module, trained: bool) -> None:
        """Set `model_`, and forget what was learnt with another one."""
        for name in ("ridge_", "optimizer_", "errors_"):
            vars(self).pop(name, None)
        self.model_, self.trained_ = model, trained

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
        return Stack(self.dim, self.depth, self.layer or LAYER, **(self.stack_options or {}))

    def _inputs(self, x: Tensor, weights: NDArray[np.float64]) -> Features:
        scales = [list(_scale(channel.numpy(), weights)) for channel in x.unbind(2)]
        return Features(x.shape[2], scales, missing=True)

    def _loss(self, x: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """Return the mean loss of series and their targets, each multiplied by its weight."""
        raise NotImplementedError

    def _losses(self, predictions: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the sums of the losses (S,) of predictions of the filters, for each factor by which they may be."""
        raise NotImplementedError

    def _doubt(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return what is added to `_losses`, so that probabilities are no surer than the number of series allows."""
        return torch.zeros(1, dtype=torch.float64)

    def _fit_filters(
        self,
        x: Tensor,
        targets: Tensor,
        weights: NDArray[np.float64],
        of_loss: NDArray[np.float64],
        seed: int,
        filters: int | None = None,
    ) -> Fit:
        """Make `model_` of random filters, with the readout that predicts series best that are left out one by one.

        targets: (n, O).   weights, of_loss: (n,), of the series and of their errors.   filters: K; None: by n.
        """
        penalties = PENALTIES if self.penalty is None else [self.penalty]
        filters = filters or (1024 if len(x) <= MANY_SERIES else max(1, min(FILTERS_OF_MANY, MEMORY // len(x))))
        options = {"filters": filters, **(self.filter_options or {})}
        w, known = torch.from_numpy(of_loss), ~x.isnan()
        steps = known.any(2)
        options = {"longest": max(2.0, LONGEST * steps.sum(1).double().mean().item()), **options}
        open_choices = {"leave_out": [False] if steps.all() else [False, True], "last": [False, True]}
        values = [[options[name]] if name in options else choice for name, choice in open_choices.items()]
        best: tuple[float, RandomFilters, Fit, int] | None = None
        for leave_out, last in itertools.product(*values):
            torch.manual_seed(seed)
            counted = steps if leave_out else torch.ones_like(steps)
            inputs = Features(x.shape[2], self._inputs(x, weights).scales, missing=bool((~known)[counted].any()))
            model = RandomFilters(targets.shape[1], inputs, **{**options, "leave_out": leave_out, "last": last})
            model.prepare(x)
            fit = fit_ridge(_features(model, x), targets, w, penalties)
            losses = self._losses(fit.predictions, targets, w) + w.mean() * self._doubt(fit.predictions, targets)
            loss, factor = (losses / w.sum()).min(0)
            if self.verbose:
                print(
                    f"{type(self).__name__}: {model.thresholds.shape[1]} filters, leave_out={leave_out}, last={last}: "
                    f"loss {loss:.4g} of series that are left out"
                )
            if best is None or loss.item() < best[0]:
                best = loss.item(), model, fit, int(factor)
        assert best is not None
        loss, model, fit, factor = best
        self._begin_anew(model, trained=False)
        self.choice_ = {**self.model_.config, "penalty": fit.penalty, "loss": loss}
        self._set_readout(fit.weight, fit.bias, factor)
        return fit

    @torch.no_grad()
    def _set_readout(self, weight: Tensor, bias: Tensor, factor: int) -> None:
        """Set the readout of the filters. factor: number of the factor of `_losses`."""
        self.model_.readout.weight.copy_(weight)
        self.model_.readout.bias.copy_(bias)

    def _add_piece(
        self,
        x: Tensor,
        targets: Tensor,
        weights: NDArray[np.float64],
        of_loss: NDArray[np.float64],
        seed: int,
        first: bool,
    ) -> None:
        """Learn the readout of the filters from one more piece of the series; the first one makes the filters."""
        w, predictions = torch.from_numpy(of_loss), targets
        if first:
            fit = self._fit_filters(x, targets, weights, of_loss, seed, PIECEWISE)
            spread = _features(self.model_, x).double().std(0, correction=0)
            self.spread_ = torch.where(spread > 1e-9, spread, 1)
            self.ridge_, predictions = Ridge(fit.penalty), fit.predictions
            self.losses_ = w.mean() * self._doubt(fit.predictions, targets)
        features = _features(self.model_, x).double() / self.spread_
        if not first:
            weight, bias = self.ridge_.solve()
            predictions = features @ weight.T + bias
        self.losses_ = self.losses_ + self._losses(predictions, targets, w)
        weight, bias = self.ridge_.add(features, targets.double(), w).solve()
        self._set_readout(weight / self.spread_, bias, int(self.losses_.argmin()))

    def _train_piece(self, x: Tensor, targets: Tensor, weights: NDArray[np.float64], seed: int) -> None:
        """Train `model_` by one pass over a piece of the series, with a constant learning rate."""
        who = type(self).__name__
        check_sizes(who, batch_size=self.batch_size)
        chosen = TrainConfig.of(lr=self.lr).training
        if not hasattr(self, "optimizer_"):
            self.optimizer_ = OPTIMIZERS[chosen.optimizer](self.model_, chosen.lr, chosen.weight_decay)
        rows = torch.from_numpy(np.random.default_rng(seed).permutation(len(x))).split(self.batch_size)
        device, factors = next(self.model_.parameters()).device, torch.from_numpy(weights)

        def once(step: int) -> Tensor:
            here = rows[step]
            return self._loss(x[here].to(device), targets[here].to(device), factors[here].to(device))

        schedule = torch.optim.lr_scheduler.ConstantLR(self.optimizer_, 1.0)
        try:
            self.model_.train()
            descend(list(self.model_.parameters()), self.optimizer_, schedule, len(rows), once, 1.0)
        finally:
            self.model_.eval()

    def _train(self, x: Tensor, targets: Tensor, weights: NDArray[np.float64], seed: int) -> None:
        """Train `model_` with rows that are drawn anew for each step. weights: (n,), of the losses."""
        who, steps = type(self).__name__, TRAINING_STEPS if self.steps is None else self.steps
        check_sizes(who, steps=steps, batch_size=self.batch_size, n_iter_no_change=self.n_iter_no_change)
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
            line = self.verbose and (step + 1) * LINES // steps > step * LINES // steps
            if line:
                print(f"{who}: step {step + 1} of {steps}, loss {loss:.4g}")
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

        optimize(self.model_, steps, self.lr, seed, once, after=after)
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
        method, layer, dim, depth, stack_options, steps, batch_size, lr, filter_options, penalty, random_state, device,
        verbose, early_stopping, validation_fraction, n_iter_no_change: as in `Trained`.
        warm_start: whether a further `fit` trains the weights of the last one on, with its classes and scales.
        pool: what the class is read from: "mean" of the steps' features, or the "last" one, which knows where in the
            series a number stood if the layer remembers it.
        class_weight: weights of the classes' losses: a dict by class, in which 1 stands for a class that is absent;
            or "balanced" for the inverse of each class's share; None: 1.

    Fitted: `classes_`, and `model_`: `RandomFilters`, whose outputs are logits, or a `SequenceClassifier`. Of filters,
    `choice_` has the options, the penalty, the sharpness of the logits, and the mean loss of series that are left out
    one by one.
    """

    pool: Any = field(default="mean", kw_only=True, metadata=OF_STACK)
    class_weight: Any = field(default=None, kw_only=True)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on series X (n, T) or (n, T, C) and their classes y (n,).

        sample_weight: (n,), of the series' losses, and of the mean and deviation by which X is standardised; None: 1.
        A weight of 0 equals the absence of the series. A weight of 2 equals the series twice, up to rounding, if
        `batch_size` is at least the number of series, repeated ones too. In smaller batches it does so in the mean
        over batches only, because the series drawn are others.
        """
        x, answers, weights = self._series(X, y, sample_weight)
        classes, codes = np.unique(answers, return_inverse=True)
        if self._warm and classes.tolist() != self.classes_.tolist():
            raise ValueError(
                f"{type(self).__name__}: y has the classes {classes.tolist()}, expected {self.classes_.tolist()} of "
                "the last fit because of warm_start"
            )
        self.classes_ = classes
        who = type(self).__name__
        seed, device = seed_of(who, self.random_state), device_of(who, self.device)
        with seeded(seed, device):
            if not self._trains:
                x, codes, weights = _distinct(x, codes[:, None], weights)
                codes = codes[:, 0].astype(np.int64)
                self._fit_filters(x, self._signs(codes), weights, self._of_loss(codes, weights), seed)
                return self
            if not self._warm:
                self._begin(x, weights)
            self.model_.to(device)
            self._train(x, torch.from_numpy(codes), self._of_loss(codes, weights), seed)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Learn from a further piece of the series. The first piece makes the model and the scales of X.

        classes: all classes; needed with the first piece. X, y, sample_weight: as in `fit`.
        A stack is trained by one pass over the piece; it also goes on after `fit`. The readout of filters is the ridge
        regression on all pieces so far; it has the penalty of the first one, and 256 filters unless `filter_options`
        has another number. After `fit`, filters begin anew.
        """
        first = self._is_first
        who = type(self).__name__
        if classes is None and not hasattr(self, "classes_"):
            raise ValueError(f"{who}: classes is None, expected all classes in the first call of partial_fit")
        if first:
            self.classes_ = self.classes_ if classes is None else np.unique(classes)
        elif classes is not None and np.unique(classes).tolist() != self.classes_.tolist():
            raise ValueError(f"{who}: classes is {list(classes)}, expected {self.classes_.tolist()} of the first call")
        x, answers, weights = self._series(X, y, sample_weight, reset=first)
        codes = np.searchsorted(self.classes_, answers).clip(max=len(self.classes_) - 1)
        other = self.classes_[codes] != answers
        if other.any():
            raise ValueError(f"{who}: y has the class {answers[other][0]!r}, expected one of {self.classes_.tolist()}")
        seed, device = seed_of(who, self.random_state), device_of(who, self.device)
        with seeded(seed, device):
            if not self._trains:
                self._add_piece(x, self._signs(codes), weights, self._of_loss(codes, weights), seed, first)
                return self
            if first:
                self._begin(x, weights)
            self.model_.to(device)
            self._train_piece(x, torch.from_numpy(codes), self._of_loss(codes, weights), seed)
        return self

    def _series(
        self, X: Any, y: Any, sample_weight: Any, reset: bool | None = None
    ) -> tuple[Tensor, NDArray[Any], NDArray[np.float64]]:
        """Return the series whose weight is not 0, their classes and weights, all checked."""
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        x, answers = self._read(X, y, reset)
        check_classification_targets(answers)
        weights = self._weights(sample_weight, len(x))
        counted = weights > 0
        return x[torch.from_numpy(counted)], answers[counted], weights[counted]

    def _begin(self, x: Tensor, weights: NDArray[np.float64]) -> None:
        """Make a stack that has learnt nothing."""
        inputs = self._inputs(x, weights)
        model = SequenceClassifier(len(self.classes_), self._stack(), inputs, pool=self.pool)
        self._begin_anew(model, trained=True)

    def _of_loss(self, codes: NDArray[Any], weights: NDArray[np.float64]) -> NDArray[np.float64]:
        return weights * self._class_weights(codes, weights)[codes]

    def _signs(self, codes: NDArray[Any]) -> Tensor:
        """Return 1 for the class of each series and -1 for the others, (n, classes)."""
        return 2.0 * F.one_hot(torch.from_numpy(codes), len(self.classes_)).double() - 1

    def _losses(self, predictions: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        logits = predictions.double() * torch.tensor(SHARPNESS)[:, None, None]
        codes = targets.argmax(1).expand(len(SHARPNESS), -1)
        return F.cross_entropy(logits.transpose(1, 2), codes, reduction="none") @ weights

    def _doubt(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return the losses of one more series, which is classified as surely as the others, but wrongly."""
        others = predictions.masked_fill(targets > 0, -torch.inf).amax(1)
        margin = (predictions.gather(1, targets.argmax(1, keepdim=True))[:, 0] - others).mean().clamp(min=0)
        return F.softplus(margin.clamp(max=2) * torch.tensor(SHARPNESS))  # of a single class it is infinite

    def _set_readout(self, weight: Tensor, bias: Tensor, factor: int) -> None:
        self.choice_["sharpness"] = float(SHARPNESS[factor])
        super()._set_readout(SHARPNESS[factor] * weight, SHARPNESS[factor] * bias, factor)

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
        return outputs(model, self._read(X)[0]).softmax(-1).float().numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most likely class of each series, (n,)."""
        model = self._fitted()
        return self.classes_[outputs(model, self._read(X)[0]).argmax(-1).numpy()]


@dataclass(eq=False, repr=False)
class SeriesRegressor(RegressorMixin, _Estimator):
    """Predict one number or several for each series, as an estimator of scikit-learn: `fit`, `predict`.

    Args: as in `SeriesClassifier`, but for pool and class_weight.
        distribution: of the numbers, one of `scanl.models.heads.distributions`. With "points", the loss is the squared
            error in units of the numbers' deviation. The others, such as "gaussian", are of a stack, and have
            intervals.

    Fitted: `model_`: `RandomFilters`, whose outputs are the numbers, or a `SequenceRegressor`. Of filters, `choice_` is
    as in `SeriesClassifier`, and `errors_` (n, O) has the error of each series when it was left out.
    """

    distribution: str = field(default="points", kw_only=True, metadata=OF_STACK)
    errors_: Any = field(init=False, repr=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on series X (n, T) or (n, T, C) and their numbers y (n,) or (n, O).

        sample_weight: as in `SeriesClassifier.fit`; y is standardised by these weights too.
        """
        x, numbers, weights = self._series(X, y, sample_weight)
        who = type(self).__name__
        seed, device = seed_of(who, self.random_state), device_of(who, self.device)
        with seeded(seed, device):
            if not self._trains:
                x, distinct, weights = _distinct(x, numbers.numpy(), weights)
                self._set_scales(distinct, weights)
                targets = (torch.from_numpy(distinct) - self.scales_[:, 0]) / self.scales_[:, 1]
                fit = self._fit_filters(x, targets, weights, weights, seed)
                self.errors_ = ((targets - fit.predictions) * self.scales_[:, 1]).numpy()
                return self
            if not self._warm:
                self._begin(x, numbers, weights)
            self.model_.to(device)
            self._train(x, numbers, weights, seed)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from a further piece of the series, as in `SeriesClassifier.partial_fit`."""
        first = self._is_first
        x, numbers, weights = self._series(X, y, sample_weight, reset=first)
        who = type(self).__name__
        seed, device = seed_of(who, self.random_state), device_of(who, self.device)
        with seeded(seed, device):
            if not self._trains:
                if first:
                    self._set_scales(numbers.numpy(), weights)
                targets = (numbers - self.scales_[:, 0]) / self.scales_[:, 1]
                self._add_piece(x, targets, weights, weights, seed, first)
                return self
            if first:
                self._begin(x, numbers, weights)
            self.model_.to(device)
            self._train_piece(x, numbers, weights, seed)
        return self

    def _series(
        self, X: Any, y: Any, sample_weight: Any, reset: bool | None = None
    ) -> tuple[Tensor, Tensor, NDArray[np.float64]]:
        """Return the series whose weight is not 0, their numbers (n, O) and weights, all checked."""
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        begun = self._warm or (reset is False)
        x, answers = self._read(X, y, reset, multi_output=True, y_numeric=True)
        weights = self._weights(sample_weight, len(x))
        numbers = torch.from_numpy(np.asarray(answers, np.float64).reshape(len(x), -1))
        if begun and numbers.shape[1] != self.outputs_:
            raise ValueError(
                f"{type(self).__name__}: y has {numbers.shape[1]} numbers of a series, expected {self.outputs_} of the "
                "last fit because of " + ("warm_start" if reset is None else "partial_fit")
            )
        self.single_, self.outputs_ = answers.ndim == 1, numbers.shape[1]
        counted = torch.from_numpy(weights > 0)
        return x[counted], numbers[counted], weights[counted.numpy()]

    def _set_scales(self, numbers: NDArray[np.float64], weights: NDArray[np.float64]) -> None:
        """Set `scales_`, mean and deviation of each number, (O, 2)."""
        self.scales_ = torch.tensor([_scale(number[:, None], weights) for number in numbers.T], dtype=torch.float64)

    def _begin(self, x: Tensor, numbers: Tensor, weights: NDArray[np.float64]) -> None:
        """Make a stack that has learnt nothing."""
        self._set_scales(numbers.numpy(), weights)
        model = SequenceRegressor(
            numbers.shape[1],
            self._stack(),
            self._inputs(x, weights),
            pool="mean",
            distribution=self.distribution,
            output_scales=self.scales_.tolist(),
        )
        self._begin_anew(model, trained=True)

    def _losses(self, predictions: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return ((predictions - targets).square().mean(1) @ weights)[None]

    def _set_readout(self, weight: Tensor, bias: Tensor, factor: int) -> None:
        location, scale = self.scales_.unbind(1)
        super()._set_readout(scale[:, None] * weight, location + scale * bias, factor)

    def _loss(self, x: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        return self.model_.loss(x, targets, weights=weights)[0]

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Return the numbers of each series: (n,) or (n, O), as they were in `fit`.

        They are computed in float64. In float32 the last bits would depend on how many series are predicted at once,
        and scikit-learn does not allow that.
        """
        model = self._fitted()
        if self.trained_:
            model, parameters = self._parameters(X)
            numbers = model.head.mean(parameters).numpy()
        else:
            numbers = outputs(model, self._read(X)[0]).numpy()
        return numbers[:, 0] if self.single_ else numbers

    def predict_interval(self, X: Any, levels: Sequence[float] | None = None) -> Any:
        """Return a frame of pandas: a row for each series, with its number and intervals that contain it.

        Columns: `y`, as in `predict`, and for each level the bounds `y-lo-80` and `y-hi-80`; of several numbers `y0`,
        `y0-lo-80` and so on.   levels: per cents of the intervals; None: 80 and 95, or as far as the distribution goes.
        Of filters they are about the number, by the quantiles of the errors of series that were left out in `fit`.
        Raises ConfigError for a stack if the distribution is "points", and for filters after `partial_fit` alone.
        """
        import pandas as pd

        who = type(self).__name__
        model = self._fitted()
        levels = check_levels(who, self.distribution if self.trained_ else "quantiles", levels)
        if not self.trained_ and not hasattr(self, "errors_"):
            raise ConfigError(f"{who}: series were learnt by partial_fit, expected fit because of predict_interval")
        if not levels:
            raise ConfigError(
                f"{who}: distribution is {self.distribution!r}, expected one with intervals because of "
                "predict_interval; 'gaussian' has them"
            )
        sides = [(side, level) for level in levels for side in ("lo", "hi")]
        tails = [(1 - level / 100) / 2 if side == "lo" else (1 + level / 100) / 2 for side, level in sides]
        if self.trained_:
            model, parameters = self._parameters(X)
            means = model.head.mean(parameters)
            bounds = model.head.quantiles(parameters, torch.tensor(tails, dtype=torch.float64))
        else:
            means = outputs(model, self._read(X)[0])
            bounds = means[..., None] + torch.from_numpy(np.quantile(self.errors_, tails, axis=0).T)
        columns = {}
        for number in range(means.shape[1]):
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


@torch.no_grad()
def _features(model: RandomFilters, x: Tensor) -> Tensor:
    """Return the features of series x (n, T, C), of which few are read at once."""
    return torch.cat([model.features(rows)[0] for rows in x.split(max(1, min(ROWS, STEPS // x.shape[1])))])


def _distinct(
    x: Tensor, answers: NDArray[Any], weights: NDArray[np.float64]
) -> tuple[Tensor, NDArray[np.float64], NDArray[np.float64]]:
    """Return the different series with their answers (n, O), and the sums of their weights, in an order of their own.

    So a weight of 2 equals the series twice, and no copy of a series is there when it is left out.
    """
    rows = np.ascontiguousarray(np.concatenate([x.numpy().reshape(len(x), -1), answers], 1, dtype=np.float64))
    _, first, owner = np.unique(rows.view(f"V{rows.shape[1] * 8}")[:, 0], return_index=True, return_inverse=True)
    return x[torch.from_numpy(first)], rows[first, -answers.shape[1] :], np.bincount(owner, weights).astype(np.float64)


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
