"""Every layer is its equation: each layer's file writes its equation out, step by step, in float64."""

import pytest
import torch

from by_hand import DIM, T, shaken
from layer_files import declared
from scanl import layers
from scanl.layers import state as states
from tests.test_layers import assert_derivatives

COVERS = ["layers/parts/*", "layers/attention/softmax_attention", "layers/rwkv/rwkv_time_mix"]

pytestmark = pytest.mark.cells_by_loop("name")

FILES = declared("EQUATIONS")
CASES = {name: case for cases in FILES for name, case in cases.items()}


def test_every_layer_has_its_equation():
    """The first word of a case's name is the layer's."""
    assert len(CASES) == sum(map(len, FILES))
    assert not [name for name in layers.names() if not any(f"{case}_".startswith(f"{name}_") for case in CASES)]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", CASES)
def test_layer_is_its_equation(name):
    make, equation = CASES[name]
    layer, x = shaken(make(), 0.3), torch.randn(1, T, DIM)
    torch.testing.assert_close(layer(x)[0][0], torch.stack(equation(layer, list(x[0]))))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", CASES)
def test_every_variant_streams_and_packs(name):
    layer, x = shaken(CASES[name][0]()), torch.randn(1, T, DIM)
    whole, last = layer(x)
    if not layer.bidirectional:
        state, ys = layer.init_state(1), []
        for t in range(T):
            y, state = layer.step(x[:, t], state)
            ys.append(y)
        torch.testing.assert_close(torch.stack(ys, 1), whole)
        for (_, a), (_, b) in zip(states.leaves(state), states.leaves(last), strict=True):
            torch.testing.assert_close(a, b)
    packed, _ = layer(torch.cat([x, x[:, :3]], 1), cu_seqlens=torch.tensor([0, T, T, T + 3]))
    torch.testing.assert_close(packed, torch.cat([whole, layer(x[:, :3])[0]], 1))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", CASES)
def test_every_variant_has_the_gradients_of_its_output(name):
    torch.manual_seed(1)
    layer, x = shaken(CASES[name][0]()), torch.randn(2, 4, DIM)
    reason = layer.excused.get("gradients_are_the_derivatives_and_reach_every_parameter")
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    assert_derivatives(layer, x, lambda y, _: y)
    layer(x)[0].square().sum().backward()
    assert [name for name, parameter in layer.named_parameters() if not parameter.grad.any()] == []
