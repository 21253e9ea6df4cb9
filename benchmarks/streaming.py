"""Stream a long sequence through every layer, one token at a time.

    python benchmarks/streaming.py [--steps 100000] [--dim 12] [--layers NAME ...]

For each layer that can stream: the largest difference to the whole sequence at once, at 20 random steps and relative to
the largest output; the memory that the process has gained between a tenth of the steps and all of them; and the time of
a step at the end over that at the beginning. A layer whose state is bounded by `max_length` is tried with that many.
Exits with 1 if any is not as it should be.
"""

import argparse
import inspect
import resource
import statistics
import sys
import time

import torch

from scanl import layers

# The other variants have a parameter for each pair of positions.
OPTIONS = {"aft": {"variant": "conv"}}
PLACES = 20
WINDOW = 200  # steps that are timed, at the beginning and at the end


def resident() -> int:
    """Peak memory of this process in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@torch.no_grad()
def stream(name: str, dim: int, steps: int) -> tuple[float, float, float]:
    """Error, MiB gained, and slowing down."""
    torch.manual_seed(0)
    cls = layers.get(name)
    options = {**cls.sample, **OPTIONS.get(name, {})}
    if "max_length" in inspect.signature(cls).parameters:
        options["max_length"] = steps
    layer = layers.build(name, dim, **options)
    for parameter in layer.parameters():  # some maps begin at zero
        parameter.add_(torch.randn_like(parameter), alpha=0.02)
    x = torch.randn(1, steps, dim)
    whole = layer(x)[0][0]
    places = set(torch.randint(steps, (PLACES,)).tolist())
    state, errors, times, early = layer.init_state(1), [], [], 0
    for t in range(steps):
        begin = time.perf_counter()
        y, state = layer.step(x[:, t], state)
        if t < WINDOW or t >= steps - WINDOW:
            times.append(time.perf_counter() - begin)
        if t in places:
            errors.append((y[0] - whole[t]).abs().max().item())
        if t == steps // 10:
            early = resident()
    gained = (resident() - early) / 1024
    slower = statistics.median(times[-WINDOW:]) / statistics.median(times[:WINDOW])
    return max(errors) / whole.abs().max().item(), gained, slower


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=12)
    parser.add_argument("--layers", nargs="+", default=None, help="some of them")
    options = parser.parse_args()
    failed = []
    for name in options.layers or layers.names(presets=False):
        cls = layers.get(name)
        if layers.build(name, options.dim, **cls.sample).bidirectional:
            continue
        error, gained, slower = stream(name, options.dim, options.steps)
        right = error < 1e-4 and gained < 1
        failed += [] if right else [name]
        print(
            f"{name:<18}error {error:.1e}   memory +{gained:.1f} MiB   last steps {slower:.2f} x the first", flush=True
        )
    if failed:
        sys.exit(f"not constant, or not the same numbers: {', '.join(failed)}")


if __name__ == "__main__":
    main()
