"""Piecewise-linear networks: their equations by hand, their bound, and the linear map in each region."""

import pytest
import torch

from by_hand import DIM
from scanl.layers import PLRNN, ShallowPLRNN

COVERS = ["layers/rnn/shallow_plrnn"]


def plrnn(layer, xs):
    A, W, h, C = (value.tolist() for value in (layer.A, layer.W, layer.h, layer.C.weight))
    branches = [(1.0, [0.0] * DIM)]
    if layer.alphas is not None:
        branches = list(zip(layer.alphas.tolist(), layer.thresholds.tolist(), strict=True))
    z, ys = [0.0] * DIM, []
    for x in xs:
        bent = [sum(slope * max(z[j] - bounds[j], 0.0) for slope, bounds in branches) for j in range(DIM)]
        inputs = [sum(C[i][j] * float(x[j]) for j in range(DIM)) + h[i] for i in range(DIM)]
        mixed = [sum(W[i][j] * bent[j] for j in range(DIM) if j != i) for i in range(DIM)]
        z = [A[i] * z[i] + mixed[i] + inputs[i] for i in range(DIM)]
        ys.append(torch.tensor(z))
    return ys


def shallow_plrnn(layer, xs):
    z, ys = torch.zeros(DIM), []
    for x in xs:
        z_next = layer.A * z + layer.h1 + layer.C.weight @ x
        for weights, bias, out in zip(layer.W2, layer.h2, layer.W1.T, strict=True):
            pull = (weights * z).sum()
            hidden = torch.where(pull + bias > 0, pull + bias, 0)
            if layer.clipped:
                hidden = hidden - torch.where(pull > 0, pull, 0)
            z_next = z_next + out * hidden
        z = z_next
        ys.append(z)
    return ys


EQUATIONS = {
    "plrnn": (lambda: PLRNN(DIM), plrnn),
    "plrnn_dendritic": (lambda: PLRNN(DIM, branches=3), plrnn),
    "shallow_plrnn": (lambda: ShallowPLRNN(DIM, 5), shallow_plrnn),
    "shallow_plrnn_not_clipped": (lambda: ShallowPLRNN(DIM, 5, clipped=False), shallow_plrnn),
}


@pytest.mark.parametrize("make", [lambda: PLRNN(4), lambda: PLRNN(4, 2), lambda: ShallowPLRNN(4, 6)])
def test_the_jacobian_is_that_of_the_region(make):
    """diag(A) + W D(z), with D the slopes of the active units, against autograd."""
    layer, z = make().double(), torch.randn(1, 4, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda s: layer.step(torch.zeros_like(s), s)[1][0], z)[:, 0]
    if isinstance(layer, ShallowPLRNN):
        pull = layer.W2 @ z[0]
        active = (pull + layer.h2 > 0).double() - (pull > 0).double()
        expected = torch.diag(layer.A) + layer.W1 @ torch.diag(active) @ layer.W2
    else:
        slopes = (z[0] > 0).double()
        if layer.alphas is not None:
            slopes = (layer.alphas[:, None] * (z > layer.thresholds)).sum(0)
        expected = torch.diag(layer.A) + (layer.W - torch.diag(layer.W.diagonal())) @ torch.diag(slopes)
    torch.testing.assert_close(jacobian, expected)


def test_the_clipped_network_is_bounded():
    """|z| is at most (Σ_j |W_1| |h_2| + |h_1|) / (1 - |A|) in the long run, from any start."""
    layer = ShallowPLRNN(3, 20).double()
    with torch.no_grad():
        layer.A.mul_(0.9)
    bound = (layer.W1.abs() @ layer.h2.abs() + layer.h1.abs()) / (1 - layer.A.abs())
    _, state = layer(torch.zeros(5, 2000, 3, dtype=torch.float64), 1e3 * torch.randn(5, 3, dtype=torch.float64))
    assert (state.abs() <= bound * (1 + 1e-9) + 1e-9).all()


def test_the_first_diagonal_is_at_most_one_and_positive():
    A = PLRNN(30).A
    assert ((A > 0) & (A <= 1)).all()
