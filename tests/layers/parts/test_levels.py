"""Levels of log-linear memories, in both layers that have them."""

import math

import pytest
import torch
from torch.utils._pytree import tree_flatten

from by_hand import DIM, assert_normal
from scanl import layers, ops
from tests.layers.memory.equations import undecayed

pytestmark = pytest.mark.cells_by_loop("name")


def test_init_of_log_linear():
    for layer, heads in (
        (layers.build("log_linear_mamba2", 128), 4),
        (layers.build("log_linear_gated_deltanet", 48), 6),
    ):
        assert layer.L.shape == (heads, 15)
        assert (layer.L == 1).all()
        assert {"L", "A_log", "dt_bias"} <= undecayed(layer)
    assert_normal(layer.l_proj.weight, 0.02)
    torch.testing.assert_close(layers.build("log_linear_mamba2", 128).A_log.exp(), torch.arange(1.0, 5))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("name", "plain"), [("log_linear_mamba2", "mamba2"), ("log_linear_gated_deltanet", "gated_deltanet")]
)
def test_log_linear_with_equal_weights_is_the_linear_form(name, plain):
    """Where each level is read with the same weight, the levels together are the whole past."""
    options = {"head_dim": 4, "state_dim": 3} if plain == "mamba2" else {"head_dim": 3, "num_heads": 2}
    layer, linear_form = layers.build(name, DIM, max_length=70, **options), layers.build(plain, DIM, **options)
    weights = {key: value for key, value in layer.state_dict().items() if key not in ("L", "l_proj.weight")}
    if plain == "mamba2":
        weights["in_proj.weight"] = weights["in_proj.weight"][: linear_form.in_proj.out_features]
    linear_form.load_state_dict(weights)
    layer.L.data.zero_()  # softplus(0) = ln 2
    x = torch.randn(2, 70, DIM)
    if plain == "mamba2":
        layer.D.data.mul_(math.log(2))
    for each in (layer, linear_form):  # without its ε, the norm takes the factor out
        (each.norm if plain == "mamba2" else each.o_norm).eps = 0.0
    torch.testing.assert_close(layer(x)[0], linear_form(x)[0])


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", ["log_linear_mamba2", "log_linear_gated_deltanet"])
@pytest.mark.parametrize("length", [65, 128, 201, 330])
def test_levels_of_a_sequence_from_its_start_are_those_of_its_steps(name, length):
    """The weights differ between levels. The other side is the plain loop of one op, in two calls with a state between.

    The lengths are one step over a chunk, whole chunks, an odd number of chunks, and a level of four chunks.
    """
    groups = {"num_groups": 2, "state_dim": 3, "head_dim": 4} if name == "log_linear_mamba2" else {"head_dim": 3}
    layer = layers.build(name, DIM, max_length=700, **groups)
    layer.L.data = torch.rand_like(layer.L) * 3
    x = torch.randn(2, length, DIM, requires_grad=True)
    leaves = [x, *layer.parameters()]

    def with_gradients(y, state):
        parts = [y, *(part for part in tree_flatten(state)[0] if part.is_floating_point())]
        torch.manual_seed(1)
        return [*parts, *torch.autograd.grad(sum((part * torch.randn_like(part)).sum() for part in parts), leaves)]

    at_once = with_gradients(*layer(x))
    with ops.backend("reference"):
        first, state = layer(x[:, :1])
        rest, state = layer(x[:, 1:], state)
    for own, other in zip(at_once, with_gradients(torch.cat([first, rest], 1), state), strict=True):
        torch.testing.assert_close(own, other)
