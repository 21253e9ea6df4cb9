"""Learners as estimators of river: `predict_one`, `learn_one`, in pipelines, with river's metrics and evaluation.

This module imports river: `pip install 'scanl[online]'`.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from river import base

from scanl.errors import ConfigError
from scanl.learning.online.answers import AnswerClass, Answering, AnswerNumbers
from scanl.learning.online.online import Online
from scanl.learning.online.scaling import SPAN
from scanl.models import Stack


@dataclass(eq=False, repr=False, kw_only=True)
class RiverLearner(base.Estimator):
    """The base class of both estimators.

    Args:
        layer, dim, depth: of the `Stack`.   algorithm, optimizer, lr, block, span: as in `Online`.
        feedback: whether the last truth is an input too.   seed: of the weights.   features: largest number of them.

    `predict_one` of a sample that `learn_one` has not read yet advances no state, as river wants: the state changes in
    `learn_one` alone. Features take places as in `Online`: `features` of them, if it is given. Put
    `river.preprocessing.FeatureHasher` or `OneHotEncoder` before, if features have text.
    """

    layer: str = "lru"
    dim: int = 64
    depth: int = 1
    algorithm: str = "bptt"
    optimizer: str = "adamw"
    lr: float = 1e-3
    block: int = 1
    span: int = SPAN
    feedback: bool = True
    seed: int = 0
    features: int | None = None

    def __post_init__(self) -> None:
        if self.features is not None and self.features < 1:
            raise ConfigError(f"{type(self).__name__}: features is {self.features}, expected at least 1, or None")
        names = ("algorithm", "optimizer", "lr", "block", "span")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            stack = Stack(self.dim, self.depth, self.layer)
            self._online = Online(stack, self._kind(), **{name: getattr(self, name) for name in names})
        if self.features is not None:
            self._online.begin(self.features)

    def _kind(self) -> Answering:
        raise NotImplementedError

    def learn_one(self, x: Mapping[Hashable, Any], y: Any) -> None:
        """Read a sample and its truth, and learn from it."""
        self._online.learn_one(x, y)

    @property
    def _raw_memory_usage(self) -> int:
        """Bytes of the pickled estimator. river adds up what Python knows of, which leaves out tensors."""
        return len(self._online.__getstate__()["loop"])


class RiverRegressor(RiverLearner, base.Regressor):
    """A recurrent regressor of river that learns sample by sample. Args: as in `RiverLearner`."""

    def _kind(self) -> AnswerNumbers:
        return AnswerNumbers(1, self.span, self.feedback)

    def predict_one(self, x: Mapping[Hashable, Any]) -> float:
        """Return the number that is expected with a sample; 0 before the first is learnt."""
        return self._online.predict_one(x)


@dataclass(eq=False, repr=False, kw_only=True)
class RiverClassifier(RiverLearner, base.Classifier):
    """A recurrent classifier of river that learns sample by sample.

    Args:
        classes: largest number of classes; they are known once they have been seen.
        The others as in `RiverLearner`.
    """

    classes: int = 10

    def __post_init__(self) -> None:
        if self.classes < 2:
            raise ConfigError(f"RiverClassifier: classes is {self.classes}, expected at least 2")
        super().__post_init__()

    @property
    def _multiclass(self) -> bool:
        return True

    def _kind(self) -> AnswerClass:
        return AnswerClass(self.classes, self.feedback)

    def predict_proba_one(self, x: Mapping[Hashable, Any], **kwargs: Any) -> dict[Any, float]:
        """Return the probability of each class that has been seen."""
        return self._online.predict_proba_one(x)

    def predict_one(self, x: Mapping[Hashable, Any], **kwargs: Any) -> Any:
        """Return the likeliest class, None before the first is learnt."""
        return self._online.predict_one(x)
