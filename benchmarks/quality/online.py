"""Real streams, scored before they are learnt: a recurrent learner beside river's linear models and trees.

    python benchmarks/quality/online.py [NAME ...]

NAME is a stream: two data sets of river, and two tables of statsmodels. All learners read the same samples in the same
order, standardised by what came before, and the last truth beside them; on a table, which has no other columns, river's
also read the three truths before that. The score is river's metric, over all samples after the first 50. The rows are
in benchmarks/results/online.csv, and docs/online.png shows how the scores came about.
"""

import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from river import datasets, forest, linear_model, metrics, preprocessing, tree

from harness import Panel, Results, parse, parser, picture
from scanl.learning.adapters.river import RiverClassifier, RiverRegressor

BEGINNING = 50  # samples that are not scored
QUICK = 60  # samples of a short run
LAGS = 4  # truths that river's models read on a table

Samples = Iterable[tuple[dict[str, float], Any]]


def of_river(name: str) -> Iterator[tuple[dict[str, float], Any]]:
    """Yield the samples of a data set of river with the last truth."""
    last = 0.0
    for x, y in getattr(datasets, name)():
        yield {**{key: float(value) for key, value in x.items() if isinstance(value, int | float)}, "last 1": last}, y
        last = float(y)


def of_table(name: str, column: str) -> Iterator[tuple[dict[str, float], float]]:
    """Yield the numbers of a table of statsmodels with the last truths."""
    values = importlib.import_module(f"statsmodels.datasets.{name}").load_pandas().data[column].dropna().tolist()
    for begin in range(len(values) - LAGS):
        *past, y = values[begin : begin + LAGS + 1]
        yield {f"last {lag}": past[-lag] for lag in range(1, LAGS + 1)}, y


STREAMS: dict[str, tuple[Callable[[], Samples], bool]] = {  # and whether the truth is a class
    "TrumpApproval": (lambda: of_river("TrumpApproval"), False),
    "Phishing": (lambda: of_river("Phishing"), True),
    "co2": (lambda: of_table("co2", "co2"), False),
    "sunspots": (lambda: of_table("sunspots", "SUNACTIVITY"), False),
}


def recurrent(layer: str, classes: bool, algorithm: str) -> Any:
    """Return a learner of ours, with its default options."""
    make = RiverClassifier if classes else RiverRegressor
    return make(layer=layer, algorithm=algorithm)


def contenders(classes: bool) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Return the learners by name, each with its family."""
    scaled = preprocessing.StandardScaler
    ours = {
        f"lru, {algorithm}": ("recurrent", lambda algorithm=algorithm: recurrent("lru", classes, algorithm))
        for algorithm in ("bptt", "diagonal_rtrl")
    }
    if classes:
        return ours | {
            "logistic regression": ("linear", lambda: scaled() | linear_model.LogisticRegression()),
            "ALMA": ("linear", lambda: scaled() | linear_model.ALMAClassifier()),
            "Hoeffding tree": ("tree", lambda: tree.HoeffdingAdaptiveTreeClassifier(seed=0)),
            "adaptive random forest": ("tree", lambda: forest.ARFClassifier(seed=0)),
        }
    return ours | {
        "linear regression": ("linear", lambda: scaled() | linear_model.LinearRegression()),
        "Bayesian regression": ("linear", lambda: scaled() | linear_model.BayesianLinearRegression()),
        "Hoeffding tree": ("tree", lambda: scaled() | tree.HoeffdingAdaptiveTreeRegressor(seed=0)),
        "adaptive random forest": ("tree", lambda: scaled() | forest.ARFRegressor(seed=0)),
    }


def read(x: dict[str, float], family: str) -> dict[str, float]:
    """Return the features of a learner. A recurrent one gets the last truth by itself, and keeps what came before."""
    if family != "recurrent":
        return x
    return {key: value for key, value in x.items() if not key.startswith("last")} or {"one": 1.0}


def measure(samples: Samples, family: str, model: Any, classes: bool) -> tuple[float, float, list[tuple[float, float]]]:
    """Return the score, seconds a sample, and points of the score as it came about."""
    metric: Any = metrics.Accuracy() if classes else metrics.MAE()
    points, began, count = [], time.perf_counter(), 0
    for count, (x, y) in enumerate(samples, 1):
        features = read(x, family)
        answer = model.predict_one(features)
        if count > BEGINNING and answer is not None:
            metric.update(y, answer)
            if count % 50 == 0:
                points.append((float(count), metric.get()))
        model.learn_one(features, y)
    return metric.get(), (time.perf_counter() - began) / max(count, 1), points


class LastTruth:
    """The naive learner: it repeats the last truth."""

    last: Any = None

    def predict_one(self, x: dict[str, float]) -> Any:
        return self.last

    def learn_one(self, x: dict[str, float], y: Any) -> None:
        self.last = y


def main() -> None:
    made = parser(__doc__, list(STREAMS))
    options = parse(made)
    results = Results("online", options)
    panels = []
    for name in options.names or STREAMS:
        stream, classes = STREAMS[name]
        lines: dict[str, list[tuple[float, float]]] = {}
        for learner, (family, make) in {"last truth": ("naive", LastTruth), **contenders(classes)}.items():
            if results.has(stream=name, learner=learner):
                continue
            samples = itertools.islice(stream(), QUICK) if options.quick else stream()
            score, seconds, lines[learner] = measure(samples, family, make(), classes)
            metric = "Accuracy" if classes else "MAE"
            results.add(stream=name, learner=learner, family=family, metric=metric, score=score, ms=1000 * seconds)
        if lines:
            panels.append(Panel(name, "sample", "Accuracy" if classes else "MAE", lines))
    if panels and not options.quick:
        picture(results.pictures / "online.png", panels)


if __name__ == "__main__":
    main()
