"""Laws of the layers that read in segments: rows in one batch, and how far gradients reach."""

import pytest
import torch

from by_hand import DIM
from scanl.layers import state as states
from tests.layers.attention import test_block_recurrent, test_bst, test_infini, test_rmt, test_tlb, test_transformer_xl

SEGMENTS = [
    (test_block_recurrent.make, {"window": 3}),
    (test_bst.make, {"variant": "multi_head"}),
    (test_bst.make, {"variant": "multi_filter"}),
    (test_infini.make, {"chunk_size": 3}),
    (test_rmt.make, {"horizon": 2}),
    (test_tlb.make, {"chunk_size": 3}),
    (test_transformer_xl.make, {"chunk_size": 3, "variant": "bounded"}),
    (test_transformer_xl.make, {"chunk_size": 3, "variant": "same_length"}),
]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("make", "options"), SEGMENTS)
def test_rows_that_begin_elsewhere_have_the_gradients_of_each_alone(make, options):
    """Rows at different steps of their segments are gathered; alone they are sliced."""
    layer, x = make(**options), torch.randn(3, 8, DIM, requires_grad=True)
    pasts = [states.detach(layer(torch.randn(1, n, DIM))[1]) for n in (1, 3, 5)]
    (found,) = torch.autograd.grad(layer(x, states.cat(pasts))[0].sin().sum(), x)
    alone = [torch.autograd.grad(layer(x[i : i + 1], s)[0].sin().sum(), x)[0] for i, s in enumerate(pasts)]
    torch.testing.assert_close(found, sum(alone))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("make", [test_block_recurrent.make, test_infini.make, test_tlb.make])
@pytest.mark.parametrize(("horizon", "reaches"), [(1, [0, 0, 0, 1]), (2, [0, 0, 1, 1]), (None, [1] * 4)])
def test_gradients_stop_behind_the_horizon(make, horizon, reaches):
    """In segments of two steps. One output counts: the sum over a norm has no gradient."""
    layer, x = make(horizon=horizon), torch.randn(1, 8, DIM, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x)[0][:, -1, 0], x)
    assert grad[0].unflatten(0, (4, 2)).flatten(1).any(1).tolist() == [bool(reach) for reach in reaches]
