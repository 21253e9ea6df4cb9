"""One sequence over several processes of this machine: memory of a process, bytes and time of the exchanges.

    python benchmarks/speed/divided.py [memory] [exchange]

memory: the peak memory of each process that trains two blocks on a sequence of 2^17 steps, beyond its libraries, alone
and on four ranks. exchange: the time of the exchanges of `linear_attention` at three sizes of a state, on two and on
four ranks, beside what `benchmarks/cost.py` predicts. The latency, the bandwidth and how many messages pass side by
side come from messages of three other sizes in the same run, one alone and one of each rank; the time to join two pairs
comes from a rank that does nothing else. Messages and exchanges take turns, in a new order each time. The quickest turn
counts, as other work on the machine only delays. It fails if a prediction is off by more than 30 %.
"""

import argparse
import os
import random
import resource
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

sys.path.append(str(Path(__file__).parents[1]))
from cost import Link, forward_seconds, received
from harness import Results, parse, parser
from scanl.models import Stack
from scanl.ops import linear_attention
from scanl.ops._frame.summary import Effect
from scanl.parallel import ContextParallel
from scanl.parallel.context import RankGroup
from scanl.parallel.exchanges import state_before

LAYERS = ("gla", "mamba", "gated_deltanet", "mingru")
# glibc's malloc gives tensors above 32 MiB back to the system, and keeps smaller ones. A whole sequence has the former,
# its quarters the latter. With this threshold in bytes all are given back, so that the peaks are those of tensors.
os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
SIZES = (64, 256, 1024)  # KiB of a state
FITTED = (32, 512, 2048)  # KiB of the messages from which the link is fitted
SETTLED = 0.003  # seconds after which all processes have heard when to start
TOGETHER = 0.0005  # seconds between the first and the last process that begin
DIM = 64

Took = dict[tuple[str, int], float]  # seconds, by what was timed and its KiB


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


def exchanged(rank: int, size: int, store: str, rounds: int, found: "mp.SimpleQueue[Took]") -> None:
    """Puts the times of messages and whole exchanges, which take turns, and of joins of two pairs into `found`."""
    joined(rank, size, store)
    ranks, effect = RankGroup(), linear_attention.effect
    assert effect is not None
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    for kilobytes in FITTED:
        state = states(kilobytes)
        ends = (size - 1 if rank == 0 else -1, 0 if rank == size - 1 else -1)
        calls["all", kilobytes] = partial(ranks.exchange, state, rank + 1, rank - 1, state)
        calls["one", kilobytes] = partial(ranks.exchange, state, *ends, state)
    for kilobytes in SIZES:
        calls["exchange", kilobytes] = partial(state_before, effect, ranks, states(kilobytes), states(kilobytes))
    order, works = random.Random(0), list(calls.values())
    taken = torch.empty(rounds, len(works), 3, dtype=torch.float64)
    for turn in range(rounds):
        for at in order.sample(range(len(works)), len(works)):
            taken[turn, at] = torch.tensor(timed(works[at]))
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    took = dict(zip(calls, map(quickest, taken.unbind(1)), strict=True))
    for kilobytes in FITTED:
        join = partial(joined_pairs, effect, states(kilobytes))
        took["join", kilobytes] = min(timeit.repeat(join, number=1, repeat=rounds))
    found.put(took)
    dist.barrier()
    dist.destroy_process_group()


def timed(call: Callable[[], object]) -> tuple[float, float, float]:
    """Return the seconds from a common start until this rank began, their negative, and those until it was done."""
    dist.barrier()
    start = torch.tensor(time.perf_counter() + SETTLED, dtype=torch.float64)
    dist.broadcast(start, 0)  # the processes of a machine have one clock
    time.sleep(max(0.0, start.item() - time.perf_counter()))
    begin = time.perf_counter() - start.item()
    call()
    return begin, -begin, time.perf_counter() - start.item()


def quickest(taken: Tensor) -> float:
    """Return the seconds of the quickest turn, from the rank that began last until all are done.

    taken: the largest of what `timed` returned, by turn. Only turns count that all ranks began together.
    """
    last, first, done = taken[:, 0], -taken[:, 1], taken[:, 2]
    together = last - first < TOGETHER
    return float((done - last)[together if together.any() else slice(None)].min())


def states(kilobytes: int) -> Tensor:
    return torch.rand(1, kilobytes * 1024 // (4 * 32 * 32), 32, 32)


def joined_pairs(effect: Effect, state: Tensor) -> None:
    effect.follow(state, state)
    effect.after(state, state, state)


def fitted(took: Took, size: int) -> Link:
    """Return the link that messages show."""

    def line(what: str) -> tuple[float, float]:
        """Return seconds a byte, and seconds, of the line of least relative errors."""
        seconds = [took[what, kilobytes] for kilobytes in FITTED]
        slope, start = np.polyfit([1024 * kilobytes for kilobytes in FITTED], seconds, 1, w=1 / np.array(seconds))
        return slope, start

    (crowded, latency), (alone, _) = line("all"), line("one")
    return Link(max(latency, 0.0), 1 / alone, lanes=min(max((size - 1) * alone / crowded, 1.0), size - 1))


def join_seconds(took: Took, kilobytes: int) -> float:
    """Return the seconds in which a rank joins two pairs, from other sizes; the caches make no line of them."""
    known = [took["join", each] for each in FITTED]
    return float(np.exp(np.interp(np.log(kilobytes), np.log(FITTED), np.log(known))))


def exchange(results: Results, options: argparse.Namespace) -> None:
    missed = []
    for size in (2, 4):
        if results.has(part="exchange", ranks=size):
            continue
        took, *_ = on_processes(size, exchanged, options.rounds)  # all have the same
        link = fitted(took, size)
        for kilobytes in SIZES[: 1 if options.quick else None]:
            state, join = 1024 * kilobytes, join_seconds(took, kilobytes)
            seconds = took["exchange", kilobytes]
            predicted = forward_seconds(size, link, state=state, carry=state, join=join)
            results.add(
                part="exchange", ranks=size, kilobytes=kilobytes, seconds=seconds, predicted=predicted,
                ratio=predicted / seconds, latency=link.latency, bandwidth=link.bandwidth, lanes=link.lanes,
                join=join, bytes=received(size - 1, size, state=state, carry=state), rounds=options.rounds,
            )  # fmt: skip
            if not 1 / 1.3 <= predicted / seconds <= 1.3:
                missed.append(f"{size} ranks, {kilobytes} KiB")
    if missed and not options.quick:
        sys.exit(f"divided: predictions are off by more than 30 % for {'; '.join(missed)}")


PARTS = {"memory": memory, "exchange": exchange}


def main() -> None:
    options = parse(parser(__doc__, PARTS, rounds=200))
    results = Results("divided", options)
    for name in options.names:
        PARTS[name](results, options)


if __name__ == "__main__":
    main()
