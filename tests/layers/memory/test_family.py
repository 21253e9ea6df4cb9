"""How memories of one kind start, and options that only their neighbors take."""

import math

import pytest
import torch

from by_hand import DIM, assert_uniform
from scanl import layers
from scanl.errors import ConfigError

pytestmark = pytest.mark.cells_by_loop("name")


@pytest.mark.parametrize("name", ["norm_attention", "diag_attention"])
def test_init_of_transnormer(name):
    layer = layers.build(name, 256)
    for project in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        gain = 0.5 if name == "norm_attention" and project is not layer.out_proj else 1
        limit = math.sqrt(gain * 6 / 512)
        assert_uniform(project.weight, -limit, limit)
    assert_uniform(layer.v_proj.bias, -1 / 16, 1 / 16)
    assert not layer.out_proj.bias.any()
    torch.testing.assert_close(layer.urpe.theta.flatten(), 10000 ** (-2 * torch.arange(16) / 32))
    assert layer.urpe.v.norm().item() == pytest.approx(1)
    assert "urpe.v" in layer.state_dict()


def test_options_of_another_delta_rule_are_refused():
    with pytest.raises(ConfigError, match="unknown option of comba 'num_householder'"):
        layers.build("comba", DIM, num_householder=2)
    with pytest.raises(ConfigError, match="unknown option of kda 'forget_gate'"):
        layers.build("kda", DIM, forget_gate=False)
    with pytest.raises(ConfigError, match="unknown option of momentum_deltanet 'num_v_heads'"):
        layers.build("momentum_deltanet", DIM, num_v_heads=12)
