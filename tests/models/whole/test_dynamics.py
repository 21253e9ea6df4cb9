"""A system reconstructed from observations: free runs, splitting, and distances of orbits."""

import math

import pytest
import torch

from scanl import ops
from scanl.errors import ConfigError, ShapeError
from scanl.models.whole.dynamics import Dynamics, distance


def test_it_runs_freely_from_its_own_state():
    model, x = Dynamics(2, 3).double(), torch.randn(2, 6, 2, dtype=torch.float64)
    y, _ = model(x)
    torch.testing.assert_close(model.run(x[:, 0], 6), y)
    other = x.clone()
    other[:, 1:] = 0
    torch.testing.assert_close(model(other)[0], y)


@pytest.mark.parametrize("forcing", [0.0, 0.4, 1.0])
def test_an_orbit_cut_anywhere_goes_on(forcing):
    model, x = Dynamics(2, 3).double(), torch.randn(2, 7, 2, dtype=torch.float64)
    model.forcing = forcing
    y, last = model(x)
    first, state = model(x[:, :3])
    second, state = model(x[:, 3:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), y)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize(("layer", "options"), [("shallow_plrnn", {"hidden_dim": 5}), ("plrnn", {"branches": 2})])
def test_all_steps_at_once_equal_steps_one_by_one(layer, options):
    """With a hook, the layer runs step by step, because the hook must see each step."""
    torch.manual_seed(0)
    model, x = Dynamics(2, 3, layer, options).double(), torch.randn(2, 6, 2, dtype=torch.float64)
    model.forcing, parameters, results = 0.4, list(model.parameters()), []
    for steps in (0, 6):
        seen = []
        if steps:
            model.layer.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        with ops.backend("reference"):
            y, last = model(x)
        results.append([y, last, *torch.autograd.grad(y.square().sum() + last.sum(), parameters)])
        assert len(seen) == steps
    for at_once, one_by_one in zip(*results, strict=True):
        torch.testing.assert_close(at_once, one_by_one)


def test_saved_and_loaded_it_runs_the_same(tmp_path):
    model = Dynamics(2, 3, "plrnn", {"branches": 2})
    model.save(tmp_path)
    x = torch.randn(1, 2)
    torch.testing.assert_close(Dynamics.load(tmp_path).run(x, 5), model.run(x, 5))


def test_distances_are_zero_for_the_same_orbit_and_grow():
    t = torch.arange(4000.0)
    circle = torch.stack([(0.1 * t).sin(), (0.1 * t).cos()], 1)
    faster = torch.stack([(0.3 * t).sin(), (0.3 * t).cos()], 1)
    assert max(distance(circle, circle)) < 1e-6
    assert distance(faster, circle).spectra > 0.5
    assert distance(faster, circle).states < 1
    assert distance(2 * circle, circle).states > 3
    assert distance(torch.full_like(circle, math.nan), circle).states > 3


def test_wrong_arguments():
    with pytest.raises(ConfigError, match="dynamics: observed is 3, expected at most dim=2"):
        Dynamics(3, 2)
    with pytest.raises(ConfigError, match="expected one whose state is a single tensor"):
        Dynamics(1, 4, "lstm")
    with pytest.raises(ShapeError, match=r"dynamics: x has shape \(1, 2, 3\), expected \(B, T, 2\)"):
        Dynamics(2, 3)(torch.zeros(1, 2, 3))
    with pytest.raises(ShapeError, match="distance: orbit has 100 steps and observed 400, expected at least 162"):
        distance(torch.randn(100, 2), torch.randn(400, 2))
    with pytest.raises(ShapeError, match=r"distance: orbit has shape \(200, 2\) and observed \(200, 3\)"):
        distance(torch.randn(200, 2), torch.randn(200, 3))
    assert distance(torch.randn(162, 1), torch.randn(162, 1)).spectra < 1
