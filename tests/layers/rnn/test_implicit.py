"""Implicit: its equation step by step, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, T, linear, shaken
from scanl.layers.rnn.implicit import Implicit
from scanl.ops import ConvergenceError

pytestmark = pytest.mark.cells_by_loop


def implicit(layer, xs):
    """The map applied until nothing changes."""
    ys = []
    for x in xs:
        s = torch.zeros(DIM)
        for _ in range(400):
            s = torch.tanh(layer.W @ s + linear(layer.U, x))
        ys.append(s)
    return ys


EQUATIONS = {
    "implicit": (lambda: Implicit(DIM), implicit),
    "implicit_broyden": (lambda: Implicit(DIM, 0.3, "broyden"), implicit),
}

REFUSED = [
    (lambda: Implicit(0), "implicit: dim is 0, expected at least 1"),
    (lambda: Implicit(8, gain=1.0), "implicit: gain is 1.0, expected less than 1"),
]


@pytest.mark.usefixtures("double")
def test_the_start_of_the_solver_changes_nothing_but_the_iterations():
    layer, x = shaken(Implicit(DIM, rtol=1e-12)), torch.randn(2, T, DIM)
    y, last = layer(x)
    torch.testing.assert_close(layer(x, torch.randn(2, DIM))[0], y, rtol=0, atol=1e-10)
    torch.testing.assert_close(last, y[:, -1])
    hasty = Implicit(DIM, rtol=1e-12, max_iterations=1)
    hasty.load_state_dict(layer.state_dict())
    hasty(x[:, :1], y[:, 0])  # from the solution itself, one evaluation is enough
    with pytest.raises(ConvergenceError, match="did not converge in 1 iterations"):
        hasty(x[:, :1])


@pytest.mark.usefixtures("double")
def test_the_gradient_of_an_equilibrium_is_that_of_a_long_unrolling():
    layer, x = shaken(Implicit(DIM)), torch.randn(1, 3, DIM)
    found = torch.autograd.grad(layer(x)[0].square().sum(), tuple(layer.parameters()))
    expected = torch.autograd.grad(torch.stack(implicit(layer, x[0])).square().sum(), tuple(layer.parameters()))
    torch.testing.assert_close(found, expected)
