"""IRNN: its equation step by step, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, linear
from scanl.layers.ode.irnn import IRNN
from tests.layers.ode.equations import irnn

pytestmark = pytest.mark.cells_by_loop


EQUATIONS = {
    "irnn": (lambda: IRNN(DIM), irnn),
    "irnn_from_zero": (lambda: IRNN(DIM, 5, 0.5, "tanh", "zero"), irnn),
    "irnn_of_low_rank": (lambda: IRNN(DIM, 2, 0.5, "tanh", rank=2), irnn),
}

REFUSED = [
    (lambda: IRNN(8, 0), "irnn: substeps is 0, expected at least 1"),
    (lambda: IRNN(8, rank=0), "irnn: rank is 0, expected at least 1"),
    (lambda: IRNN(8, activation="rel"), "irnn: unknown activation 'rel'; did you mean 'relu'"),
    (lambda: IRNN(8, init="stat"), "irnn: unknown init 'stat'; did you mean 'state'"),
]


@pytest.mark.usefixtures("double")
def test_rounds_of_irnn_reach_the_equilibrium_where_the_state_neither_fades_nor_grows():
    """With a weak U the rounds converge; there the derivative by the state before is minus the identity."""
    layer = IRNN(DIM, 1, 1.0, "tanh")
    with torch.no_grad():
        layer.U.weight.mul_(0.5)
    before, x = torch.randn(1, DIM), torch.randn(1, 1, DIM)
    distances = []
    for rounds in (2, 4, 200):
        layer.eta = torch.nn.Parameter(torch.full((rounds,), 0.5))
        h = layer(x, before)[1][0]
        both = h + before[0]
        moved = torch.tanh(layer.U.weight @ both + linear(layer.W, x[0, 0])) - both
        distances.append(moved.norm().item())
    assert distances[0] > 2 * distances[1]
    assert distances[2] < 1e-12
    slope = torch.autograd.functional.jacobian(lambda state: layer(x, state)[1][0], before)[:, 0]
    torch.testing.assert_close(slope, -torch.eye(DIM), atol=1e-9, rtol=0)
