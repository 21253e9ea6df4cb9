"""KDA: its equation step by step, how it starts, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform, linear, sigmoid, softplus
from scanl import layers
from tests.layers.memory.equations import assert_time_steps, gated_deltanet, undecayed

pytestmark = pytest.mark.cells_by_loop("name")


def kda(layer, xs):
    def decay(layer, x):
        f = linear(layer.f_proj[1], linear(layer.f_proj[0], x)) + layer.dt_bias
        f, rate = f.view(layer.num_v_heads, -1), layer.A_log.exp()[:, None]
        return -5 * sigmoid(rate * f) if layer.safe_gate else -rate * softplus(f)

    return gated_deltanet(layer, xs, gate=sigmoid, decay=decay)


EQUATIONS = {
    "kda": (lambda: layers.build("kda", DIM, head_dim=3, num_heads=2, num_v_heads=4, expand_v=2.0), kda),
    "kda_safe": (lambda: layers.build("kda", DIM, head_dim=4, safe_gate=True, conv_size=None), kda),
    "kda_negative_eigenvalues": (lambda: layers.build("kda_negative_eigenvalues", DIM, head_dim=4), kda),
}

WRONG = [("kda", {"head_dim": 0}, "head_dim is 0, expected at least 1")]


def test_init_of_kda():
    layer = layers.build("kda", 64, head_dim=2, num_heads=4000)
    assert_uniform(layer.A_log.exp(), 1, 16)
    assert_time_steps(layer.dt_bias)
    assert layer.dt_bias.shape == (8000,)
    for project in (layer.q_proj, layer.b_proj, layer.o_proj, *layer.f_proj, *layer.g_proj):
        assert_normal(project.weight, 0.02)
    assert not layer.g_proj[1].bias.any()
    assert {"A_log", "dt_bias"} <= undecayed(layer)
    assert layers.build("kda", 512).num_heads == 4
    assert not layers.build("kda", 128, safe_gate=True).A_log.any()


def test_kda_without_an_output_gate_norms_alone():
    layer = layers.build("kda", DIM, head_dim=4, output_gate=False)
    gated = layers.build("kda", DIM, head_dim=4)
    gated.load_state_dict(layer.state_dict(), strict=False)
    assert gated.g_proj is not None
    for weight in gated.g_proj.parameters():
        torch.nn.init.zeros_(weight)  # so every gate is 1/2
    x = torch.randn(2, 5, DIM)
    torch.testing.assert_close(layer(x)[0], 2 * gated(x)[0])
