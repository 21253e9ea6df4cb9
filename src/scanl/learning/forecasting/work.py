"""Work of the choice of a forecaster, planned from the sizes of a table alone.

A minute stands for the same work on every machine: what a core of an AMD EPYC of 2021 does in a minute. So the same
command and seed give the same forecast on a slow machine or a busy one. The figures were measured while other programs
kept that processor busy, and a quiet one needs less.
"""

import time
from dataclasses import dataclass, field

from scanl.learning.progress import Progress

# Seconds of that core.
TRIAL = 3e-4  # of a simple forecast
PRODUCT, ERROR = 2e-10, 4e-8  # of a product of numbers, and of an error that is measured
STEP = 1e-2  # of training
PARAMETER = 8e-10  # of a parameter of a stack at a step of a sequence that is learnt
ANSWER = 2e-7  # of a number that is forecast, at each of these steps
READING = 3e-6  # of a step of a sequence that a forecast reads
PRETRAINED_STEP = 3e-5  # of a step that the pretrained forecaster reads
START, START_SHARE = 4.0, 0.3  # of the command and its picture, at most this share of the minutes

SHARE = 0.9  # of the minutes that are planned
SIMPLE_SHARE = 0.6  # of these for simple forecasts
SLOW_RATIO = 2.0  # ratio of the seconds of the processor to the planned ones from which a stack stops


@dataclass
class Plan:
    """Seconds of some minutes, by the figures above, and what was left out of the usual choice, in words."""

    minutes: float
    spent: float = 0.0
    exceptions: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.thread_time)

    @property
    def left(self) -> float:
        """What may still be planned."""
        seconds = 60 * SHARE * self.minutes
        return seconds - min(START, START_SHARE * seconds) - self.spent

    def share(self, parts: int) -> float:
        """Return what the next of some parts of the simple forecasts may take."""
        return SIMPLE_SHARE * self.left / parts

    def leave_out(self, part: str, seconds: float | None, progress: Progress) -> None:
        """Say that a part of the choice is left out. seconds: that it would take."""
        about = "" if seconds is None else f", for which {seconds:.3g} seconds are planned"
        self.say(f"left out: {part}{about}; give more minutes", progress)

    def say(self, line: str, progress: Progress) -> None:
        """Say how the choice is not the usual one."""
        self.exceptions.append(line)
        progress.note(line)

    def begin(self) -> None:
        """Measure the time of the processor from now on."""
        self._began = time.thread_time()

    @property
    def slow(self) -> bool:
        """Whether the thread has taken far more time since `begin` than was left then. Other programs do not count."""
        return time.thread_time() - self._began > SLOW_RATIO * max(self.left, 0)


def of_simple(lags: int, horizon: int, measured: int, fitted: int, trials: int, folds: int) -> float:
    """Return the seconds for simple forecasts from some last values.

    measured, fitted: origins in all backtests, and in a least squares fit.   trials: forecasts that are tried.
    """
    products = trials * measured * lags * horizon + (folds + 1) * fitted * lags**2 + 50 * lags**3
    return trials * TRIAL + PRODUCT * products + ERROR * trials * measured * horizon


def of_step(batch_size: int, length: int, answers: int, parameters: int) -> float:
    """Return the seconds for a step of training.

    length: steps of a sequence.   answers: numbers that are forecast at each of them.   parameters: of the stack.
    """
    return STEP + batch_size * length * (parameters * PARAMETER + answers * ANSWER)


def of_forecasts(count: int, length: int) -> float:
    """Return the seconds for forecasts that read sequences of some steps."""
    return count * length * READING


def of_pretrained(count: int, length: int) -> float:
    """Return the seconds for forecasts of the pretrained model that read sequences of some steps."""
    return count * length * PRETRAINED_STEP
