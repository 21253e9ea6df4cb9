"""Find fixed points and cycles of piecewise-linear networks, beside an exhaustive search.

    python benchmarks/quality/cycles.py [--quick] [--small 50] [--large 2]

Networks z -> A z + W ReLU(z) + h with A ~ U(-1, 1), W ~ N(0, 1) off the diagonal and h ~ N(0, 1). First, networks of 4
units and cycles of 1 to 4 points: `cycles` against each sequence of regions, 16 to 65,536. Second, networks of 10 units
and cycles of 2 points: against all 2^20 sequences, with the time of both. Exits with 1 if a cycle of a small network is
missing, or the search in large ones is less than 20 times faster.
"""

import argparse
import sys
import time

import torch

from scanl.inspect.cycles import Cycle, Regions, _DistinctOrbits, _orbits, cycles


def network(units: int, generator: torch.Generator) -> Regions:
    """Draw a network."""
    W = torch.randn(units, units, generator=generator, dtype=torch.float64)
    A = 2 * torch.rand(units, generator=generator, dtype=torch.float64) - 1
    h = torch.randn(units, generator=generator, dtype=torch.float64)
    eye, zero = torch.eye(units, dtype=torch.float64), torch.zeros(units, dtype=torch.float64)
    return Regions(torch.diag(A), W - torch.diag(W.diagonal()), eye, zero, h)


def exhaustive(system: Regions, length: int) -> list[Cycle]:
    """Return the cycles of all sequences of regions."""
    units, distinct = len(system.g), _DistinctOrbits()
    shifts = torch.arange(length * units)
    for codes in torch.arange(2 ** (length * units)).split(2**12):
        sequence = ((codes[:, None] >> shifts) % 2).bool().unflatten(1, (length, units))
        distinct.add(_orbits(system, sequence)[0])
    return distinct.sorted(system)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 small networks with orders 1 and 2, and no large one")
    parser.add_argument("--small", type=int, default=50)
    parser.add_argument("--large", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(101)
    small, orders = (3, 2) if options.quick else (options.small, 4)
    systems = [network(4, generator) for _ in range(small)]
    print(f"{'units':>6}{'points':>7}{'networks':>9}{'exist':>7}{'search':>7}")
    missing = 0
    for length in range(1, orders + 1):
        exist = sum(len(exhaustive(system, length)) for system in systems)
        number = sum(len(cycles(system, length, rounds=3, draws=64)) for system in systems)
        missing += exist - number
        print(f"{4:6}{length:7}{small:9}{exist:7}{number:7}", flush=True)
    slow = 0
    print(f"\n{'units':>6}{'points':>7}{'rounds':>7}{'exist':>7}{'search':>7}{'seconds':>9}{'faster':>8}")
    for _ in range(0 if options.quick else options.large):
        system = network(10, generator)
        begin = time.process_time()
        exist, full = len(exhaustive(system, 2)), time.process_time() - begin
        for rounds in (5, 15):
            begin = time.process_time()
            number, seconds = len(cycles(system, 2, rounds=rounds)), time.process_time() - begin
            slow += rounds == 5 and full < 20 * seconds
            print(f"{10:6}{2:7}{rounds:7}{exist:7}{number:7}{seconds:9.2f}{full / seconds:8.1f}", flush=True)
    return 1 if missing or slow else 0


if __name__ == "__main__":
    sys.exit(main())
