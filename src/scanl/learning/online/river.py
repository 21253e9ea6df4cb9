"""Learners as estimators of river: `predict_one`, `learn_one`, in pipelines, with river's metrics and evaluation.

This module imports river: `pip install 'scanl[online]'`.
"""

import copy
import io
import math
import warnings
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch
from river import base

from scanl.errors import ConfigError, DataError
from scanl.learning.online.answers import AnswerClass, Answering, AnswerNumbers, likeliest
from scanl.learning.online.build import SPAN, make_loop
from scanl.learning.online.prequential import Prequential
from scanl.learning.run.config import StackConfig

LEAST = 16  # places for features


class _RiverLearner(base.Estimator):
    """What both estimators have in common.

    `predict_one` of a sample that `learn_one` has not read yet advances no state, as river wants: the state changes in
    `learn_one` alone. A feature takes a place when it first has a number in a sample that is learnt. It is missing
    before, and wherever it is absent later. There are `features` places, or twice as many as the first sample has
    features, and at least 16. What finds no place is not read, which is a warning. Put
    `river.preprocessing.FeatureHasher` or `OneHotEncoder` before, if features have text.
    """

    def __init__(
        self,
        layer: str = "lru",
        dim: int = 64,
        depth: int = 1,
        algorithm: str = "bptt",
        optimizer: str = "adamw",
        lr: float = 1e-3,
        block: int = 1,
        span: int = SPAN,
        feedback: bool = True,
        seed: int = 0,
        features: int | None = None,
    ) -> None:
        if features is not None and features < 1:
            raise ConfigError(f"{type(self).__name__}: features is {features}, expected at least 1, or None")
        self.layer, self.dim, self.depth, self.algorithm = layer, dim, depth, algorithm
        self.optimizer, self.lr, self.block, self.span = optimizer, lr, block, span
        self.feedback, self.seed, self.features = feedback, seed, features
        self._names: list[Hashable] = []
        self._places, self._full = 0, False  # for features, and whether one found none
        self._loop: Prequential | None = None

    def _kind(self) -> Answering:
        raise NotImplementedError

    def _made(self) -> Prequential:
        stack = StackConfig(layer=self.layer, dim=self.dim, depth=self.depth)
        how: dict[str, Any] = {"algorithm": self.algorithm, "optimizer": self.optimizer, "lr": [self.lr]}
        return make_loop(self._kind(), self._places, stack, block=self.block, span=self.span, seed=self.seed, **how)

    def _read(self, x: Mapping[Hashable, Any]) -> list[float]:
        return [*(_number(x.get(name)) for name in self._names), *[math.nan] * (self._places - len(self._names))]

    def _place(self, x: Mapping[Hashable, Any]) -> None:
        """Give a place to each feature that has its first number."""
        new = sorted(
            (name for name in x.keys() - set(self._names) if not math.isnan(_number(x[name]))),
            key=lambda name: (str(name), type(name).__name__),
        )
        if self._loop is None:
            self._places = self.features or max(LEAST, 2 * len(new))
            self._loop = self._made()
        free = self._places - len(self._names)
        self._names += new[:free]
        if len(new) > free and not self._full:
            self._full = True
            warnings.warn(
                f"{type(self).__name__}: feature {new[free]!r} is not read because all {self._places} places are "
                "taken, and so are none that come later; give a larger features",
                stacklevel=3,
            )

    def _foreseen(self, x: Mapping[Hashable, Any]) -> Any:
        """Return the answer to a sample, and keep nothing of it."""
        return None if self._loop is None else self._loop.peek(self._read(x))

    def learn_one(self, x: Mapping[Hashable, Any], y: Any) -> None:
        """Read a sample and its truth, and learn from it."""
        kind = self._kind() if self._loop is None else self._loop.kind
        truth = kind.read(y)  # before anything changes
        for name, value in x.items():
            if math.isinf(_number(value)):
                raise DataError(f"{type(self).__name__}: feature {name!r} is {value}, expected a finite number")
        self._place(x)
        assert self._loop is not None
        self._loop.answer(self._read(x))
        self._loop.learn(truth)

    def __getstate__(self) -> dict[str, Any]:
        """Return the options, and the state of the loop as bytes."""
        state = vars(self).copy()
        if self._loop is not None:
            torch.save(self._loop.state_dict(), stored := io.BytesIO())
            state["_loop"] = stored.getvalue()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if isinstance(stored := state["_loop"], bytes):
            self._loop = self._made()
            self._loop.load_state_dict(torch.load(io.BytesIO(stored), weights_only=True))

    def __deepcopy__(self, memo: dict[int, Any]) -> "_RiverLearner":
        other = type(self).__new__(type(self))
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return other

    @property
    def _raw_memory_usage(self) -> int:
        """Bytes of the pickled estimator. river adds up what Python knows of, which leaves out tensors."""
        state = self.__getstate__()
        return len(state["_loop"]) if isinstance(state["_loop"], bytes) else 0


class RiverRegressor(_RiverLearner, base.Regressor):
    """A recurrent regressor of river that learns sample by sample.

    Args:
        layer, dim, depth: of the `Stack`.   algorithm, optimizer, lr: how it learns, as in `scanl train`.
        block: samples of an update.   span: numbers after which the past fades in the running means.
        feedback: whether the last truth is an input too.   seed: of the weights.   features: largest number of them.
    """

    def _kind(self) -> AnswerNumbers:
        return AnswerNumbers(1, self.span, self.feedback)

    def predict_one(self, x: Mapping[Hashable, Any]) -> float:
        """Return the number that is expected with a sample; 0 before the first is learnt."""
        number = self._foreseen(x)
        return 0.0 if number is None else float(number)


class RiverClassifier(_RiverLearner, base.Classifier):
    """A recurrent classifier of river that learns sample by sample.

    Args:
        classes: largest number of classes; they are known once they have been seen.
        The others as in `RiverRegressor`.
    """

    def __init__(
        self,
        classes: int = 10,
        layer: str = "lru",
        dim: int = 64,
        depth: int = 1,
        algorithm: str = "bptt",
        optimizer: str = "adamw",
        lr: float = 1e-3,
        block: int = 1,
        span: int = SPAN,
        feedback: bool = True,
        seed: int = 0,
        features: int | None = None,
    ) -> None:
        super().__init__(layer, dim, depth, algorithm, optimizer, lr, block, span, feedback, seed, features)
        self.classes = classes
        if classes < 2:
            raise ConfigError(f"RiverClassifier: classes is {classes}, expected at least 2")

    @property
    def _multiclass(self) -> bool:
        return True

    def _kind(self) -> AnswerClass:
        return AnswerClass(self.classes, self.feedback)

    def predict_proba_one(self, x: Mapping[Hashable, Any], **kwargs: Any) -> dict[Any, float]:
        """Return the probability of each class that has been seen."""
        return self._foreseen(x) or {}

    def predict_one(self, x: Mapping[Hashable, Any], **kwargs: Any) -> Any:
        """Return the likeliest class, None before the first is learnt."""
        return likeliest(self.predict_proba_one(x))


def _number(value: Any) -> float:
    """Return a feature as a number; NaN for text, and for what is missing."""
    return float(value) if isinstance(value, int | float | np.number | np.bool_) else np.nan
