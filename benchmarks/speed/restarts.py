"""Time each causal layer over rows in which states begin anew, beside the same rows without, forward and backward.

    python benchmarks/speed/restarts.py [NAME ...] [--threads 1]

NAME is a registered layer; without names: every layer whose output does not depend on later steps. x is (8, 512, 128)
in float32, options are the defaults, and the gradients are those of x and of all parameters. A state begins anew at a
step by chance, once in 200 steps. A ratio is the time with such steps over that without. The rows are in
benchmarks/results/restarts.csv.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from scanl import layers

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, of_module, parse, parser, race

SHAPE, QUICK, EPISODE = (8, 512, 128), (2, 16, 16), 200


class Restarted(nn.Module):
    """A layer whose state begins anew at some steps."""

    def __init__(self, layer: layers.Layer, starts: Tensor) -> None:
        super().__init__()
        self.layer, self.starts = layer, starts

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, starts=self.starts)[0]


def run(results: Results, name: str, shape: tuple[int, int, int], rounds: int) -> None:
    """Time a layer, unless this machine has."""
    if not results.timed(name=name, shape=str(shape)):
        torch.manual_seed(0)
        x, starts = torch.randn(shape), torch.rand(shape[:2]) < 1 / EPISODE
        starts[0, shape[1] // 2] = True
        layer = layers.build(name, shape[-1])
        modules = {"none": layer, "starts": Restarted(layer, starts)}
        took = race({who: of_module(module, x)._replace(forward=None) for who, module in modules.items()}, rounds)
        results.record(took, "none", name=name, shape=str(shape))


def main() -> None:
    causal = [each.name for each in layers.classes() if not each.bidirectional and each.preset_of is None]
    options = parse(parser(__doc__, causal, rounds=7))
    results = Results("restarts", options)
    for name in options.names:
        run(results, name, QUICK if options.quick else SHAPE, options.rounds)


if __name__ == "__main__":
    main()
