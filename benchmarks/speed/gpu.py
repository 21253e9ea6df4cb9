"""Time every op on a GPU beside flash-linear-attention, mamba-ssm, FlashAttention and what the device itself can do.

    python benchmarks/speed/gpu.py [NAME ...] [--rounds 21] [--first]

The benchmarks, shapes and peers are those of speed/peers.py, in bfloat16, by CUDA events; peers that are not installed
are left out by name. A ratio says how many times as long as scanl's kernel a program takes. The program `floor` moves
the bytes once. The rows are in benchmarks/results/gpu.csv. `--quick` takes the first shape of each, without peers.
Most of a first run goes into compiling: a memory has about 26 configurations of its kernels. `--first` takes one of
each kernel.
"""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, measure, parse, parser
from speed.ops import run
from speed.peers import BENCHMARKS

OURS = "triton"
SIZE = 8192  # of the matrices of a product


def ceilings(results: Results, rounds: int) -> None:
    """Add what the device can do: GB/s of a copy, and TFLOP/s of a product of matrices."""
    source, target = torch.zeros(2, 2**29, dtype=torch.bfloat16, device="cuda")
    calls = {"copy": lambda: target.copy_(source)}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        a, b = torch.randn(2, SIZE, SIZE, device="cuda").to(dtype)
        calls[name] = lambda a=a, b=b: a @ b
    took = {name: each.seconds for name, each in measure(calls, rounds, "cuda").items()}
    results.add(name="ceiling", program="copy", rate=2 * source.nbytes / took["copy"] / 1e9, unit="GB/s")
    for name in ("bfloat16", "float32"):
        results.add(name="ceiling", program=f"{name} product", rate=2 * SIZE**3 / took[name] / 1e12, unit="TFLOP/s")


def first_configurations() -> None:
    """Let each kernel of ours compile and run the configuration that it would measure first."""
    from scanl.ops._triton import _tuned

    every = _tuned._worth_measuring
    _tuned._worth_measuring = lambda configs, *names, **flags: every(configs, *names, **flags)[:1]


def main() -> None:
    known = parser(__doc__, BENCHMARKS, rounds=21, threads=None, devices=("cuda",))
    known.add_argument("--first", action="store_true", help="one configuration of each kernel, not the fastest of all")
    options = parse(known)
    if options.first:
        first_configurations()
    results = Results("gpu", options)
    if not results.timed(name="ceiling"):
        ceilings(results, options.rounds)
    for name in options.names:
        for shape in BENCHMARKS[name].shapes[: 1 if options.quick else None]:
            run(results, name, shape, options, only=(OURS,), base=OURS)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
