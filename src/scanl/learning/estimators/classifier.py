"""A classifier of series."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.learning.estimators.base import SeriesEstimator
from scanl.learning.estimators.options import OF_STACK
from scanl.learning.series.examples import Examples
from scanl.learning.series.filters import FilterFit
from scanl.learning.series.readouts import SHARPNESS, ClassReadout
from scanl.models import Features, SequenceClassifier


@dataclass(eq=False, repr=False, kw_only=True)
class SeriesClassifier(ClassifierMixin, SeriesEstimator):
    """Classify series, as an estimator of scikit-learn: `fit`, `predict`, `predict_proba`.

    Args:
        method, layer, dim, depth, stack_options, steps, batch_size, lr, filter_options, penalty, random_state, device,
        verbose, early_stopping, validation_fraction, n_iter_no_change: as in `EstimatorOptions`.
        warm_start: whether a further `fit` trains the weights of the last one on, with its classes and scales.
        pool: what the class is read from: "mean" of the steps' features, or the "last" one, which knows where in the
            series a number stood if the layer remembers it.
        class_weight: weights of the classes' losses: a dict by class, in which 1 stands for a class that is absent;
            or "balanced" for the inverse of each class's share; None: 1.

    Fitted: `classes_`, and `model_`: `RandomFilters`, whose outputs are logits, or a `SequenceClassifier`. Of filters,
    `choice_` has the options, the penalty, the sharpness of the logits, and the mean loss of series that are left out
    one by one.
    """

    pool: Any = field(default="mean", metadata=OF_STACK)
    class_weight: Any = None

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]: scikit-learn has the classes third
        """Learn from a further piece of the series, as `SeriesEstimator.partial_fit` says.

        classes: all classes; needed with the first piece.
        """
        who = type(self).__name__
        if classes is None and not hasattr(self, "classes_"):
            raise ValueError(f"{who}: classes is None, expected all classes in the first call of partial_fit")
        if self._begins(piece=True):
            self.classes_ = self.classes_ if classes is None else np.unique(classes)
        elif classes is not None and np.unique(classes).tolist() != self.classes_.tolist():
            raise ValueError(f"{who}: classes is {list(classes)}, expected {self.classes_.tolist()} of the first call")
        return super().partial_fit(X, y, sample_weight)

    def _targets(self, answers: NDArray[Any], begins: bool, piece: bool) -> Tensor:
        """Return the number of each series' class."""
        check_classification_targets(answers)
        who = type(self).__name__
        if piece:
            codes = np.searchsorted(self.classes_, answers).clip(max=len(self.classes_) - 1)
            other = answers[self.classes_[codes] != answers]
            if len(other):
                raise ValueError(f"{who}: y has the class {other[0]!r}, expected one of {self.classes_.tolist()}")
            return torch.from_numpy(codes)
        classes, codes = np.unique(answers, return_inverse=True)
        if not begins and classes.tolist() != self.classes_.tolist():
            raise ValueError(
                f"{who}: y has the classes {classes.tolist()}, expected {self.classes_.tolist()} of the last fit "
                "because of warm_start"
            )
        self.classes_ = classes
        return torch.from_numpy(codes)

    def _model(self, inputs: Features) -> nn.Module:
        return SequenceClassifier(len(self.classes_), self._stack(), inputs, pool=self.pool)

    def _loss_weights(self, examples: Examples) -> NDArray[np.float64]:
        codes, weights = examples.targets.numpy(), examples.weights
        return weights * self._class_weights(codes, weights)[codes]

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

    def _readout(self) -> ClassReadout:
        return ClassReadout(len(self.classes_))

    def _fit_filters(self, examples: Examples, seed: int, options: Mapping[str, Any] | None = None) -> FilterFit:
        found = super()._fit_filters(examples, seed, options)
        self.choice_["sharpness"] = float(SHARPNESS[found.factor])
        return found

    def predict_proba(self, X: Any) -> NDArray[np.float32]:
        """Return the probability of each class, (n, classes)."""
        return self._outputs(X).softmax(-1).float().numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most likely class of each series, (n,)."""
        codes = self._outputs(X).argmax(-1).numpy()
        return self.classes_[codes]
