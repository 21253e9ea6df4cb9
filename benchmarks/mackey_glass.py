"""An echo state network generates the Mackey-Glass series freely, beside PyPI's reservoirpy where it is installed.

The measure is NRMSE_84 of Jaeger and Haas, "Harnessing Nonlinearity", Science 304, 2004: from many starts the network
reads the series, then it reads its own answers for 84 steps. The root mean squared error of the 84th is divided by the
standard deviation of the series.
"""

import importlib
import statistics
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scanl.layers.rnn.esn import ESN
from scanl.learning.readout import Ridge
from scanl.tasks.mackey_glass import euler

AHEAD = 84
PENALTY = 1e-8


class Sizes(NamedTuple):
    """units: of the reservoir.   washout: steps read before a state counts.   fitted: steps of the regression.

    starts: of the generation, `apart` steps from one to the next.   seeds: reservoirs, of which the median counts.
    """

    units: int = 500
    washout: int = 500
    fitted: int = 3000
    starts: int = 100
    apart: int = 50
    seeds: int = 5


def series(steps: int, delay: int = 17, fine: int = 10) -> Tensor:
    """Return the Mackey-Glass series, less 1: (steps,), after 1000 that still depend on the constant start."""
    return torch.from_numpy(euler(np.full((1, delay * fine), 1.2), 1.2, 1000 + steps, fine)[0, 1000:]) - 1


@torch.no_grad()
def ours(fitted: Tensor, starts: Tensor, seed: int, sizes: Sizes) -> Tensor:
    """Fit on a series (T), and return what follows each row of `starts` (N, W): (N, 84)."""
    torch.manual_seed(seed)
    layer = ESN(1, sizes.units, spectral_radius=1.1, leak=0.35, input_connectivity=1.0, bias_scaling=0.3).double()
    seen: list[Tensor] = []
    layer.readout.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    layer(fitted[None, :-1, None])
    weight, bias = Ridge(PENALTY).add(seen[0][0, sizes.washout :], fitted[sizes.washout + 1 :, None]).solve()
    layer.readout.weight.copy_(weight)
    layer.readout.bias.copy_(bias)
    y, state = layer(starts[..., None])
    answers = [y[:, -1]]
    while len(answers) < AHEAD:
        y, state = layer(answers[-1][:, None], state)
        answers.append(y[:, -1])
    return torch.cat(answers, 1)


def theirs(fitted: Tensor, starts: Tensor, seed: int, sizes: Sizes) -> Tensor:
    """Do the same with reservoirpy."""
    nodes = importlib.import_module("reservoirpy.nodes")
    bias = 0.3 * np.random.default_rng(seed).choice([-1.0, 1.0], sizes.units)
    reservoir = nodes.Reservoir(sizes.units, lr=0.35, sr=1.1, input_connectivity=1.0, bias=bias, seed=seed)
    readout = nodes.Ridge(ridge=PENALTY)
    s = reservoir.run(fitted[:-1, None].numpy())[sizes.washout :]
    readout.fit(s, fitted[sizes.washout + 1 :, None].numpy())
    rows = []
    for start in starts:
        reservoir.reset()
        answers = [readout.run(reservoir.run(start[:, None].numpy())[-1:])[0]]
        while len(answers) < AHEAD:
            answers.append(readout.run(reservoir.run(answers[-1][None]))[0])
        rows.append(torch.from_numpy(np.concatenate(answers)))
    return torch.stack(rows)


def nrmse(sizes: Sizes, generate: Callable[[Tensor, Tensor, int, Sizes], Tensor]) -> list[float]:
    """Return NRMSE_84 of each seed."""
    x = series(sizes.fitted + sizes.apart * sizes.starts + sizes.washout + AHEAD)
    later = x[sizes.fitted :].unfold(0, sizes.washout + AHEAD, sizes.apart)[: sizes.starts]
    found = []
    for seed in range(sizes.seeds):
        answers = generate(x[: sizes.fitted], later[:, : sizes.washout], seed, sizes)
        found.append(float((answers[:, -1] - later[:, -1]).square().mean().sqrt() / x.std()))
    return found


def run(sizes: Sizes, below: float) -> bool:
    """Print both scores, and return whether ours is below the bar and not worse than reservoirpy's."""
    scores = nrmse(sizes, ours)
    held = statistics.median(scores) < below
    print("scanl's esn:", *(f"{score:.2e}" for score in scores), f"median {statistics.median(scores):.2e}")
    if find_spec("reservoirpy") is None:
        print("reservoirpy is not installed: pip install reservoirpy")
        return held
    beside = nrmse(sizes, theirs)
    print("reservoirpy:", *(f"{score:.2e}" for score in beside), f"median {statistics.median(beside):.2e}")
    return held and statistics.median(scores) <= statistics.median(beside)
