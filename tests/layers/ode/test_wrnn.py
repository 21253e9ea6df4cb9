"""WaveRNN: its equation step by step, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, linear
from scanl.layers.ode.wrnn import WaveRNN

pytestmark = pytest.mark.cells_by_loop


def wrnn(layer, xs):
    act = {"relu": lambda v: torch.where(v > 0, v, 0), "tanh": torch.tanh, "ident": lambda v: v}[layer.activation]
    size, kernel = layer.width, layer.Wy.kernel_size[0]
    h, ys = torch.zeros(layer.num_channels, size), []
    for x in xs:
        given, new = linear(layer.Wx, x).view(layer.num_channels, size), torch.zeros(layer.num_channels, size)
        for o in range(layer.num_channels):
            for n in range(size):
                new[o, n] = act(
                    given[o, n] + layer.Wy.bias[o] + sum(
                        layer.Wy.weight[o, i, k] * h[i, (n + k - kernel // 2) % size]
                        for i in range(layer.num_channels)
                        for k in range(kernel)
                    )
                )  # fmt: skip
        h = new
        ys.append(linear(layer.readout, h.flatten()))
    return ys


EQUATIONS = {
    "wrnn": (lambda: WaveRNN(DIM, 4, 2, 5), wrnn),
    "wrnn_tanh": (lambda: WaveRNN(DIM, activation="tanh"), wrnn),
}

REFUSED = [
    (lambda: WaveRNN(8, num_channels=9), "wrnn: num_channels is 9, expected at most dim=8 where width is None"),
    (lambda: WaveRNN(8, conv_size=4), "wrnn: conv_size is 4, expected an odd number of at least 1"),
    (lambda: WaveRNN(8, activation="rel"), r"wrnn: unknown activation 'rel'; did you mean 'relu'\?"),
    (lambda: WaveRNN(8, init="fw"), r"wrnn: unknown init 'fw'; did you mean 'fwd'\?"),
]


def test_a_pulse_of_a_wave_rnn_travels_one_site_each_step():
    layer = WaveRNN(3, width=5)
    torch.nn.init.zeros_(layer.Wy.bias)
    _, state = layer(torch.tensor([[[0.0, 2.0, 0.0]]]))
    places = []
    for _ in range(6):
        torch.testing.assert_close(state.sum(), torch.tensor(2.0))
        places.append(state.argmax().item())
        _, state = layer.step(torch.zeros(1, 3), state)
    assert places == [0, 4, 3, 2, 1, 0]
