"""CoRNN: its equation step by step, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM
from scanl.layers.ode.cornn import CoRNN
from scanl.layers.ode.nwm import NeuralWaveMachine

pytestmark = pytest.mark.cells_by_loop


def cornn(layer, xs):
    y, z, ys = torch.zeros(DIM), torch.zeros(DIM), []
    for x in xs:
        force = torch.tanh(layer.i2h.weight @ torch.cat([x, z, y]) + layer.i2h.bias) - layer.gamma * y
        if layer.variant == "implicit":
            z = (z + layer.dt * force) / (1 + layer.dt * layer.damping)
        else:
            z = z + layer.dt * (force - layer.damping * z)
        y = y + layer.dt * z
        ys.append(y)
    return ys


EQUATIONS = {
    "cornn": (lambda: CoRNN(DIM, 0.3), cornn),
    "cornn_implicit": (lambda: CoRNN(DIM, 0.3, variant="implicit"), cornn),
}

REFUSED = [
    (lambda: CoRNN(8, 0), "cornn: dt is 0, expected more than 0"),
    (lambda: CoRNN(8, gamma=-1), "cornn: gamma is -1, expected at least 0"),
    (lambda: CoRNN(8, variant="implict"), r"cornn: unknown variant 'implict'; did you mean 'implicit'\?"),
]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("variant", ["torus", "rings"])
def test_nwm_is_a_cornn_with_circulant_weights(variant):
    size = 3
    layer, dense = NeuralWaveMachine(9, size, variant, dt=0.3), CoRNN(9, 0.3)
    rows, columns = layer.Wy.kernel_size
    eye = torch.eye(9).view(9, 1, size, size)
    padded = torch.nn.functional.pad(eye, (columns // 2, columns // 2, rows // 2, rows // 2), mode="circular")
    with torch.no_grad():
        torch.nn.init.eye_(layer.readout.weight)
        torch.nn.init.zeros_(layer.readout.bias)
        whole = [layer.Wx.weight]
        for conv in (layer.Wz, layer.Wy):
            whole.append(torch.nn.functional.conv2d(padded, conv.weight).view(9, 9).T)
        dense.i2h.weight.copy_(torch.cat(whole, 1))
        dense.i2h.bias.copy_(layer.Wx.bias + layer.Wy.bias + layer.Wz.bias)
    x = torch.randn(2, 9, 9)
    torch.testing.assert_close(layer(x)[0], dense(x)[0])
