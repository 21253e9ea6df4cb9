"""The base class of the estimators: what they read, how they fit, and which weights they keep."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from scanl.errors import ConfigError, DataError
from scanl.learning.descent import descend, optimize, seeded
from scanl.learning.estimators.options import OF_STACK, EstimatorOptions, device_of, seed_of
from scanl.learning.estimators.series import refuse_unequal, weights_of
from scanl.learning.forecasting.leave_one_out import PENALTIES, Fit
from scanl.learning.forecasting.readout import Ridge
from scanl.learning.optimizers import OPTIMIZERS
from scanl.learning.run.config import TrainConfig
from scanl.learning.series.examples import Examples, are_equal, features_of, outputs, rows_at_once
from scanl.learning.series.filters import FilterFit, fit_filters, set_readout
from scanl.learning.series.readouts import Readout
from scanl.models import Features
from scanl.whole import check_sizes

LINES = 10  # that `verbose` prints in a fit
PIECEWISE = 96  # filters whose readout is learnt from series that come in pieces


@dataclass(eq=False, repr=False, kw_only=True)
class SeriesEstimator(EstimatorOptions, BaseEstimator):
    """The base class of the two estimators. X: (n, T) or (n, T, C) series of equal length; NaN is missing.

    warm_start: whether a further `fit` trains the weights of the last one on. The scales of the first fit stay,
    and X must have its form.

    A subclass has the targets of answers, and the losses of predictions.
    """

    warm_start: bool = field(default=False, metadata=OF_STACK)
    reading = {}  # options of `validate_data` for the answers  # noqa: RUF012
    model_: Any = field(init=False, repr=False)  # set by `fit`
    trained_: bool = field(init=False, repr=False)  # whether `model_` is a stack
    choice_: dict[str, Any] = field(init=False, repr=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.allow_nan = True
        tags.non_deterministic = False
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on series X (n, T) or (n, T, C) and their answers y: classes (n,), or numbers (n,) or (n, O).

        sample_weight: (n,), of the series' losses, and of the means and deviations by which X and numbers are
        standardised; None: 1. A weight of 0 equals the absence of the series. A weight of 2 equals the series twice, up
        to rounding, if `batch_size` is at least the number of series, repeated ones too. In smaller batches it does so
        in the mean over batches only, because the series drawn are others.
        """
        return self._learn(X, y, sample_weight, piece=False)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from a further piece of the series. The first piece makes the model and the scales of X.

        X, y, sample_weight: as in `fit`.
        A stack is trained by one pass over the piece; it also goes on after `fit`. The readout of filters is the ridge
        regression on all pieces so far; it has the penalty of the first one, and 96 filters unless `filter_options`
        has another number. After `fit`, filters begin anew.
        """
        return self._learn(X, y, sample_weight, piece=True)

    def _learn(self, X: Any, y: Any, sample_weight: Any, piece: bool) -> Self:
        who, begins = type(self).__name__, self._begins(piece)
        if y is None:
            raise ValueError(f"{who} requires y to be passed, but the target y is None")
        x, answers = self._read(X, y, reset=begins)
        weights = weights_of(who, sample_weight, len(x))
        counted = weights > 0
        targets = self._targets(answers[counted], begins, piece)
        examples = Examples(x[torch.from_numpy(counted)], targets, weights[counted])
        seed, device = seed_of(who, self.random_state), device_of(who, self.device)
        with seeded(seed, device):
            if self._trains:
                if begins:
                    self._set_scales(examples)
                    self._set_model(self._model(self._inputs(examples)), trained=True)
                self.model_.to(device)
                (self._train_piece if piece else self._train)(examples, seed)
            elif piece:
                self._add_piece(examples, seed, begins)
            else:
                examples, _ = examples.distinct()
                self._set_scales(examples)
                self._keep_errors(examples, self._fit_filters(examples, seed).fit)
        return self

    def _begins(self, piece: bool) -> bool:
        """Whether the series that come begin a new model: none is there that a fit, or a piece, goes on with."""
        if self._trains:
            return not (getattr(self, "trained_", False) and (piece or self.warm_start))
        return not (piece and hasattr(self, "ridge_"))

    def _set_model(self, model: nn.Module, trained: bool) -> None:
        """Set `model_`, and forget what was learnt with another one."""
        for name in ("ridge_", "optimizer_", "errors_"):
            vars(self).pop(name, None)
        self.model_, self.trained_ = model, trained

    def _read(self, X: Any, y: Any = None, reset: bool = False) -> tuple[Tensor, Any]:
        """Check X, and y when it fits, and return X as (n, T, C) in float64, because the model standardises it.

        reset: whether the form of X is that of all further series.
        """
        refuse_unequal(type(self).__name__, X)
        how: dict[str, Any] = {"allow_nd": True, "ensure_all_finite": "allow-nan", "dtype": np.float64}
        how |= {} if y is None else self.reading
        checked: Any = validate_data(self, X, *(() if y is None else (y,)), reset=reset, **how)
        x, answers = (checked, None) if y is None else checked
        if x.ndim > 3:
            raise ValueError(f"Found array with dim {x.ndim}, expected (n, T) or (n, T, C)")
        channels = 1 if x.ndim == 2 else x.shape[2]
        if reset:
            self.channels_ = channels
        if channels != self.channels_:
            raise ValueError(f"X has {channels} channels, expected {self.channels_} as in fit")
        return torch.from_numpy(np.ascontiguousarray(x.reshape(*x.shape[:2], channels))), answers

    def _inputs(self, examples: Examples) -> Features:
        return Features(examples.x.shape[2], examples.scales(), missing=True)

    def _targets(self, answers: NDArray[Any], begins: bool, piece: bool) -> Tensor:
        """Return the targets of a stack for the answers, checked. With `begins`, set their form."""
        raise NotImplementedError

    def _set_scales(self, examples: Examples) -> None:
        """Set the scales of the targets, if they have some."""

    def _model(self, inputs: Features) -> nn.Module:
        """Make a stack that has learnt nothing."""
        raise NotImplementedError

    def _loss_weights(self, examples: Examples) -> NDArray[np.float64]:
        """Return the weights (n,) of the series' losses."""
        return examples.weights

    def _loss(self, x: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """Return the mean loss of series and their targets, each multiplied by its weight."""
        raise NotImplementedError

    def _readout(self) -> Readout:
        """Return what the readout of filters is fitted to."""
        raise NotImplementedError

    def _keep_errors(self, examples: Examples, fit: Fit) -> None:
        """Keep the errors of the series that were left out, if predictions need them."""

    def _fit_filters(self, examples: Examples, seed: int, options: Mapping[str, Any] | None = None) -> FilterFit:
        """Make `model_` of random filters, as `fit_filters` does. options: of filters, before those of the user."""

        def report(line: str) -> None:
            if self.verbose:
                print(f"{type(self).__name__}: {line}")

        found = fit_filters(
            examples,
            self._readout(),
            self._inputs(examples),
            torch.from_numpy(self._loss_weights(examples)),
            seed,
            {**(options or {}), **(self.filter_options or {})},
            PENALTIES if self.penalty is None else [self.penalty],
            report,
        )
        self._set_model(found.model, trained=False)
        self.choice_ = {**found.options, "penalty": found.fit.penalty, "loss": found.loss}
        return found

    def _add_piece(self, examples: Examples, seed: int, begins: bool) -> None:
        """Learn the readout of the filters from one more piece of the series; the first one makes the filters."""
        if begins:
            self._set_scales(examples)
            found = self._fit_filters(examples, seed, {"filters": PIECEWISE})
            self.losses_ = found.losses
            spread = features_of(self.model_, examples.x).double().std(0, correction=0)
            self.spread_ = torch.where(spread > 1e-9, spread, 1)
            self.ridge_ = Ridge(found.fit.penalty)
        readout, features = self._readout(), features_of(self.model_, examples.x).double() / self.spread_
        targets, w = readout.targets(examples.targets), torch.from_numpy(self._loss_weights(examples))
        if not begins:
            weight, bias = self.ridge_.solve()
            self.losses_ = self.losses_ + readout.losses(features @ weight.T + bias, targets, w)
        weight, bias = self.ridge_.add(features, targets.double(), w).solve()
        set_readout(self.model_, readout, weight / self.spread_, bias, int(self.losses_.argmin()))

    def _loss_of_rows(self, examples: Examples, weights: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Return the loss of some series, by their numbers. weights: (n,), of the losses; None: all are equal."""
        x, targets, _ = examples
        device = next(self.model_.parameters()).device

        def loss(rows: Tensor) -> Tensor:
            of_rows = None if weights is None else weights[rows].to(device)
            return self._loss(x[rows].to(device), targets[rows].to(device), of_rows)

        return loss

    def _train_piece(self, examples: Examples, seed: int) -> None:
        """Train `model_` by one pass over a piece of the series, with a constant learning rate."""
        check_sizes(type(self).__name__, batch_size=self.batch_size)
        chosen = TrainConfig.of(lr=self.lr).training
        if not hasattr(self, "optimizer_"):
            self.optimizer_ = OPTIMIZERS[chosen.optimizer](self.model_, chosen.lr, chosen.weight_decay)
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(examples.x))).split(self.batch_size)
        loss = self._loss_of_rows(examples, torch.from_numpy(self._loss_weights(examples)))
        schedule = torch.optim.lr_scheduler.ConstantLR(self.optimizer_, 1.0)
        try:
            self.model_.train()
            descend(
                list(self.model_.parameters()), self.optimizer_, schedule, len(order), lambda i: loss(order[i]), 1.0
            )
        finally:
            self.model_.eval()

    def _train(self, examples: Examples, seed: int) -> None:
        """Train `model_` with rows that are drawn anew for each step."""
        who, steps = type(self).__name__, self._steps
        check_sizes(who, steps=steps, batch_size=self.batch_size, n_iter_no_change=self.n_iter_no_change)
        draw, weights = np.random.default_rng(seed), self._loss_weights(examples)
        loss = self._loss_of_rows(examples, None if are_equal(weights) else torch.from_numpy(weights / weights.mean()))
        learnt, check = self._split(examples.targets, draw)
        size = min(self.batch_size, len(learnt))
        best, smallest, misses = None, np.inf, 0

        def once(_: int) -> Tensor:
            return loss(learnt[torch.from_numpy(draw.choice(len(learnt), size, replace=False))])

        def after(step: int, value: float) -> bool:
            nonlocal best, smallest, misses
            if self.verbose and (step + 1) * LINES // steps > step * LINES // steps:
                print(f"{who}: step {step + 1} of {steps}, loss {value:.4g}")
            if not len(check) or (step + 1) % -(-len(learnt) // size):
                return False
            self.model_.eval()
            with torch.no_grad():
                held_out = sum(loss(rows).item() * len(rows) for rows in check.split(rows_at_once(examples.x)))
            self.model_.train()
            if held_out < smallest:
                best, smallest, misses = copy.deepcopy(self.model_.state_dict()), held_out, 0
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

    def _outputs(self, X: Any) -> Tensor:
        """Return the outputs of the model for series. Raises NotFittedError before `fit`."""
        check_is_fitted(self)
        return outputs(self.model_, self._read(X)[0])
