"""OrthogonalRNN: its equation step by step, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM
from scanl import layers
from scanl.layers.rnn.ornn import DTriv, ExpRNN, OrthogonalRNN, ScoRNN
from tests.layers.rnn.equations import exponential, real_modrelu, skew

pytestmark = pytest.mark.cells_by_loop


def ornn(layer, xs):
    a, eye, h, ys = skew(layer.recurrent_kernel.A), torch.eye(DIM), torch.zeros(DIM), []
    w = exponential(a) if layer.recurrent_kernel.variant == "exp" else torch.linalg.inv(eye + a) @ (eye - a)
    count = round(layer.config["negative"] * DIM)
    w = layer.recurrent_kernel.base @ w @ torch.diag(torch.cat([torch.ones(DIM - count), -torch.ones(count)]))
    for x in xs:
        h = real_modrelu(h @ w + layer.input_kernel.weight @ x, layer.nonlinearity.b)
        ys.append(h)
    return ys


EQUATIONS = {
    "ornn": (lambda: OrthogonalRNN(DIM, "cayley", "henaff"), ornn),
    "exprnn": (lambda: ExpRNN(DIM), ornn),
    "dtriv": (lambda: DTriv(DIM), ornn),
    "scornn": (lambda: ScoRNN(DIM), ornn),
}

REFUSED = [
    (lambda: OrthogonalRNN(8, "cayly"), r"ornn: unknown variant 'cayly'; did you mean 'cayley'\?"),
    (lambda: ExpRNN(8, init="henaf"), r"exprnn: unknown init 'henaf'; did you mean 'henaff'\?"),
    (lambda: layers.build("scornn", 8, negative=2.0), "scornn: negative is 2.0, expected 0 to 1"),
]


@pytest.mark.usefixtures("double")
def test_rebase_leaves_the_matrix_where_it_is():
    for make in (ExpRNN, ScoRNN, DTriv):
        layer = make(DIM)
        torch.nn.init.normal_(layer.recurrent_kernel.A)
        w = layer.recurrent_kernel()
        layer.rebase()
        torch.testing.assert_close(layer.recurrent_kernel(), w)
        assert not layer.recurrent_kernel.A.any()
