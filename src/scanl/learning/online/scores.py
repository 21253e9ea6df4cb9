r"""Prequential scores: of answers that were given before the truth, over all time, over the last ones, and fading.

This module imports river: `pip install 'scanl[online]'`. Metrics and drift detectors are river's.
"""

import random
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from river import drift, metrics
from river.utils import Rolling

from scanl.errors import CheckpointError, ConfigError, nearest
from scanl.learning.online.answers import Answering, likeliest

DETECTORS = {"adwin": drift.ADWIN, "kswin": partial(drift.KSWIN, seed=0)}  # which draws anew after each drift
OPTIONS = (slice(12), slice(-12, None))  # bytes of river's compiled objects that hold options, such as sizes
TRIAL = 64  # errors that a detector reads on trial; each looks at its whole state by then


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
        self.total = float(alone.get()) + self.factor * self.total
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
        makes = [metric_class(name) for name in names]
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

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the metrics and of the detector, in numbers, text and lists of them."""
        return {
            "metrics": _numbers([self.all, [window.obj for window in self.windows], self.naive, self.detector]),
            "windows": [[[truth, _pairs(answer)] for (truth, answer), _ in window.window] for window in self.windows],
            "fading": [self.fading.total, self.fading.weight],
            "drift": self.drift,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned. Raises CheckpointError for a state of other scores.

        No object is made from it: the metrics of the constructor take its numbers.
        """
        try:
            if not isinstance(state, dict):
                raise TypeError(f"it is a {type(state).__name__}")
            self._take(state)
            for metric, window in zip(self.all, self.windows, strict=True):  # a trial
                for (truth, answer), _ in window.window:
                    metric.update(truth, answer)
            if self.detector is not None:
                for _ in range(TRIAL):
                    self.detector.update(0.0)
            self.get()
            self._take(state)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise _unreadable(error) from error
        except BaseException as error:  # a panic of river's compiled part is no Exception
            if type(error).__module__ != "pyo3_runtime":
                raise
            raise _unreadable(error) from error

    def _take(self, state: dict[str, Any]) -> None:
        _fill([self.all, [window.obj for window in self.windows], self.naive, self.detector], state["metrics"])
        for window, stored in zip(self.windows, state["windows"], strict=True):
            answers = [((_plain(truth), _answer(answer)), {}) for truth, answer in stored]
            window.window = deque(answers, maxlen=window.window_size)
        self.fading.total, self.fading.weight = (_like(0.0, value) for value in state["fading"])
        self.drift = _like(False, state["drift"])


def _unreadable(error: BaseException) -> CheckpointError:
    return CheckpointError(f"the scores of the checkpoint cannot be read: {' '.join(str(error).split())}")


def metric_class(name: str) -> type[Any]:
    """Return the class of river's metric of this name. Raises ConfigError for an unknown one."""
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


def _numbers(part: Any, seen: set[int] | None = None) -> Any:
    """Return the state of an object of river in numbers, text and lists. What is there twice is written once."""
    seen = set() if seen is None else seen
    if isinstance(part, np.generic):
        part = part.item()
    if part is None or isinstance(part, int | float | str):
        return part
    if id(part) in seen or callable(part):  # a function is the constructor's
        return None
    seen.add(id(part))
    if isinstance(part, random.Random):
        return part.getstate()
    if isinstance(part, dict):
        return [[_numbers(key, seen), _numbers(value, seen)] for key, value in part.items()]
    if isinstance(part, Iterable):
        return [_numbers(each, seen) for each in part]
    if hasattr(part, "__dict__"):
        return {name: _numbers(value, seen) for name, value in vars(part).items()}
    return list(part.__getstate__())  # the bytes of an object that is compiled


def _fill(part: Any, stored: Any, seen: set[int] | None = None) -> Any:
    """Give an object of river, as its constructor leaves it, the state of `_numbers`. Return it, or what it becomes."""
    seen = set() if seen is None else seen
    if part is None or isinstance(part, int | float | str):
        return _like(part, stored)
    if id(part) in seen or callable(part):
        return part
    seen.add(id(part))
    if isinstance(part, random.Random):
        version, numbers, gauss = stored
        part.setstate((version, tuple(numbers), gauss))
    elif isinstance(part, dict):
        make = getattr(part, "default_factory", None)
        known = dict(part)
        part.clear()
        for key, value in stored:
            part[_plain(key)] = _fill(known[key] if make is None else make(), value, seen)
    elif isinstance(part, set):
        part.clear()
        part.update(map(_plain, stored))
    elif isinstance(part, deque):
        part.clear()
        part.extend(_like(0.0, value) for value in stored)
    elif isinstance(part, list | tuple):
        filled = [_fill(each, value, seen) for each, value in zip(part, stored, strict=True)]
        if isinstance(part, list):
            part[:] = filled
    elif hasattr(part, "__dict__"):
        if vars(part).keys() != stored.keys():
            raise ValueError(f"{type(part).__name__} has {', '.join(stored)}, expected {', '.join(vars(part))}")
        for name, value in stored.items():
            setattr(part, name, _fill(getattr(part, name), value, seen))
    else:
        fresh, stored = part.__getstate__(), bytes(stored)
        if any(fresh[side] != stored[side] for side in OPTIONS):
            raise ValueError(f"{type(part).__name__} has other options")
        part.__setstate__(stored)
    return part


def _like(value: Any, stored: Any) -> Any:
    """Return a stored number, text or None. Raises TypeError for another kind than the value's; None leaves it open."""
    kinds = (bool,) if isinstance(value, bool) else (int, float) if isinstance(value, int | float) else (str,)
    if not (isinstance(_plain(stored), kinds) or value is None):
        raise TypeError(f"it holds {stored!r} in place of {value!r}")
    return stored


def _plain(stored: Any) -> Any:
    """Return a class or a number. Raises TypeError for an object of any other kind."""
    if not (stored is None or isinstance(stored, int | float | str)):
        raise TypeError(f"it holds a {type(stored).__name__}")
    return stored


def _pairs(answer: Any) -> Any:
    return [list(pair) for pair in answer.items()] if isinstance(answer, dict) else answer


def _answer(stored: Any) -> Any:
    """Return an answer of `_pairs`."""
    if isinstance(stored, list):
        return {_plain(name): _like(0.0, probability) for name, probability in stored}
    return _plain(stored)
