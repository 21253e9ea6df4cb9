"""ComplexEMA: its equation step by step, and what only it knows."""

import pytest
import torch

from by_hand import DIM, silu
from scanl.layers import ComplexEMA, MegaEMA
from tests.layers.ssm.equations import cema

EQUATIONS = {"cema": (lambda: ComplexEMA(DIM, 3), cema)}


@pytest.mark.usefixtures("double")
def test_the_moving_average_of_megalodon_without_a_turn_is_that_of_mega():
    """With beta 1, without the SiLU; `alpha` and `delta` change their names."""
    ours, plain, x = ComplexEMA(DIM, 3), MegaEMA(DIM, 3), torch.randn(2, 20, DIM)
    with torch.no_grad():
        ours.theta.fill_(-1e9)
        plain.alpha.copy_(ours.delta)
        plain.delta.copy_(ours.alpha)
        plain.beta.fill_(1.0)
        plain.gamma.copy_(ours.gamma[..., 0])
        plain.omega.copy_(ours.omega[:, 0])
    torch.testing.assert_close(silu(ours(x)[0]), plain(x)[0])
