"""Forecast a real series by SpaceTime in closed loop, the same network in open loop, and an autoregression.

    python benchmarks/spacetime.py [--series sunspots] [--horizon 24] [--window 144] [--steps 300] [--seeds 3]

The series comes with statsmodels. Its first 70 % are learned from, the next 15 % say how many steps of training, and
how many lags of the autoregression, are best. Errors are over all windows whose answers lie in the last 15 %, in units
of the standard deviation of the first part. The network in open loop is trained on the next step alone, and forecasts
by reading its own forecasts. The autoregression is `statsmodels.tsa.ar_model.AutoReg`, fitted once by least squares.
Prints mean and standard deviation over the seeds; writes benchmarks/results/spacetime.json.
"""

import argparse
import copy
import importlib
import json
import statistics
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from run import RESULTS, machine
from scanl.models import SpaceTimeNet

SERIES = ("sunspots", "co2", "elnino", "nile")
LAGS = (1, 2, 3, 6, 9, 12, 18, 24, 36, 48, 60)


def load(name: str) -> np.ndarray:
    datasets: Any = importlib.import_module(f"statsmodels.datasets.{name}")
    table = datasets.load_pandas().data
    if name == "elnino":
        table = table.drop(columns="YEAR").stack()
    values = np.asarray(table if table.ndim == 1 else table.iloc[:, -1], np.float64).ravel()
    return values[~np.isnan(values)]


def windows(series: Tensor, first: int, last: int, window: int, horizon: int) -> tuple[Tensor, Tensor]:
    """Return all windows whose answers lie in steps first to last, and the answers: (n, window, 1), (n, horizon, 1)."""
    rows = series[max(0, first - window) : last].unfold(0, window + horizon, 1)
    return rows[:, :window, None], rows[:, window:, None]


def error(forecast: Tensor, answers: Tensor) -> float:
    return (forecast - answers).square().mean().sqrt().item()


def autoregression(series: Tensor, lags: int, fitted: int, x: Tensor, horizon: int) -> Tensor:
    models: Any = importlib.import_module("statsmodels.tsa.ar_model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = models.AutoReg(series[:fitted].numpy(), lags).fit().params
    constant, phi = float(found[0]), torch.as_tensor(np.asarray(found[1:]), dtype=x.dtype)
    for _ in range(horizon):
        x = torch.cat([x, constant + (x[:, -lags:].flip(1) * phi[:, None]).sum(1, keepdim=True)], 1)
    return x[:, -horizon:]


def train(parts: list[tuple[Tensor, Tensor]], closed: bool, steps: int, seed: int, sizes: dict[str, int]) -> Tensor:
    """Return the forecasts of the test windows by the weights that were best on the windows for validation."""
    torch.manual_seed(seed)
    net = SpaceTimeNet(**sizes)
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-3)
    (x, answers), (x_valid, valid), (x_test, _) = parts
    best, kept = float("inf"), copy.deepcopy(net.state_dict())
    for step in range(steps):
        rows = torch.randint(len(x), (32,))
        optimiser.zero_grad()
        net.train().loss(x[rows], answers[rows], closed_loop=closed).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        if step % 25 == 24:
            with torch.no_grad():
                found = error(net.eval().predict(x_valid[::4], valid.shape[1], closed_loop=closed), valid[::4])
            if found < best:
                best, kept = found, copy.deepcopy(net.state_dict())
    net.load_state_dict(kept)
    with torch.no_grad():
        return net.eval().predict(x_test, answers.shape[1], closed_loop=closed)


def compare(values: np.ndarray, window: int, horizon: int, steps: int, seeds: int, sizes: dict[str, int]) -> dict:
    """Return the errors on the test windows of both networks, by seed, and of the autoregression."""
    fitted, tested = int(0.7 * len(values)), int(0.85 * len(values))
    series = torch.tensor((values - values[:fitted].mean()) / values[:fitted].std(), dtype=torch.float32)
    bounds = ((window, fitted), (fitted, tested), (tested, len(series)))
    parts = [windows(series, *part, window, horizon) for part in bounds]
    found = {
        name: [error(train(parts, closed, steps, seed, sizes), parts[2][1]) for seed in range(seeds)]
        for name, closed in (("closed loop", True), ("open loop", False))
    }
    lags = min(
        (lag for lag in LAGS if lag <= window),
        key=lambda lag: error(autoregression(series, lag, fitted, parts[1][0], horizon), parts[1][1]),
    )
    found[f"AR({lags})"] = [error(autoregression(series, lags, fitted, parts[2][0], horizon), parts[2][1])]
    found["last value"] = [error(parts[2][0][:, -1:].expand(-1, horizon, -1), parts[2][1])]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", choices=SERIES, default="sunspots")
    for name, size in (("horizon", 24), ("window", 144), ("steps", 300), ("seeds", 3), ("dim", 32), ("state-dim", 32)):
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    sizes = {"dim": options.dim, "depth": 1, "state_dim": options.state_dim, "num_groups": 16}
    values = load(options.series)
    print(machine("cpu"))
    print(f"{options.series}: {len(values)} steps, windows of {options.window}, {options.horizon} ahead")
    found = compare(values, options.window, options.horizon, options.steps, options.seeds, sizes)
    for name, errors in found.items():
        spread = f" ± {statistics.stdev(errors):.4f}" if len(errors) > 1 else ""
        print(f"{name:12} {statistics.mean(errors):.4f}{spread}", flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "spacetime.json").write_text(json.dumps({"options": vars(options), "errors": found}, indent=1))


if __name__ == "__main__":
    main()
