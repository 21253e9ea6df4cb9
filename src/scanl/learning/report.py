"""The report of a run: the meaning of its scores, the columns of metrics.csv and the line of progress."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scanl.data.base import Source
from scanl.errors import ConfigError, nearest

BITS = "bits per "  # how the name of a metric begins that is the loss in bits
BYTES = f"{BITS}byte"


@dataclass(frozen=True)
class Metric:
    """The meaning of a metric's scores: whether more is better, and the best possible score, None if it is unknown."""

    higher_is_better: bool
    best: float | None = None


# By the name of the metric. A source with a metric of its own adds it.
METRICS = {
    "accuracy": Metric(True, 1.0),
    "mean squared error": Metric(False, 0.0),
    "nats per step": Metric(False, 0.0),
    "bit error": Metric(False, 0.0),
    "CRPS": Metric(False, 0.0),
    "MSE": Metric(False, 0.0),
}


@dataclass(frozen=True)
class ScoreReport:
    """Reading and display of the scores of a source. No score is below 0.

    metric: name of the score.   chance: score of guessing, None if unknown.
    """

    metric: str
    chance: float | None = None

    @classmethod
    def of(cls, source: Source) -> "ScoreReport":
        """Return the report of a source. Raises ConfigError for a metric that is not in `METRICS`."""
        report = cls(source.metric, source.chance)
        if report.metric not in METRICS and report.bits is None:
            raise nearest("metric", report.metric, METRICS)
        return report

    @property
    def bits(self) -> str | None:
        """Column with the metric on training batches, if the loss is the metric in another unit: "bits_per_byte"."""
        return self.metric.replace(" ", "_") if self.metric.startswith(BITS) else None

    @property
    def higher_is_better(self) -> bool:
        """Whether more is better."""
        return self.bits is None and METRICS[self.metric].higher_is_better

    @property
    def best(self) -> float | None:
        """Best possible score, None if it is unknown."""
        return None if self.bits else METRICS[self.metric].best

    @property
    def measured(self) -> str:
        """Column of the measurements on data that the model never trains on."""
        return f"held_out_{self.bits}" if self.bits else "score"

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of metrics.csv."""
        return ("step", "loss", *([self.bits] if self.bits else []), "tokens_per_second", "lr", self.measured)

    def row(self, loss: float) -> dict[str, Any]:
        """Return a row of metrics.csv that has the loss, and nothing in the other columns."""
        row = {**dict.fromkeys(self.columns, ""), "loss": loss}
        return row | {self.bits: loss / math.log(2)} if self.bits else row

    def line(self, row: Mapping[str, Any], measured: float | None) -> str:
        """Format a row of metrics.csv and the last measurement for the progress line."""
        parts = [f"loss {row['loss']:.4g}"]
        if self.bits:
            parts.append(f"{self.metric} {row[self.bits]:.4g}")
        if measured is not None:
            guessed = "" if self.chance is None else f" (chance {self.chance:.4g})"
            parts.append(f"held-out {'sample' if self.bits else self.metric} {measured:.4g}{guessed}")
        return "  ".join(parts)

    def better(self, one: float, than: float) -> bool:
        """Whether the score `one` is better than `than`."""
        return one > than if self.higher_is_better else one < than

    def check_reachable(self, until: float | None, name: str) -> None:
        """Raise ConfigError for a score that no model reaches. name: of the data."""
        low, high = (0.0, self.best) if self.higher_is_better else (self.best or 0.0, None)
        if until is not None and (until < low or (high is not None and until > high)):
            bounds = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
            because = f"{name} is scored by {self.metric}"
            raise ConfigError(f"train: until is {until:g}, expected {bounds} because {because}")
