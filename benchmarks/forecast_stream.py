"""Forecast a long series sample by sample from a kept state.

    python benchmarks/forecast_stream.py [--steps 100000] [--piece 1] [--layers lru hawk gru]

For each layer: the largest difference of a forecast from the one that the whole history gives at once, at 20 random
steps, relative to the spread of the series; the memory that the process has gained between a tenth of the steps and all
of them; and the time of a forecast at the end over that at the beginning. With `--piece 4` there is a forecast after
every fourth sample. The series has a trend, a season, noise and missing numbers. Exits with 1 if a forecast differs by
more than rounding explains, or the memory grows.
"""

import argparse
import resource
import statistics
import sys
import time

import torch
from torch import Tensor

from scanl.models import Forecaster, Normalization, Stack

PLACES, WINDOW = 20, 200  # forecasts that are compared; forecasts that are timed, at the beginning and at the end


def series(steps: int) -> Tensor:
    """A season of 24 about a slow wave of a hundred times its size, with a fiftieth of the numbers missing."""
    time = torch.arange(steps, dtype=torch.float64)
    values = 100 * torch.sin(time / 5000) + torch.sin(2 * torch.pi * time / 24) + 0.2 * torch.randn(steps).double()
    values[torch.rand(steps) < 0.02] = torch.nan
    return values.float()[None, :, None]


@torch.no_grad()
def stream(layer: str, steps: int, piece: int) -> tuple[float, float, float, float]:
    """Return the error, the error of the whole in float32 from float64, MiB gained, and slowing down."""
    torch.manual_seed(0)
    model = Forecaster(
        12, Stack(16, 1, layer), distribution="quantiles", lags=24, normalization=Normalization(500.0)
    ).eval()
    for parameter in model.parameters():  # the map of lags begins at zero
        parameter.add_(torch.randn_like(parameter), alpha=0.02)
    x, calls = series(steps), steps // piece
    places = sorted({piece * call + piece - 1 for call in torch.randint(calls, (PLACES,)).tolist()})
    spread = x[~x.isnan()].std().item()
    whole = model.head.quantiles(model(x)[0][:, places], torch.tensor([0.1, 0.5, 0.9]))[0]
    exact = model.double()(x.double())[0][:, places]
    exact = model.head.quantiles(exact, torch.tensor([0.1, 0.5, 0.9]).double())[0]
    model.float()
    state, found, times, early = None, [], [], 0
    for call in range(calls):
        begin = time.perf_counter()
        forecast, state = model.predict(x[:, piece * call :][:, :piece], state, levels=(0.1, 0.5, 0.9))
        if call < WINDOW or call >= calls - WINDOW:
            times.append(time.perf_counter() - begin)
        if piece * call + piece - 1 in places:
            found.append(forecast.quantiles[0])
        if call == calls // 10:
            early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gained = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - early) / 1024
    slower = statistics.median(times[-WINDOW:]) / statistics.median(times[:WINDOW])
    error = (torch.stack(found) - whole).abs().max().item() / spread
    return error, (whole - exact).abs().max().item() / spread, gained, slower


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--piece", type=int, default=1)
    parser.add_argument("--layers", nargs="+", default=["lru", "hawk", "gru"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'layer':<16}{'from the whole':>16}{'whole, float64':>16}{'MiB gained':>12}{'slower':>8}")
    wrong = 0
    for layer in args.layers:
        error, rounding, gained, slower = stream(layer, args.steps, args.piece)
        # Both are sums of the same numbers in float32, in different orders, so each is as far from the exact one.
        bad = error > 2 * rounding + 1e-6 or gained > 8
        wrong += bad
        print(f"{layer:<16}{error:>16.1e}{rounding:>16.1e}{gained:>12.1f}{slower:>8.2f}{'  WRONG' if bad else ''}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
