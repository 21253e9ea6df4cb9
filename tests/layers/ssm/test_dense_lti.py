"""DenseLTI: its equation step by step, and what only it knows."""

import pytest
import torch
from torch.nn import functional as F

from by_hand import DIM, T
from scanl.errors import ConfigError
from scanl.layers import DenseLTI


def dense_lti(layer, xs):
    s, ys = torch.zeros(layer.state_dim), []
    for x in xs:
        s = layer.A @ s + layer.B @ x
        ys.append(layer.C @ s + layer.D * x)
    return ys


EQUATIONS = {"dense_lti": (lambda: DenseLTI(DIM, 5), dense_lti)}


@pytest.mark.usefixtures("double")
def test_a_dense_system_is_a_convolution_and_a_diagonal_system():
    layer, x = DenseLTI(DIM, 5), torch.randn(2, T, DIM)
    y, last = layer(x)
    kernel = layer.kernel(T)  # as `F.conv1d` reads it: (outputs, inputs, T), the oldest first
    torch.testing.assert_close(F.conv1d(F.pad(x.mT, (T - 1, 0)), kernel.permute(1, 2, 0).flip(2)).mT, y)
    diagonal = layer.diagonal()
    torch.testing.assert_close(diagonal(x)[0], y)
    eigenvalues = torch.linalg.eigvals(layer.A.detach())
    torch.testing.assert_close(eigenvalues.abs(), torch.full((5,), 0.99))
    assert last.shape == (2, 5)
    with torch.no_grad():
        layer.A.copy_(torch.eye(5).roll(1, 0).tril())  # nilpotent: one eigenvector
    with pytest.raises(
        ConfigError, match="dense_lti: A has no complete set of eigenvectors, expected a diagonalizable"
    ):
        layer.diagonal()
    with pytest.raises(ConfigError, match="dense_lti: length is 0, expected at least 1"):
        layer.kernel(0)
    with pytest.raises(ConfigError, match="dense_lti: r_max is 1, expected less than 1"):
        DenseLTI(DIM, r_max=1)
    with pytest.raises(ConfigError, match="dense_lti: state_dim is 0, expected at least 1"):
        DenseLTI(6, 0)
