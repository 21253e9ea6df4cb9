"""Fixed points and cycles of piecewise-linear networks, beside an exhaustive search over the sequences of regions."""

import itertools

import pytest
import torch

from scanl.errors import ConfigError, ShapeError
from scanl.inspect import Regions, branches, cycles, orbits, regions
from scanl.layers import GRU, PLRNN, ShallowPLRNN


def plain(units: int, seed: int) -> PLRNN:
    torch.manual_seed(seed)
    layer = PLRNN(units).double()
    with torch.no_grad():
        layer.W.copy_(4 * torch.randn(units, units))
        layer.A.copy_(2 * torch.rand(units) - 1)
        layer.h.copy_(torch.randn(units))
    return layer


def exhaustive(network: Regions, length: int) -> list[torch.Tensor]:
    """Every sequence of regions, one after the other: the first points of cycles of this length, each cycle once."""
    units, firsts, points = len(network.g), [], []
    for bits in itertools.product((False, True), repeat=units * length):
        active = torch.tensor(bits).unflatten(0, (length, units))
        P, H = torch.eye(len(network.h)).double(), torch.zeros_like(network.h)
        for pattern in active:
            M, c = network.maps(pattern)
            P, H = M @ P, M @ H + c
        z = torch.linalg.solve(torch.eye(len(P)).double() - P, H)
        orbit = [z]
        for _ in range(length - 1):
            orbit.append(network.step(orbit[-1]))
        if not torch.equal(network.active(torch.stack(orbit)), active):
            continue
        shorter = any((orbit[0] - orbit[d]).norm() < 1e-6 for d in range(1, length))
        if not shorter and not any((z - known).norm() < 1e-6 for known in points):
            firsts.append(min(orbit, key=lambda point: point.tolist()))
            points += orbit
    return sorted(firsts, key=lambda point: point.tolist())


def assert_all_found(network: Regions, length: int, **options) -> int:
    expected, actual = exhaustive(network, length), cycles(network, length, **options)
    assert len(actual) == len(expected)
    for cycle, first in zip(actual, expected, strict=True):
        torch.testing.assert_close(cycle.points[0], first, rtol=1e-8, atol=1e-8)
    return len(expected)


@pytest.mark.parametrize("options", [{}, {"draws": 4, "rounds": 20}], ids=["every sequence", "search"])
def test_all_cycles_of_small_networks_are_found(options):
    """With few draws the sequences are too many to try each, so the search runs."""
    for seed, counts in {4: [2, 2, 2], 7: [1, 1, 5], 9: [1, 0, 1]}.items():
        network = regions(plain(3, seed))
        assert [assert_all_found(network, length, **options) for length in (1, 2, 3)] == counts


def test_multipliers_are_those_of_the_derivative_over_the_steps():
    network, count = regions(plain(3, 7)), 0
    for length in (1, 2, 3):
        for cycle in cycles(network, length):

            def around(z, length=length):
                for _ in range(length):
                    z = network.step(z)
                return z

            expected = torch.linalg.eigvals(torch.autograd.functional.jacobian(around, cycle.points[0]))
            for value in expected:
                assert (cycle.multipliers - value).abs().min() < 1e-9 * (1 + value.abs())
            count += 1
    assert count == 7


def test_a_search_ends_after_rounds_without_a_new_cycle():
    """Each of six units has fixed points -2 and 1, so all 64 regions have one; a round with one draw finds one."""
    eye, ones = torch.eye(6).double(), torch.ones(6).double()
    network = Regions(0.5 * eye, 1.5 * eye, eye, 0 * ones, -ones)
    points = torch.stack([cycle.points[0] for cycle in cycles(network, 1, draws=1, rounds=3)])
    assert 10 < len(points) < 64
    assert ((points - 1).abs().minimum((points + 2).abs()) < 1e-9).all()
    assert len(cycles(network, 1, draws=1, rounds=4)) == 64  # each sequence is tried


@pytest.mark.parametrize(
    "make",
    [lambda: plain(3, 4), lambda: PLRNN(3, branches=2), lambda: ShallowPLRNN(3, 4), lambda: ShallowPLRNN(2, 3, False)],
    ids=["plain", "dendritic", "clipped", "shallow"],
)
def test_cycles_are_orbits_of_the_layer_itself(make):
    torch.manual_seed(3)
    layer, x = make().double(), None
    network, seen = regions(layer, x), 0
    for length in (1, 2, 4):
        for cycle in cycles(network, length, draws=32, rounds=3):
            state = cycle.points[:1]
            for point in cycle.points.roll(-1, 0):
                _, state = layer.step(torch.zeros_like(state), state)
                torch.testing.assert_close(state[0], point, rtol=1e-8, atol=1e-8)
            jacobian = torch.autograd.functional.jacobian(
                lambda z, n=length: _iterated(layer, z[None], n)[0], cycle.points[0]
            )
            values = torch.linalg.eigvals(jacobian)
            torch.testing.assert_close(values.abs().sort().values, cycle.multipliers.abs().sort().values)
            seen += 1
    assert seen


def _iterated(layer, state, length):
    for _ in range(length):
        _, state = layer.step(torch.zeros_like(state), state)
    return state


def skew_tent(left: float, right: float) -> Regions:
    """z = left z + 1 for z < 0, right z + 1 for z > 0: the normal form of a border collision in one dimension."""
    values = [[left]], [[right - left]], [[1.0]], [0.0], [1.0]
    return Regions(*(torch.tensor(value, dtype=torch.float64) for value in values))


@pytest.mark.parametrize("a", [0.5, 0.75])
def test_where_the_cycles_of_the_skew_tent_map_exist_and_are_stable(a):
    """By hand: the fixed point for b < 1; LR for b < -1, stable above -1/a; LLR and LRR for b < -(1 + a) / a, of which
    LLR is stable above -1/a^2. Each border of existence is where a point is 0."""
    low, high, grid = -6.0, 0.99, torch.linspace(-6, 0.99, 30).tolist()
    grid[0], grid[-1] = low, high
    three = -(1 + a) / a
    expected = {
        (True,): ([(low, high)], [(-1, high)]),
        (False, True): ([(low, -1)], [(-1 / a, -1)]),
        (False, False, True): ([(low, three)], [(-1 / a**2, three)] if -1 / a**2 < three else []),
        (False, True, True): ([(low, three)], []),
    }
    found = [branch for length in (1, 2, 3) for branch in branches(lambda b: skew_tent(a, b), grid, length)]
    assert {tuple(branch.active[:, 0].tolist()) for branch in found} == set(expected)
    for active, exists, stable in found:
        for intervals, wanted in zip((exists, stable), expected[tuple(active[:, 0].tolist())], strict=True):
            assert [len(each) for each in intervals] == [2] * len(wanted)
            for interval, ends in zip(intervals, wanted, strict=True):
                assert interval == pytest.approx(ends, rel=1e-12)


def test_branches_are_the_cycles_at_every_value():
    """Of two units, over a bias: between the values of the grid an exhaustive search finds as many cycles."""
    layer = plain(2, 9)

    def network(value: float) -> Regions:
        with torch.no_grad():
            layer.h[0] = value
        return regions(layer)

    grid = torch.linspace(-1.5, 1.5, 13, dtype=torch.float64).tolist()
    counts = set()
    for length in (1, 2):
        found = branches(network, grid, length)
        for value in (-1.37, -0.61, -0.05, 0.33, 1.19):
            here = [b for b in found if any(low <= value <= high for low, high in b.exists)]
            assert len(here) == len(exhaustive(network(value), length))
            steady = [b for b in here if any(low <= value <= high for low, high in b.stable)]
            assert len(steady) == sum(cycle.stable for cycle in cycles(network(value), length))
            counts.add((length, len(here), len(steady)))
    assert len(counts) > 2  # some cycles begin, end, or change their stability


def test_a_constant_input_moves_the_fixed_point():
    layer, x = plain(3, 4), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    for cycle in cycles(regions(layer, x), 1):
        _, state = layer.step(x[None], cycle.points)
        torch.testing.assert_close(state, cycle.points)


def test_stability_is_that_of_orbits_nearby():
    for seed in (0, 4, 8):
        layer = plain(3, seed)
        for cycle in cycles(regions(layer), 1):
            nearby = cycle.points + 1e-6 * torch.randn(20, 3, dtype=torch.float64)
            away = (_iterated(layer, nearby, 400) - cycle.points).norm(dim=1)
            assert cycle.stable == bool((away < 1e-5).all()) or cycle.multipliers.abs().max() > 0.98


def test_orbits_are_the_cycles_of_the_lengths():
    layer, x = plain(3, 4), torch.ones(1, 2, 3, dtype=torch.float64)
    inspection = orbits(layer, lengths=(1, 2))
    expected = [*cycles(regions(layer), 1), *cycles(regions(layer), 2)]
    assert [cycle.points.tolist() for cycle in inspection.cycles] == [cycle.points.tolist() for cycle in expected]
    assert inspection.figures()["fixed points"] == 2
    driven = orbits(layer, x, lengths=(1,)).cycles
    assert [c.points.tolist() for c in driven] == [c.points.tolist() for c in cycles(regions(layer, x[0, 0]), 1)]
    with pytest.raises(ConfigError, match="orbits: layer is a GRU, expected a PLRNN or a ShallowPLRNN"):
        orbits(GRU(3))


def test_wrong_arguments():
    for values in ([1.0], [1.0, 1.0], [2.0, 1.0]):
        with pytest.raises(ConfigError, match="expected at least two, each above the one before"):
            branches(lambda b: skew_tent(0.5, b), values, 1)
    with pytest.raises(ConfigError, match="regions: layer is a GRU, expected a PLRNN or a ShallowPLRNN"):
        regions(GRU(3))  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"regions: x has shape \(2,\), expected \(3,\) of the layer"):
        regions(PLRNN(3), torch.zeros(2))
    with pytest.raises(ConfigError, match="cycles: length is 0, expected at least 1"):
        cycles(regions(PLRNN(2)), 0)
