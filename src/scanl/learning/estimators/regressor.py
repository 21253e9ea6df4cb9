"""A regressor of series."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.learning.estimators.base import SeriesEstimator
from scanl.learning.estimators.options import OF_STACK
from scanl.learning.forecasting.answer_columns import check_levels
from scanl.learning.forecasting.leave_one_out import Fit
from scanl.learning.series.examples import Examples, outputs, weighted_scale
from scanl.learning.series.readouts import NumberReadout
from scanl.models import Features, SequenceRegressor


@dataclass(eq=False, repr=False, kw_only=True)
class SeriesRegressor(RegressorMixin, SeriesEstimator):
    """Predict one number or several for each series, as an estimator of scikit-learn: `fit`, `predict`.

    Args: as in `SeriesClassifier`, but for pool and class_weight.
        distribution: of the numbers, one of `scanl.models.heads.distributions`. With "points", the loss is the squared
            error in units of the numbers' deviation. The others, such as "gaussian", are of a stack, and have
            intervals.

    Fitted: `model_`: `RandomFilters`, whose outputs are the numbers, or a `SequenceRegressor`. Of filters, `choice_` is
    as in `SeriesClassifier`, and `errors_` (n, O) has the error of each series when it was left out.
    """

    distribution: str = field(default="points", metadata=OF_STACK)
    reading = {"multi_output": True, "y_numeric": True}  # noqa: RUF012
    errors_: Any = field(init=False, repr=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _targets(self, answers: NDArray[Any], begins: bool, piece: bool) -> Tensor:
        """Return the numbers (n, O)."""
        numbers = torch.from_numpy(np.asarray(answers, np.float64).reshape(len(answers), -1))
        if not begins and numbers.shape[1] != self.outputs_:
            raise ValueError(
                f"{type(self).__name__}: y has {numbers.shape[1]} numbers of a series, expected {self.outputs_} of the "
                f"last fit because of {'partial_fit' if piece else 'warm_start'}"
            )
        self.single_, self.outputs_ = answers.ndim == 1, numbers.shape[1]
        return numbers

    def _set_scales(self, examples: Examples) -> None:
        """Set `scales_`, mean and deviation of each number, (O, 2)."""
        scales = [weighted_scale(number[:, None].numpy(), examples.weights) for number in examples.targets.T]
        self.scales_ = torch.tensor(scales, dtype=torch.float64)

    def _model(self, inputs: Features) -> nn.Module:
        return SequenceRegressor(
            self.outputs_,
            self._stack(),
            inputs,
            pool="mean",
            distribution=self.distribution,
            output_scales=self.scales_.tolist(),
        )

    def _loss(self, x: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        return self.model_.loss(x, targets, weights=weights)[0]

    def _readout(self) -> NumberReadout:
        return NumberReadout(self.scales_)

    def _keep_errors(self, examples: Examples, fit: Fit) -> None:
        targets = self._readout().targets(examples.targets)
        self.errors_ = ((targets - fit.predictions) * self.scales_[:, 1]).numpy()

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Return the numbers of each series: (n,) or (n, O), as they were in `fit`.

        They are computed in float64. In float32 the last bits would depend on how many series are predicted at once,
        and scikit-learn does not allow that.
        """
        numbers = self._distribution(X)[0].numpy()
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
        check_is_fitted(self)
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
        means, bounds = self._distribution(X, tails)
        columns = {}
        for number in range(means.shape[1]):
            name = "y" if self.single_ else f"y{number}"
            columns[name] = means[:, number].numpy()
            for place, (side, level) in enumerate(sides):
                columns[f"{name}-{side}-{level:g}"] = bounds[:, number, place].numpy()
        return pd.DataFrame(columns)

    @torch.no_grad()
    def _distribution(self, X: Any, tails: Sequence[float] = ()) -> tuple[Tensor, Tensor]:
        """Return the means (n, O) of the numbers, and their quantiles (n, O, tails)."""
        check_is_fitted(self)
        x, _ = self._read(X)
        if self.trained_:
            model: Any = copy.deepcopy(self.model_).double()
            parameters = outputs(model, x)
            head = model.cpu().head
            means = head.mean(parameters)
            return means, head.quantiles(parameters, torch.tensor(tails, dtype=torch.float64)) if tails else means
        means = outputs(self.model_, x)
        return means, means[..., None] + torch.from_numpy(
            np.quantile(self.errors_, tails, axis=0).T
        ) if tails else means
