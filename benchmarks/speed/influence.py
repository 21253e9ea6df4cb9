"""Time a step of real-time recurrent learning of a GRU, against the same by torch.func.

    python benchmarks/speed/influence.py [--width 64] [--rounds 7]

`rtrl` is an update of one step: the loss, the gradient and the influence, in a model with a map of 3 inputs, a norm and
a readout, whose influence is carried too where it reaches the state. `block of 64` is an update of 64 steps, by step.
`vmap(jacfwd)` is the influence alone, of the GRU alone: both Jacobians of its step by forward mode, and M = J M + dM.
It takes 8 GB for a width of 64. The rows are in benchmarks/results/influence.csv.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.data.questions import FeatureInputs, Numbers
from scanl.learning.algorithms import RTRL
from scanl.learning.questions import answerer
from scanl.models import Stack

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, measure, parse, parser

Weights = dict[str, Tensor]


def step(weights: Weights, h: Tensor, x: Tensor) -> Tensor:
    of_x, of_h = x @ weights["w"].T + weights["b"], h @ weights["u"].T + weights["c"]
    (r, z), n = torch.sigmoid(of_x[: 2 * len(h)] + of_h[: 2 * len(h)]).chunk(2), slice(2 * len(h), None)
    return (1 - z) * torch.tanh(of_x[n] + r * of_h[n]) + z * h


def by_jacfwd(width: int) -> Callable[[], object]:
    """Return a step that carries the influence of the weights on, for one row."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"w": (3 * width, width), "u": (3 * width, width), "b": (3 * width,), "c": (3 * width,)}
    weights = {name: torch.randn(shape, generator=draw) / width**0.5 for name, shape in shapes.items()}
    h, x = (torch.randn(1, width, generator=draw) for _ in range(2))
    influence = {name: torch.zeros(1, width, *shape) for name, shape in shapes.items()}
    by_weight = torch.vmap(torch.func.jacfwd(step, 0), (None, 0, 0))
    by_state = torch.vmap(torch.func.jacfwd(step, 1), (None, 0, 0))

    def advance() -> None:
        nonlocal h, influence
        fresh, jacobian = by_weight(weights, h, x), by_state(weights, h, x)
        influence = {
            name: torch.einsum("bij,bj...->bi...", jacobian, influence[name]) + fresh[name] for name in influence
        }
        h = torch.vmap(step, (None, 0, 0))(weights, h, x)

    return advance


def by_scanl(width: int, steps: int) -> Callable[[], object]:
    torch.manual_seed(0)
    question = answerer(Numbers(FeatureInputs(3), count=2))
    model = question.model(Stack(width, 1, "gru", channel_mixer="none"))
    algorithm = RTRL(question.loss)
    learner, batch = algorithm.init(model, 1), Batch(torch.randn(1, steps, 3), torch.randn(1, steps, 2))

    def update() -> None:
        nonlocal learner
        model.zero_grad()
        loss, learner = algorithm.update(model, learner, batch)
        loss.backward()

    return update


def main() -> None:
    made = parser(__doc__, rounds=7)
    made.add_argument("--width", type=int, default=64)
    options = parse(made)
    width, results = 4 if options.quick else options.width, Results("influence", options)
    if results.timed(width=width):
        return
    calls = {"rtrl": by_scanl(width, 1), "vmap(jacfwd)": by_jacfwd(width), "block of 64": by_scanl(width, 64)}
    took = measure(calls, options.rounds)
    took["block of 64"] = type(took["rtrl"])(*(each / 64 for each in took["block of 64"]))
    results.record({(name, "step"): each for name, each in took.items()}, "rtrl", width=width)


if __name__ == "__main__":
    main()
