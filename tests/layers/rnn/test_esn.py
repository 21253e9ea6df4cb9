"""ESN: its equation step by step, how it starts, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, T, assert_normal, linear
from scanl import layers
from scanl.layers.rnn.esn import ESN

pytestmark = pytest.mark.cells_by_loop


def esn(layer, xs):
    s, ys = torch.zeros(layer.width), []
    for x in xs:
        s = (1 - layer.leak) * s + layer.leak * torch.tanh(layer.W @ s + layer.Win @ x + layer.bias)
        ys.append(linear(layer.readout, s))
    return ys


EQUATIONS = {
    "esn": (lambda: ESN(DIM, connectivity=0.3, input_connectivity=0.5), esn),
    "esn_leaky": (lambda: ESN(DIM, 10, 0.9, 0.3, 0.5, 0.5, 0.7, 0.2), esn),
}

REFUSED = [
    (lambda: ESN(8, 0), "esn: width is 0, expected at least 1"),
    (lambda: ESN(8, leak=0.0), "esn: leak is 0.0, expected more than 0"),
    (lambda: ESN(8, spectral_radius=-1.0), "esn: spectral_radius is -1.0, expected at least 0"),
    (lambda: ESN(8, input_connectivity=2.0), "esn: input_connectivity is 2.0, expected 0 to 1"),
]


@pytest.mark.usefixtures("double")
def test_a_reservoir_forgets_where_it_started():
    """Two states come together under the same input; with a radius far above 1 and no input they do not."""
    layer, x = ESN(DIM, 40, spectral_radius=0.8, leak=0.5), torch.randn(1, 200, DIM)
    one, other = (layer(x, 3 * torch.randn(1, 40))[1] for _ in range(2))
    assert (one - other).abs().max() < 1e-5
    wild, still = ESN(DIM, 40, spectral_radius=3.0, connectivity=0.5), torch.zeros(1, 200, DIM)
    one, other = (wild(still, torch.randn(1, 40))[1] for _ in range(2))
    assert (one - other).abs().max() > 0.1


@pytest.mark.usefixtures("double")
def test_reservoirs_are_deep_and_bidirectional_by_the_wrappers():
    x = torch.randn(2, T, DIM)
    both = layers.build("bidirectional", DIM, layer="esn", layer_options={"width": 10})
    assert both(x)[0].shape == x.shape
    assert not torch.equal(both.forward_layer.W, both.backward_layer.W)
    assert [name for name, _ in both.named_parameters() if "readout" not in name] == []


def test_init_of_a_reservoir():
    torch.manual_seed(0)
    layer = ESN(50, spectral_radius=0.9, connectivity=0.2, input_connectivity=0.3, input_scaling=0.5, bias_scaling=0.1)
    assert layer.W.shape == (200, 200)
    torch.testing.assert_close(torch.linalg.eigvals(layer.W.double()).abs().max().item(), 0.9, rtol=1e-5, atol=0)
    weights = layer.W[layer.W != 0]
    assert abs(len(weights) / 200**2 - 0.2) < 5 * 0.4 / 200
    assert_normal(weights / weights.std(), 1.0)
    assert set(layer.Win.unique().tolist()) == {-0.5, 0.0, 0.5}
    assert abs((layer.Win != 0).float().mean() - 0.3) < 5 * 0.46 / 100
    assert abs((layer.Win > 0).sum() / (layer.Win != 0).sum() - 0.5) < 5 * 0.5 / 54
    torch.testing.assert_close(layer.bias.abs(), torch.full((200,), 0.1))
    default = ESN(50)
    torch.testing.assert_close(torch.linalg.eigvals(default.W.double()).abs().max().item(), 1.0, rtol=1e-5, atol=0)
    assert (default.leak, default.bias.any().item()) == (1.0, False)
    assert [name for name, _ in layer.named_parameters()] == ["readout.weight", "readout.bias"]
