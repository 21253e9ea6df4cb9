r"""Prequential scores: of answers that were given before the truth, over all time, over the last ones, and fading.

This module imports river: `pip install 'scanl[online]'`. Metrics and drift detectors are river's.
"""

import io
import pickle
from collections.abc import Sequence
from typing import Any

from river import drift, metrics
from river.utils import Rolling

from scanl.errors import CheckpointError, ConfigError, nearest
from scanl.learning.online.answers import Answering, likeliest

DETECTORS = {"adwin": drift.ADWIN, "kswin": drift.KSWIN}


PLAIN = {  # classes that the objects of river hold
    ("collections", "Counter"),
    ("collections", "defaultdict"),
    ("collections", "deque"),
    ("functools", "partial"),
    ("random", "Random"),
}


class Fading:
    r"""The mean of a metric of single answers, where the past fades.

    .. math:: M_t = (s_t + \alpha S_{t-1}) / (1 + \alpha N_{t-1})

    s_t is the metric of answer t alone; S and N are the sums of s and of 1, with the same weights.

    Source: Gama, Sebastião and Rodrigues, "On Evaluating Stream Learning Algorithms", Machine Learning 90(3), 2013,
    eq. (4). river has no metric that fades.
    """

    def __init__(self, metric: type[Any], factor: float) -> None:
        self.metric, self.factor = metric, factor
        self.total = self.weight = 0.0

    def update(self, truth: Any, answer: Any) -> None:
        """Read an answer and its truth."""
        alone = self.metric()
        alone.update(truth, answer)
        self.total = alone.get() + self.factor * self.total
        self.weight = 1 + self.factor * self.weight

    def get(self) -> float:
        """Return the score; 0 before any answer."""
        return self.total / self.weight if self.weight else 0.0


class Scores:
    """The scores of a stream of answers.

    names: of river's metrics; the first is also computed fading, and for the answer that repeats the last truth.
    window: answers in the sliding window.   fade: α.   detector: one of `DETECTORS`, which reads the errors.
    """

    def __init__(
        self, kind: Answering, names: Sequence[str], window: int, fade: float, detector: str | None = None
    ) -> None:
        self.kind = kind
        makes = [_metric(name) for name in names]
        self.all = [make() for make in makes]
        self.windows: list[Any] = [Rolling(make, window) for make in makes]  # they have the methods of the metrics
        self.fading, self.naive = Fading(makes[0], fade), makes[0]()
        self.names = list(names)
        if detector is not None and detector not in DETECTORS:
            raise nearest("drift detector", detector, DETECTORS)
        self.detector: Any = None if detector is None else DETECTORS[detector]()
        self.drift = False  # whether the last error was one too many

    def update(self, truth: Any, answer: Any, naive: Any, error: float) -> None:
        """Read a truth, the answer, the naive answer (None before any), and the error of the answer."""
        for target, prediction in self.kind.pairs(truth, answer):
            for metric in (*self.all, *self.windows):
                metric.update(target, _form(metric, prediction))
            self.fading.update(target, _form(self.all[0], prediction))
        if naive is not None:
            for target, prediction in self.kind.pairs(truth, naive):
                self.naive.update(target, _form(self.naive, prediction))
        if self.detector is not None:
            self.detector.update(error)
            self.drift = self.detector.drift_detected

    def get(self) -> dict[str, float]:
        """Return each score by its name: `MAE`, `MAE window`, `MAE fading`, `MAE naive`, `RMSE`, ..."""
        first = self.names[0]
        row: dict[str, float] = {}
        for name, overall, window in zip(self.names, self.all, self.windows, strict=True):
            row |= {name: overall.get(), f"{name} window": window.get()}
            if name == first:
                row |= {f"{name} fading": self.fading.get(), f"{name} naive": self.naive.get()}
        return row

    def dumps(self) -> bytes:
        """Return the metrics and the detector as bytes for `loads`."""
        return pickle.dumps((self.all, self.windows, self.fading, self.naive, self.detector, self.drift))

    def loads(self, data: bytes) -> None:
        """Go on from what `dumps` returned. Only classes of river and plain containers are made from it."""
        try:
            stored = _Unpickler(io.BytesIO(data)).load()
            self.all, self.windows, self.fading, self.naive, self.detector, self.drift = stored
        except (pickle.UnpicklingError, AttributeError, ValueError, EOFError, TypeError) as error:
            raise CheckpointError(f"the scores of the checkpoint cannot be read: {error}") from error


def _metric(name: str) -> type[Any]:
    known = {metric.casefold(): metric for metric in metrics.__all__ if metric not in ("base", "multioutput")}
    if name.casefold() not in known:
        raise nearest("metric of river", name, sorted(known.values()))
    cls = getattr(metrics, known[name.casefold()])
    try:
        cls()
    except TypeError as error:
        raise ConfigError(f"learn: metric {name} of river needs arguments: {error}; choose another") from error
    return cls


def _form(metric: Any, answer: Any) -> Any:
    """Return an answer as a metric reads it: probabilities, or the likeliest class."""
    if not isinstance(answer, dict):
        return answer
    if getattr(metric, "requires_labels", True):
        return likeliest(answer)
    return answer.get(True, 0.0) if isinstance(getattr(metric, "obj", metric), metrics.base.BinaryMetric) else answer


class _Unpickler(pickle.Unpickler):
    """Makes objects of river, of this module, and plain containers; nothing else is imported."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "river" or module == __name__ or (module, name) in PLAIN:
            result = super().find_class(module, name)
            if isinstance(result, type):
                return result
        elif module == "builtins" and name in ("set", "frozenset", "int", "float", "bool", "dict", "list", "tuple"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of the scores")
