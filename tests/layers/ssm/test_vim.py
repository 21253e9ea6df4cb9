"""BiMamba: its equation step by step, and what only it knows."""

import pytest
import torch

from by_hand import DIM, shaken, softplus
from scanl.layers import BiMamba
from tests.layers.ssm.equations import SIZES, bimamba

EQUATIONS = {"vim": (lambda: BiMamba(DIM, **SIZES), bimamba)}


@pytest.mark.usefixtures("double")
def test_equal_directions_make_reversal_symmetric():
    layer, x = shaken(BiMamba(DIM, **SIZES)), torch.randn(2, 11, DIM)
    with torch.no_grad():
        layer.A_b_log.copy_(layer.A_log)
        layer.D_b.copy_(layer.D)
        for name in ("conv1d", "x_proj", "dt_proj"):
            layer.get_submodule(f"{name}_b").load_state_dict(layer.get_submodule(name).state_dict())
    torch.testing.assert_close(layer(x.flip(1))[0], layer(x)[0].flip(1))


def test_both_directions_start_as_mamba():
    layer = BiMamba(64, state_dim=5)
    expected = torch.arange(1.0, 6).log().repeat(128, 1)
    for A_log, D, dt_proj in ((layer.A_log, layer.D, layer.dt_proj), (layer.A_b_log, layer.D_b, layer.dt_proj_b)):
        assert torch.equal(A_log, expected)
        assert (D == 1).all()
        step = softplus(dt_proj.bias)
        assert 1e-3 * 0.999 <= step.min() <= step.max() <= 0.1 * 1.001
    assert not torch.equal(layer.x_proj.weight, layer.x_proj_b.weight)
