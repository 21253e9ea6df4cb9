"""Eigenvalues of a step beside closed forms."""

import math
from importlib import import_module

import pytest
import torch

from scanl.errors import ConfigError
from scanl.inspect import Eigenvalues, eigenvalues
from scanl.inspect.base import noise
from scanl.layers import GLA, GRU, LRU, Attention, Mamba
from scanl.layers.state import flatten, unflatten
from scanl.ops import op_calls


def ordered(values):
    """Complex numbers in an order that rounding does not change."""
    return torch.stack(sorted(values, key=lambda z: (round(z.real.item(), 9), round(z.imag.item(), 9))))


def test_those_of_an_lru_are_its_parameters():
    torch.manual_seed(0)
    layer = LRU(4)
    values = eigenvalues(layer, noise(2, 3, 4)).values
    expected = torch.polar((-layer.nu_log.double().exp()).exp(), layer.theta_log.double().exp()).detach()
    both = torch.cat([expected, expected.conj()])
    for row in values:
        torch.testing.assert_close(ordered(row), ordered(both), rtol=1e-6, atol=1e-6)


def test_those_of_a_gated_memory_are_its_decays_at_that_step():
    """The state of GLA is decayed by e^g of each key channel, for all value channels."""
    torch.manual_seed(0)
    layer, x = GLA(8, num_heads=2).double(), noise(1, 5, 8)
    with op_calls() as calls:
        layer(x)
    (call,) = [call for call in calls if call.op.name == "linear_attention"]
    decay = call.operands["g"][0, -1].exp()
    width = call.operands["v"].shape[-1]
    values = eigenvalues(layer, x).values[0]
    expected = decay.flatten().repeat_interleave(width).sort().values
    torch.testing.assert_close(values.real.sort().values[-len(expected) :], expected.detach())


def test_blocks_have_the_eigenvalues_of_the_whole_matrix():
    """Of Mamba with its window of inputs, which acts on the memory and not the other way."""
    torch.manual_seed(0)
    layer, x = Mamba(4, state_dim=2).double(), noise(1, 6, 4)
    with torch.no_grad():
        state = layer(x[:, :-1])[1]
    flat = flatten(state)
    whole = torch.autograd.functional.jacobian(
        lambda s: flatten(layer.step(x[:, -1], unflatten(s[None], state))[1])[0], flat[0]
    )
    expected = torch.linalg.eigvals(whole).abs().sort().values
    values = eigenvalues(layer, x).values[0].abs().sort().values
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-4)  # zeros of a window are not simple


@pytest.mark.parametrize("copies", [1, 5])
def test_few_rows_of_the_matrix_at_a_time_make_the_same_matrix(copies, monkeypatch):
    torch.manual_seed(0)
    layer, x = GRU(12), noise(1, 3, 12)
    expected = eigenvalues(layer, x).values[0]
    monkeypatch.setattr(import_module("scanl.inspect.eigenvalues"), "BUDGET", 12 * copies)
    torch.testing.assert_close(ordered(eigenvalues(layer, x).values[0]), ordered(expected))


def test_half_life_and_figures():
    one = Eigenvalues(torch.tensor([[0.5 + 0j, 1.0 + 0j, 0.0 + 0j]], dtype=torch.complex128))
    torch.testing.assert_close(one.half_life(), torch.tensor([[1.0, math.inf, 0.0]]).double())
    assert one.figures() == {"numbers": 3, "largest |λ|": 1, "median |λ|": 0.5, "longest half-life, steps": math.inf}


def test_what_is_refused(monkeypatch):
    module = import_module("scanl.inspect.eigenvalues")  # the package has the function under this name
    monkeypatch.setattr(module, "MAX_NUMBERS", 10)
    with pytest.raises(ConfigError, match="eigenvalues: the state of gru has 12 numbers, expected 1 to 10; build"):
        eigenvalues(GRU(12))
    monkeypatch.undo()
    monkeypatch.setattr(module, "MAX_BLOCK_NUMBERS", 10)
    with pytest.raises(ConfigError, match="eigenvalues: 12 numbers of the state act on each other, expected at most"):
        eigenvalues(GRU(12), noise(1, 2, 12))
    with pytest.raises(ConfigError, match="expected 1 to 8192"):
        eigenvalues(Attention(64))
