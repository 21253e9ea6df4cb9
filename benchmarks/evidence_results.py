"""What the tables of evidence have in common: rows that are kept after every run, and a training run of the library."""

import csv
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scanl.data.base import Source
from scanl.files import written_whole
from scanl.learning import TrainConfig
from scanl.learning.estimators import optimize
from scanl.learning.questions import Model, answerer

RESULTS = Path(__file__).parent / "results" / "evidence"


class Results:
    """The rows of a table, in a CSV file that is written whole after each of them."""

    def __init__(self, table: str) -> None:
        self.path = RESULTS / f"{table}.csv"
        self.rows: list[dict[str, str]] = []
        if self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                self.rows = list(csv.DictReader(file))

    def has(self, **key: Any) -> bool:
        """Whether a row has these values; then its run is over, and is left out."""
        return any(all(row.get(name) == str(value) for name, value in key.items()) for row in self.rows)

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a row, with the load of the machine, and print it."""
        row = {**row, "threads": torch.get_num_threads(), "load": f"{os.getloadavg()[0]:.1f}"}
        self.rows.append({name: f"{at:.5g}" if isinstance(at, float) else str(at) for name, at in row.items()})
        names = list(dict.fromkeys(name for one in self.rows for name in one))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(self.path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, restval="")
            writer.writeheader()
            writer.writerows(self.rows)
        print("  ".join(f"{name} {at}" for name, at in self.rows[-1].items()), flush=True)


def learn(model: Model, *stages: tuple[Source, TrainConfig]) -> float:
    """Train the model in place for the steps of one configuration after the other, in memory, and return the minutes.

    The learning rate, its schedule over all steps and the seed are those of the last configuration.
    """
    sizes = [(source, config.source.batch_size) for source, config in stages for _ in range(_steps(config))]
    last = stages[-1][1]

    def once(step: int) -> Tensor:
        source, size = sizes[step]
        return answerer(source.question).loss(model, source.batch(step, size).tensors())[0]

    begin = time.perf_counter()
    optimize(model, len(sizes), last.training.lr, last.run.seed, once)
    return (time.perf_counter() - begin) / 60


def _steps(config: TrainConfig) -> int:
    assert config.training.steps is not None
    return config.training.steps
