"""ONLSTM: its equation step by step, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, linear, sigmoid
from scanl.layers.rnn.onlstm import ONLSTM

pytestmark = pytest.mark.cells_by_loop


def onlstm(layer, xs):
    """Equations (6) to (14), neuron by neuron."""
    chunks, size = DIM // layer.chunk_size, layer.chunk_size
    h, c, ys = torch.zeros(DIM), torch.zeros(DIM), []
    for x in xs:
        raw = linear(layer.ih[0], x) + linear(layer.hh, h)
        shares = [torch.exp(part) / torch.exp(part).sum() for part in raw[: 2 * chunks].split(chunks)]
        o, z, i, f = raw[2 * chunks :].split(DIM)
        new = torch.zeros(DIM)
        for d in range(DIM):
            master_i = 1 - shares[0][: d // size + 1].sum()
            master_f = shares[1][: d // size + 1].sum()
            omega = master_f * master_i
            f_hat = sigmoid(f[d]) * omega + (master_f - omega)
            i_hat = sigmoid(i[d]) * omega + (master_i - omega)
            new[d] = f_hat * c[d] + i_hat * torch.tanh(z[d])
        c = new
        h = sigmoid(o) * torch.tanh(c)
        ys.append(h)
    return ys


EQUATIONS = {
    "onlstm": (lambda: ONLSTM(DIM, 2), onlstm),
    "onlstm_single": (lambda: ONLSTM(DIM, 1, forget_bias=1.0), onlstm),
}

REFUSED = [
    (lambda: ONLSTM(8, 3), "onlstm: chunk_size is 3, expected a divisor of dim=8"),
    (lambda: ONLSTM(0), "onlstm: dim is 0, expected at least 1"),
    (lambda: ONLSTM(8, forget_bias=1.0, t_max=9), "onlstm: t_max is 9, expected None because of forget_bias=1.0"),
]


@pytest.mark.usefixtures("double")
def test_master_gates_of_onlstm_keep_the_high_neurons_and_write_the_low_ones():
    """Sharp shares put the cuts at chunks: neurons from the first on are kept as they are, neurons before the second
    are written, and where both hold the usual gates decide."""
    layer = ONLSTM(DIM, 2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.hh.bias[2] = layer.hh.bias[4 + 1] = 1e3  # written: chunks before 2; kept: chunks from 1
        layer.hh.bias[8 + DIM : 8 + 2 * DIM] = 0.5  # z
    state = torch.randn(1, 2, DIM)
    c = layer(torch.zeros(1, 1, DIM), state)[1][0, 1]
    new = torch.full((2,), math.tanh(0.5))
    old = state[0, 1]
    torch.testing.assert_close(c, torch.cat([new, old[2:4] / 2 + new / 2, old[4:]]))
