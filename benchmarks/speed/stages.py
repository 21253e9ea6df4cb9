"""Time the stages of docs/equation_to_kernel.md: the scan h_t = a_t h_{t-1} + x_t, from a loop to the kernels of scanl.

    python benchmarks/speed/stages.py [--rounds 5] [--threads 1]

Each stage is a function of a and x, (B, T, D), in float32, forward alone. Decays are between 0.9 and 1, as in a trained
model. ratio: the processor's time over that of `linear_scan`. error: the largest distance from the loop in float64,
relative to the largest state. The stages stand on the page as they stand here. The rows are in
benchmarks/results/stages.csv.
"""

import sys
from functools import partial
from pathlib import Path

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scanl.ops import linear_scan

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, measure, parse, parser

SHAPES = ((8, 256, 256), (8, 2048, 256), (1, 16384, 64))


def loop(a: Tensor, x: Tensor) -> Tensor:
    h, states = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        states.append(h)
    return torch.stack(states, 1)


def products(a: Tensor, x: Tensor) -> Tensor:
    p = a.cumprod(1)
    return p * (x / p).cumsum(1)


def tree(a: Tensor, x: Tensor) -> Tensor:
    reach = 1
    while reach < x.shape[1]:
        x = torch.cat([x[:, :reach], a[:, reach:] * x[:, :-reach] + x[:, reach:]], 1)
        a = torch.cat([a[:, :reach], a[:, reach:] * a[:, :-reach]], 1)
        reach *= 2
    return x


def chunks(a: Tensor, x: Tensor, size: int = 16) -> Tensor:
    a, x = (values.unflatten(1, (-1, size)) for values in (a, x))  # (B, chunks, size, D)
    logs = a.log().cumsum(2)
    differences = logs[:, :, :, None] - logs[:, :, None]  # of steps i and j of a chunk
    past = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()[..., None]
    inside = torch.einsum("bnijd,bnjd->bnid", differences.where(past, -torch.inf).exp(), x)
    h, states = torch.zeros_like(x[:, 0, :1]), []
    for n in range(x.shape[1]):
        states.append(inside[:, n] + logs[:, n].exp() * h)
        h = states[-1][:, -1:]
    return torch.cat(states, 1)


@numba.njit
def rows(a: NDArray[np.float32], x: NDArray[np.float32], h: NDArray[np.float32]) -> None:
    for b in range(x.shape[0]):
        h[b, 0] = x[b, 0]
        for t in range(1, x.shape[1]):
            for d in range(x.shape[2]):
                h[b, t, d] = a[b, t, d] * h[b, t - 1, d] + x[b, t, d]


def fused(a: Tensor, x: Tensor) -> Tensor:
    h = torch.empty_like(x)
    rows(a.numpy(), x.numpy(), h.numpy())
    return h


STAGES = {
    "loop": loop,
    "products": products,
    "tree": tree,
    "chunks": chunks,
    "fused": fused,
    "linear_scan": lambda a, x: linear_scan(x, a)[0],
}


def operands(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return 0.9 + 0.1 * torch.rand(shape, generator=draw), torch.randn(shape, generator=draw)


@torch.no_grad()
def main() -> None:
    options = parse(parser(__doc__, rounds=5))
    results = Results("stages", options)
    for shape in ((2, 64, 8),) if options.quick else SHAPES:
        if results.timed(shape=shape):
            continue
        a, x = operands(shape)
        exact = loop(a.double(), x.double())
        took = measure({name: partial(stage, a, x) for name, stage in STAGES.items()}, options.rounds)
        for name, each in took.items():
            error = ((STAGES[name](a, x) - exact).abs().max() / exact.abs().max()).item()
            ratio = each.processor / took["linear_scan"].processor
            results.add(
                shape=shape, stage=name, seconds=each.seconds, processor=each.processor, ratio=ratio, error=error
            )


if __name__ == "__main__":
    main()
