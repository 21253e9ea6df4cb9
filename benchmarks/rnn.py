"""Time torch's recurrent modules on a CPU, accelerated beside plain: `torch.nn.GRU`, `RNN` and `LSTM`.

    python benchmarks/rnn.py [--only GRU ...] [--rounds 7]

float32, one layer, forward and backward pass with all gradients, medians of interleaved runs in one process. The ratio
is the time of torch's own forward over that of the accelerated module, so 4.0 means four times as fast.
"""

import argparse
import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from primitives import medians
from run import machine
from scanl import hub

KINDS = {"GRU": nn.GRU, "RNN": nn.RNN, "LSTM": nn.LSTM}
SHAPES = (4, 1024, 256), (8, 1024, 128), (32, 256, 256), (1, 1024, 128)  # batch, steps, width


def step(module: nn.Module, x: Tensor) -> Callable[[], object]:
    leaves = [x, *module.parameters()]
    return lambda: torch.autograd.grad(module(x)[0].sum(), leaves)


def compare(kind: str, shape: tuple[int, int, int], rounds: int) -> dict[str, float]:
    """Return the median seconds of both, after a check that their outputs agree."""
    torch.manual_seed(0)
    plain = KINDS[kind](shape[-1], shape[-1], batch_first=True)
    accelerated, x = copy.deepcopy(plain), torch.randn(shape, requires_grad=True)
    hub.accelerate(accelerated)
    torch.testing.assert_close(accelerated(x)[0], plain(x)[0], rtol=1e-3, atol=1e-4)
    return medians({"plain": step(plain, x), "accelerated": step(accelerated, x)}, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), help="some of them")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(machine("cpu"))
    for kind in options.only:
        for shape in SHAPES:
            found = compare(kind, shape, options.rounds)
            before, after = found["plain"], found["accelerated"]
            size = str(shape)
            print(
                f"{kind:5} {size:16} {1e3 * before:9.1f} ms  {1e3 * after:9.1f} ms  {before / after:6.2f} ×", flush=True
            )


if __name__ == "__main__":
    main()
