r"""Fixed points and cycles of piecewise-linear recurrent networks, with their stability.

.. math:: z_t = A z_{t-1} + B\, \mathrm{ReLU}(G z_{t-1} + g) + h

Every network of `layers.PLRNN` and `layers.ShallowPLRNN` has this form, under a constant input. Where the same units
are active it is the linear map z -> M z + c. A cycle of k points that passes the regions D_1, ..., D_k solves
(I - M_k ... M_1) z_1 = c_k + M_k c_{k-1} + ... + M_k ... M_2 c_1. The solution is a cycle of the network if it passes
these regions; else it is a virtual one.

Source: Eisenmann, Monfared, Göring and Durstewitz, "Bifurcations and loss jumps in RNN training", arXiv:2310.17561,
algorithm 1 (SCYFI): from drawn regions to their solution, then to the regions that the solution passes, until these
agree. Differs: many draws are followed at once, by batched solves; no sequence is solved twice; where all sequences are
fewer than the search would try, each is tried; equal cycles are recognised by their distance, not by two decimals.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scanl.errors import ConfigError, ShapeError
from scanl.inspect.base import BLUE, RED, Drawing, Inspection, inspector, prepared
from scanl.layers import PLRNN, ShallowPLRNN
from scanl.layers.base import Layer
from scanl.options import Positive, checked

ROUNDING = 1e-9  # largest distance between equal points, relative to their size


class Cycle(NamedTuple):
    """A cycle of k points; a fixed point for k = 1.

    points: (k, D), the orbit in its order.   multipliers: (D,), complex eigenvalues of the Jacobian over the k steps.
    """

    points: Tensor
    multipliers: Tensor

    @property
    def stable(self) -> bool:
        """Whether orbits that begin near the cycle end on it: every multiplier is inside the unit circle."""
        return bool((self.multipliers.abs() < 1).all())


class Branch(NamedTuple):
    """A cycle over a range of a parameter: (k, R) bool, which units are active at its k points, and where it is.

    exists, stable: the intervals of the parameter in which it exists, and in which it is stable too.
    """

    active: Tensor
    exists: list[tuple[float, float]]
    stable: list[tuple[float, float]]


class Regions(NamedTuple):
    """A network z -> A z + B ReLU(G z + g) + h: A (D, D), B (D, R), G (R, D), g (R,), h (D,), in float64."""

    A: Tensor
    B: Tensor
    G: Tensor
    g: Tensor
    h: Tensor

    def step(self, z: Tensor) -> Tensor:
        """Map states (..., D) to the next ones."""
        return z @ self.A.T + torch.relu(z @ self.G.T + self.g) @ self.B.T + self.h

    def active(self, z: Tensor) -> Tensor:
        """Return (..., R): which units of the states (..., D) are active."""
        return z @ self.G.T + self.g > 0

    def maps(self, active: Tensor) -> tuple[Tensor, Tensor]:
        """Return M (..., D, D) and c (..., D) of the regions in which these units (..., R) are active."""
        chosen = self.B * active.to(self.B.dtype)[..., None, :]
        return self.A + chosen @ self.G, chosen @ self.g + self.h


def regions(layer: PLRNN | ShallowPLRNN, x: Tensor | None = None) -> Regions:
    """Return the network of a layer under a constant input x (D,), zeros by default.

    Raises ConfigError for another layer, ShapeError for another shape of x.
    """
    if not isinstance(layer, PLRNN | ShallowPLRNN):
        raise ConfigError(f"regions: layer is a {type(layer).__name__}, expected a PLRNN or a ShallowPLRNN")
    D = layer.dim
    x = layer.A.new_zeros(D) if x is None else x
    if x.shape != (D,):
        raise ShapeError(f"regions: x has shape {tuple(x.shape)}, expected ({D},) of the layer")
    with torch.no_grad():
        push = layer.C(x.to(layer.A))
        if isinstance(layer, ShallowPLRNN):
            zero = torch.zeros_like(layer.h2)
            G, g, B, h = (layer.W2, layer.h2, layer.W1, layer.h1)
            if layer.clipped:
                G, g, B = torch.cat([G, G]), torch.cat([g, zero]), torch.cat([B, -B], 1)
        else:
            W, h = layer.W - torch.diag(layer.W.diagonal()), layer.h
            G, g, B = torch.eye(D).to(W), torch.zeros_like(h), W
            if layer.alphas is not None and layer.thresholds is not None:
                G, g = G.repeat(len(layer.alphas), 1), -layer.thresholds.flatten()
                B = torch.cat([alpha * W for alpha in layer.alphas], 1)
        return Regions(*(value.double() for value in (torch.diag(layer.A), B, G, g, h + push)))


@checked("cycles")
def cycles(
    network: Regions,
    length: Positive,
    *,
    draws: Positive = 256,
    rounds: Positive = 15,
    spread: float = 10.0,
    generator: torch.Generator | None = None,
) -> list[Cycle]:
    """Return the cycles of exactly `length` points, each once, sorted by their first coordinate.

    network: of `regions`.   draws: sequences of regions that a round follows at once.   rounds: the search ends after
    this number of rounds in a row without a new cycle.   spread: the first regions contain points from N(0, spread²)
    and their orbits.   generator: of the draws; None for seed 0.

    Memory is draws (D² + length R), and a number for each sequence that was solved. A round solves at most draws times
    20, 60 or 300 systems of D equations, for a length below 3, below 6, or more. Raises ConfigError for a number below
    1.

    >>> plane = Regions(*(torch.tensor(v).double() for v in ([[0.5]], [[-2.0]], [[1.0]], [0.0], [1.0])))
    >>> [fixed] = cycles(plane, 1)  # z = 0.5 z - 2 z + 1 for z > 0; at 0.4 the slope is -1.5
    >>> round(fixed.points.item(), 12), fixed.stable
    (0.4, False)
    """
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    units, cycles = len(network.g), _DistinctOrbits()
    steps = 20 if length < 3 else 60 if length < 6 else 300
    if length * units < 60 and 2 ** (length * units) <= draws * rounds * steps:
        for begin in range(0, 2 ** (length * units), 2**14):
            codes = torch.arange(begin, min(begin + 2**14, 2 ** (length * units)))
            bits = codes[:, None] >> torch.arange(length * units)
            cycles.add(_orbits(network, (bits % 2).bool().unflatten(1, (length, units)))[0])
        return cycles.sorted(network)
    weights = torch.randint(-(2**62), 2**62, (length, units), generator=generator)
    solved = torch.empty(0, dtype=torch.int64)  # codes of the sequences so far: none is solved twice
    idle = 0
    while idle < rounds:
        sequence, known = _drawn(network, length, draws, spread, generator), len(cycles)
        for _ in range(steps):
            codes = (sequence * weights).sum((1, 2))
            fresh = ~torch.isin(codes, solved)
            if not fresh.any():
                break
            solved = torch.cat([solved, codes[fresh].unique()])
            orbits, sequence = _orbits(network, sequence[fresh])
            cycles.add(orbits)
        idle = 0 if len(cycles) > known else idle + 1
    return cycles.sorted(network)


def branches(network: Callable[[float], Regions], values: Sequence[float], length: int, **search: Any) -> list[Branch]:
    """Return the intervals of a parameter in which each cycle of exactly `length` points exists and is stable.

    A cycle is known by the regions that it passes. It ends where a point meets the border of its region, or where it
    is not unique; it becomes unstable where a multiplier leaves the unit circle. Such a value is found by bisection
    between two of `values`, to the accuracy of float64. What begins and ends between two neighbours is not seen.

    network: the network at a value of the parameter.   values: at least two, from the least to the greatest; cycles
    are searched at each of them.   search: options of `cycles`.   Sorted by where they begin. Raises ConfigError.

    Source: Eisenmann et al., arXiv:2310.17561, sec. 4 and figure 3: such regions of a parameter show the bifurcations
    by border collision.

    >>> def map_of(slope):  # z = z / 2 + 1 for z < 0, slope z + 1 for z > 0
    ...     values = [[0.5]], [[slope - 0.5]], [[1.0]], [0.0], [1.0]
    ...     return Regions(*(torch.tensor(value, dtype=torch.float64) for value in values))
    >>> [branch] = branches(map_of, [-4.0, -2.5, -1.5, 0.0], 2)  # two points where slope < -1, stable above -2
    >>> [[round(end, 12) for end in each[0]] for each in (branch.exists, branch.stable)]
    [[-4.0, -1.0], [-2.0, -1.0]]
    """
    grid = [float(value) for value in values]
    if len(grid) < 2 or any(a >= b for a, b in itertools.pairwise(grid)):
        raise ConfigError(f"branches: values are {grid}, expected at least two, each above the one before")
    networks = {value: network(value) for value in grid}
    sequences: dict[tuple[tuple[bool, ...], ...], Tensor] = {}
    for each in networks.values():
        for cycle in cycles(each, length, **search):
            active = each.active(cycle.points)
            turns = [active.roll(turn, 0) for turn in range(length)]
            first = min(turns, key=Tensor.tolist)
            sequences.setdefault(tuple(map(tuple, first.tolist())), first)
    found = []
    for active in sequences.values():

        def where(stable: bool, active: Tensor = active) -> list[tuple[float, float]]:
            return _intervals(lambda value: _is_cycle(networks.get(value) or network(value), active, stable), grid)

        found.append(Branch(active, where(False), where(True)))
    return sorted(found, key=lambda branch: branch.exists[0])


def _is_cycle(network: Regions, active: Tensor, stable: bool) -> bool:
    """Whether there is a cycle through the regions of these units (k, R), and one that is stable."""
    if len(_orbits(network, active[None])[0]) == 0:
        return False
    return not stable or bool((_multipliers(network, active).abs() < 1).all())


def _intervals(holds: Callable[[float], bool], grid: Sequence[float]) -> list[tuple[float, float]]:
    """Return the intervals in which something holds, whose ends are found by bisection between values of the grid."""
    begin, found = grid[0] if holds(grid[0]) else None, []
    for left, right in itertools.pairwise(grid):
        if (begin is not None) == holds(right):
            continue
        while left < (middle := (left + right) / 2) < right:
            left, right = (middle, right) if holds(middle) == (begin is not None) else (left, middle)
        if begin is None:
            begin = right
        else:
            found.append((begin, left))
            begin = None
    return found if begin is None else [*found, (begin, grid[-1])]


def _multipliers(network: Regions, active: Tensor) -> Tensor:
    """Return the eigenvalues (D,) of the Jacobian over the steps through the regions of units (k, R)."""
    P = torch.eye(len(network.h), dtype=network.h.dtype)
    for M in network.maps(active)[0]:
        P = M @ P
    return torch.linalg.eigvals(P)


def _drawn(network: Regions, length: int, draws: int, spread: float, generator: torch.Generator) -> Tensor:
    """Return (draws, length, R): half of orbits from drawn points, half of points that are drawn one by one."""
    width = len(network.h)
    points = spread * torch.randn(draws, length, width, generator=generator, dtype=torch.float64)
    for t in range(1, length):
        points[: draws // 2, t] = network.step(points[: draws // 2, t - 1])
    return network.active(points)


def _orbits(network: Regions, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """Solve for the cycles through sequences of regions (N, k, R).

    Return the orbits (n, k, D) of those that are cycles, and the regions (m, k, R) that the virtual ones pass, in which
    the search goes on.
    """
    M, c = network.maps(sequence)
    eye = torch.eye(M.shape[-1], dtype=M.dtype)
    P, H = eye.expand_as(M[:, 0]), torch.zeros_like(c[:, 0])
    for t in range(sequence.shape[1]):
        P, H = M[:, t] @ P, (M[:, t] @ H[..., None])[..., 0] + c[:, t]
    first, info = torch.linalg.solve_ex(eye - P, H[..., None])
    points = [first[..., 0]]
    for _ in range(sequence.shape[1] - 1):
        points.append(network.step(points[-1]))
    orbit = torch.stack(points, 1)
    finite = (info == 0) & orbit.isfinite().all((1, 2))
    passed = network.active(orbit)
    same = (passed == sequence).all((1, 2))
    return orbit[finite & same], passed[finite & ~same]


class _DistinctOrbits:
    """Orbits (k, D), each once, whatever its first point; without those that repeat a shorter one."""

    def __init__(self) -> None:
        self.orbits: list[Tensor] = []
        self.centers: Tensor | None = None

    def __len__(self) -> int:
        return len(self.orbits)

    def add(self, orbits: Tensor) -> None:
        for orbit in orbits:
            k, near = len(orbit), ROUNDING * (1 + orbit.abs().max())
            if any((orbit[0] - orbit[d]).abs().max() < near for d in range(1, k) if k % d == 0):
                continue
            if any((other[:, None] - orbit[None]).abs().amax(2).min() < near for other in self._around(orbit, near)):
                continue
            self.orbits.append(orbit)
            center = orbit.mean(0)[None]
            self.centers = center if self.centers is None else torch.cat([self.centers, center])

    def _around(self, orbit: Tensor, near: Tensor) -> list[Tensor]:
        """Return the orbits with the same mean of their points: only these may be the same."""
        if self.centers is None:
            return []
        close = (self.centers - orbit.mean(0)).abs().amax(1) < near
        return [self.orbits[i] for i in close.nonzero().flatten().tolist()]

    def sorted(self, network: Regions) -> list[Cycle]:
        cycles = []
        for orbit in self.orbits:
            start = min(range(len(orbit)), key=lambda i: orbit[i].tolist())
            orbit = orbit.roll(-start, 0)
            cycles.append(Cycle(orbit, _multipliers(network, network.active(orbit))))
        return sorted(cycles, key=lambda cycle: cycle.points[0].tolist())


@dataclass(frozen=True)
class Orbits(Inspection):
    """cycles: of a piecewise-linear network, sorted by their length."""

    cycles: tuple[Cycle, ...]

    def figures(self) -> dict[str, float]:
        lengths = sorted({len(cycle.points) for cycle in self.cycles})
        counts = {
            "fixed points" if length == 1 else f"cycles of {length}": sum(len(c.points) == length for c in self.cycles)
            for length in lengths
        }
        return {**counts, "stable": sum(cycle.stable for cycle in self.cycles)}

    def columns(self) -> dict[str, Any]:
        every = [
            (number, len(cycle.points), cycle.stable, unit, value)
            for number, cycle in enumerate(self.cycles)
            for point in cycle.points.tolist()
            for unit, value in enumerate(point)
        ]
        names = ("cycle", "length", "stable", "unit", "value")
        return {name: [row[at] for row in every] for at, name in enumerate(names)}

    def panels(self) -> dict[str, Drawing]:
        return {"": self._draw}

    def _draw(self, axes: Any) -> None:
        """Draw the first two units of every point; lines join the points of a cycle."""
        for stable, color in ((True, BLUE), (False, RED)):
            chosen = [cycle for cycle in self.cycles if cycle.stable is stable]
            for number, cycle in enumerate(chosen):
                first = cycle.points[:, 0]
                second = cycle.points[:, 1] if cycle.points.shape[1] > 1 else torch.zeros_like(first)
                name = ("stable" if stable else "not stable") if number == 0 else None
                axes.plot([*first, first[0]], [*second, second[0]], "o-", ms=5, lw=0.8, color=color, label=name)
        axes.set(xlabel="unit 0", ylabel="unit 1")
        if self.cycles:
            axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.3)


@inspector(
    title="Fixed points and cycles",
    equation="z_{t+k} = z_t,  z_t = A z_{t-1} + B ReLU(G z_{t-1} + g) + h",
    source='Eisenmann et al., "Bifurcations and loss jumps in RNN training", arXiv:2310.17561, algorithm 1',
    takes="plrnn and shallow_plrnn",
)
def orbits(layer: Layer, x: Tensor | None = None, *, lengths: Sequence[int] = (1, 2, 3)) -> Orbits:
    """Return the cycles of a piecewise-linear network under a constant input, by `cycles`.

    x: (B, T, dim), whose mean over rows and steps is the constant input; None for zeros.   lengths: of the cycles.

    Raises ConfigError for another layer, and for a length below 1.
    """
    copy, inputs = prepared("orbits", layer, x, 1, rows=1)
    if not isinstance(copy, PLRNN | ShallowPLRNN):
        raise ConfigError(f"orbits: layer is a {type(layer).__name__}, expected a PLRNN or a ShallowPLRNN")
    network = regions(copy, None if x is None else inputs.mean((0, 1)))
    return Orbits(tuple(cycle for length in lengths for cycle in cycles(network, length)))
