"""One sequence over several processes of this machine: memory of a process, bytes and time of the exchanges.

    python benchmarks/speed/divided.py [memory] [exchange]

memory: the peak memory of each process that trains two blocks on a sequence of 2^17 steps, beyond its libraries, alone
and on four ranks. exchange: the time of the exchanges of `linear_attention` at three sizes of a state, beside what
`scanl.parallel.cost` predicts from the latency and the bandwidth that two other messages show.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser
from scanl.models import Stack
from scanl.ops import linear_attention
from scanl.parallel import ContextParallel
from scanl.parallel.context import Group
from scanl.parallel.cost import Link, forward_seconds, received
from scanl.parallel.division import state_before

LAYERS = ("gla", "mamba", "gated_deltanet", "mingru")
# glibc's malloc gives tensors above 32 MiB back to the system, and keeps smaller ones. A whole sequence has the former,
# its quarters the latter. With this threshold in bytes all are given back, so that the peaks are those of tensors.
os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
SIZES = (64, 256, 1024)  # thousands of bytes of a state
DIM = 64


def joined(rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", timeout=timedelta(minutes=10), rank=rank, world_size=size)


def peak() -> int:
    """Return the peak memory of this process, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def trained(
    rank: int, size: int, store: str, layer: str, steps: int, found: "mp.SimpleQueue[tuple[int, float]]"
) -> None:
    """One forward and backward pass of a rank; puts the memory that it took and the seconds into `found`."""
    joined(rank, size, store)
    torch.manual_seed(0)
    model = Stack(DIM, 2, layer)
    short = torch.randn(1, 64, DIM)
    y, _ = model(short)
    y.sum().backward()  # loads kernels
    if size > 1:
        parallelize_module(model, DeviceMesh("cpu", list(range(size))), ContextParallel())
    before_, begin = peak(), time.perf_counter()
    x = torch.randn(1, steps // size, DIM)
    y, _ = model(x)
    y.square().mean().backward()
    found.put((peak() - before_, time.perf_counter() - begin))
    dist.barrier()
    dist.destroy_process_group()


def on_processes(size: int, work, *args) -> list:  # type: ignore[no-untyped-def]
    context = mp.get_context("spawn")
    found = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as scratch:
        store = os.path.join(scratch, "store")
        processes = [context.Process(target=work, args=(rank, size, store, *args, found)) for rank in range(size)]
        for process in processes:
            process.start()
        results = [found.get() for _ in processes]
        for process in processes:
            process.join()
    return results


def memory(results: Results, options: argparse.Namespace) -> None:
    steps = 2**10 if options.quick else 2**17
    for layer in LAYERS[: 1 if options.quick else None]:
        if results.has(part="memory", program=layer, steps=steps):
            continue
        (alone,) = on_processes(1, trained, layer, steps)
        four = on_processes(4, trained, layer, steps)
        row = {"bytes_alone": alone[0], "bytes_of_four": max(bytes_ for bytes_, _ in four)}
        seconds = {"seconds_alone": alone[1], "seconds_of_four": max(seconds for _, seconds in four)}
        results.add(
            part="memory",
            program=layer,
            steps=steps,
            **row,
            ratio=row["bytes_of_four"] / max(row["bytes_alone"], 1),
            **seconds,
        )


def exchanged(rank: int, size: int, store: str, kilobytes: int, rounds: int, found: "mp.SimpleQueue") -> None:  # type: ignore[type-arg]
    """Times of the exchanges of `linear_attention` and of two messages between neighbours."""
    joined(rank, size, store)
    ranks, effect = Group(), linear_attention.effect
    assert effect is not None
    state = torch.rand(1, kilobytes * 250 // (64 * 64) or 1, 64, 64)
    carry = torch.rand_like(state)

    def timed(work) -> float:  # type: ignore[no-untyped-def]
        taken = []
        for _ in range(rounds):
            dist.barrier()
            begin = time.perf_counter()
            work()
            dist.barrier()
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken)

    nothing = timed(lambda: None)
    small, large = torch.zeros(1), torch.zeros(4 * 2**20)
    messages = [timed(lambda: ranks.exchange(t, rank + 1, rank - 1, t)) - nothing for t in (small, large)]  # noqa: B023
    whole = timed(lambda: state_before(effect, ranks, carry, state)) - nothing
    if rank == 0:
        found.put((messages, whole, state.nbytes, carry.nbytes))
    dist.barrier()
    dist.destroy_process_group()


def exchange(results: Results, options: argparse.Namespace) -> None:
    for size in (2, 4):
        for kilobytes in SIZES[: 1 if options.quick else None]:
            if results.has(part="exchange", ranks=size, kilobytes=kilobytes):
                continue
            context = mp.get_context("spawn")
            found = context.SimpleQueue()
            with tempfile.TemporaryDirectory() as scratch:
                given = (size, os.path.join(scratch, "store"), kilobytes, 3 if options.quick else 30, found)
                processes = [context.Process(target=exchanged, args=(rank, *given)) for rank in range(size)]
                for process in processes:
                    process.start()
                (small, large), whole, state, carry = found.get()
                for process in processes:
                    process.join()
            link = Link(latency=small, bandwidth=4 * 4 * 2**20 / max(large - small, 1e-9))
            predicted = forward_seconds(size, link, state=state, carry=carry)
            about = {
                "latency": link.latency,
                "bandwidth": link.bandwidth,
                "bytes": received(size - 1, size, state=state, carry=carry),
            }
            results.add(part="exchange", ranks=size, kilobytes=kilobytes, seconds=whole, predicted=predicted, **about)


PARTS = {"memory": memory, "exchange": exchange}


def main() -> None:
    options = parse(parser(__doc__, PARTS))
    results = Results("divided", options)
    for name in options.names:
        PARTS[name](results, options)


if __name__ == "__main__":
    main()
