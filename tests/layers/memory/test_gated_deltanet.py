"""GatedDeltaNet: its equation step by step, how it starts, what only it knows, and what it refuses."""

import pytest

from by_hand import DIM, assert_normal, assert_uniform
from scanl import layers
from tests.layers.memory.equations import assert_time_steps, gated_deltanet, undecayed

pytestmark = pytest.mark.cells_by_loop("name")


EQUATIONS = {
    "gated_deltanet": (lambda: layers.build("gated_deltanet", DIM, head_dim=3, num_heads=2), gated_deltanet),
    "gated_deltanet_shared": (
        lambda: layers.build(
            "gated_deltanet",
            DIM,
            head_dim=4,
            num_heads=1,
            num_v_heads=3,
            expand_v=0.5,
            output_gate=False,
            conv_bias=True,
        ),
        gated_deltanet,
    ),
    "gated_deltanet_negative_eigenvalues": (
        lambda: layers.build("gated_deltanet_negative_eigenvalues", DIM, head_dim=3, num_heads=2, conv_size=None),
        gated_deltanet,
    ),
    "qwen3_next_deltanet": (
        lambda: layers.build("qwen3_next_deltanet", DIM, head_dim=3, num_heads=2, num_v_heads=4),
        gated_deltanet,
    ),
    "gated_deltaproduct": (
        lambda: layers.build("gated_deltaproduct", DIM, head_dim=3, num_heads=2, num_v_heads=4),
        gated_deltanet,
    ),
    "deltaproduct": (
        lambda: layers.build("deltaproduct", DIM, head_dim=3, num_heads=2, num_householder=3, expand_v=1.0),
        gated_deltanet,
    ),
}

WRONG = [
    ("gated_deltanet", {"head_dim": 0}, "head_dim is 0, expected at least 1"),
    ("gated_deltanet", {"num_v_heads": 7}, "num_v_heads is 7, expected a multiple of num_heads=6"),
    ("gated_deltanet", {"head_dim": 3, "expand_v": 0.5}, "expand_v is 0.5, expected a whole number of channels of"),
    ("gated_deltaproduct", {"num_householder": 0}, "num_householder is 0, expected at least 1"),
]


def test_init_of_gated_deltanet():
    layer = layers.build("gated_deltanet", 64, head_dim=2, num_heads=4000)
    assert_uniform(layer.A_log.exp(), 0, 16)
    assert_time_steps(layer.dt_bias)
    for project in (layer.q_proj, layer.k_proj, layer.v_proj, layer.a_proj, layer.b_proj, layer.g_proj, layer.o_proj):
        assert_normal(project.weight, 0.02)
    assert_uniform(layer.q_conv1d.weight, -1 / 2, 1 / 2)
    assert (layer.o_norm.weight == 1).all()
    assert {"A_log", "dt_bias"} <= undecayed(layer)


def test_init_of_deltaproduct():
    layer = layers.build("gated_deltaproduct", 64, head_dim=8, num_heads=4)
    assert (layer.k_proj.out_features, layer.v_proj.out_features, layer.b_proj.out_features) == (64, 128, 8)
    for project in (layer.k_proj, layer.v_proj, layer.b_proj):
        assert_normal(project.weight, 0.02)
    names = dict(layers.build("deltaproduct", 64).named_parameters())
    assert not {"A_log", "dt_bias", "a_proj.weight", "g_proj.weight"} & names.keys()


def test_a_preset_sets_options_that_its_layer_inherits():
    layer = layers.build("qwen3_next_deltanet", 32)
    assert (layer.config["expand_v"], layer.config["num_v_heads"], layer.config["norm_eps"]) == (1.0, 32, 1e-6)
    assert (layer.head_v_dim, layer.num_v_heads, layer.o_norm.eps) == (2, 32, 1e-6)
    layer = layers.build("qwen3_next_deltanet", 32, expand_v=2.0)
    assert (layer.config["expand_v"], layer.head_v_dim) == (2.0, 4)
