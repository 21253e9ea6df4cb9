"""NonNormalRNN: its equation step by step, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM
from scanl.layers.rnn.nnrnn import NonNormalRNN
from scanl.layers.rnn.ornn import ExpRNN
from tests.layers.rnn.equations import exponential, real_modrelu, skew

pytestmark = pytest.mark.cells_by_loop


def nnrnn(layer, xs):
    p, middle = exponential(skew(layer.log_P)), torch.triu(layer.UppT, 1).clone()
    for j in range(DIM // 2):
        turn = torch.stack([layer.theta[j].cos(), -layer.theta[j].sin(), layer.theta[j].sin(), layer.theta[j].cos()])
        middle[2 * j : 2 * j + 2, 2 * j : 2 * j + 2] += layer.alpha[j] * turn.view(2, 2)
    h, ys = torch.zeros(DIM), []
    for x in xs:
        h = real_modrelu(h @ p @ middle @ p.T + layer.U.weight @ x, layer.nonlinearity.b)
        ys.append(h)
    return ys


EQUATIONS = {"nnrnn": (lambda: NonNormalRNN(DIM), nnrnn)}

REFUSED = [
    (lambda: NonNormalRNN(7), "nnrnn: dim is 7, expected an even number of at least 2"),
    (lambda: NonNormalRNN(8, "haar"), "nnrnn: unknown init 'haar'"),
]


@pytest.mark.usefixtures("double")
def test_nnrnn_without_its_transients_is_orthogonal():
    layer, plain, x = NonNormalRNN(DIM), ExpRNN(DIM), torch.randn(2, 9, DIM)
    with torch.no_grad():
        plain.recurrent_kernel.A.zero_()
        plain.recurrent_kernel.base.copy_(layer.recurrent_matrix())
        plain.input_kernel.weight.copy_(layer.U.weight)
        plain.nonlinearity.b.copy_(layer.nonlinearity.b)
    torch.testing.assert_close(layer(x), plain(x))
    assert layer.penalty() == 0
    torch.nn.init.constant_(layer.alpha, 1.5)
    torch.testing.assert_close(layer.penalty(), torch.tensor(0.25 * DIM / 2))
