"""A state is a row of numbers, exactly: read step by step through rows, a body gives what it gives over the whole."""

import pytest
import torch

from scanl.errors import ConfigError, ShapeError
from scanl.learning.adapters.agent_body import AgentBody


# Floats; complex numbers; a matrix; a count of steps; a first state that is not zeros.
@pytest.mark.parametrize("layer", ["gru", "lru", "retnet", "hawk"])
def test_a_row_is_the_state(layer):
    """By the ordinary step, and by the kernel."""
    torch.manual_seed(0)
    body = AgentBody(3, 32, layer, depth=2)
    x, starts = torch.randn(2, 9, 3), torch.zeros(2, 9, dtype=torch.bool)
    starts[1, 4] = True
    whole, _ = body(x, starts=starts)
    body.compiled.compile(2)
    for gradients in (True, False):
        row = torch.zeros(2, body.row_size)
        with torch.set_grad_enabled(gradients):
            for t in range(9):
                y, row = body.read(x[:, t : t + 1], row, starts[:, t : t + 1])
                torch.testing.assert_close(y[:, 0], whole[:, t], rtol=1e-4, atol=1e-5)
    assert body.compiled.reason is None
    assert row.shape == (2, body.row_size)
    assert row.dtype == torch.float32


def test_a_row_of_zeros_is_the_state_before_any_step():
    """Also where the other row is in an episode."""
    body = AgentBody(3, 8, "hawk")  # its state begins with a truth
    x, never = torch.randn(2, 4, 3), torch.zeros(2, 4, dtype=torch.bool)
    y, row = body.read(x, torch.zeros(2, body.row_size), never)
    torch.testing.assert_close(y, body(x)[0], rtol=0, atol=0)
    row[1] = 0
    again, _ = body.read(x, row, never)
    torch.testing.assert_close(again[1], y[1])
    assert not torch.equal(again[0], y[0])


def test_counts_are_exact():
    """Beyond what float32 has."""
    body = AgentBody(3, 32, "retnet")
    counts = [torch.tensor([float(n)], dtype=torch.float64).view(torch.float32) for n in (4, 2**40 + 1)]
    never = torch.zeros(1, 4, dtype=torch.bool)
    _, row = body.read(torch.randn(1, 4, 3), torch.zeros(1, body.row_size), never)
    (at,) = (row[0].unfold(0, 2, 1) == counts[0]).all(1).nonzero()[0].tolist()
    row[0, at : at + 2] = counts[1]
    _, row = body.read(torch.randn(1, 1, 3), row, never[:, :1])
    assert row[0, at : at + 2].clone().view(torch.float64).item() == 2**40 + 2


def test_errors():
    with pytest.raises(ConfigError, match="'vim' is bidirectional"):
        AgentBody(3, 32, "vim")
    body = AgentBody(3, 8, "gru")
    with pytest.raises(ShapeError, match=r"agent_body: row is torch.float32 \(2, 3\), expected .* \(2, 10\)"):
        body.read(torch.zeros(2, 1, 3), torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.bool))
