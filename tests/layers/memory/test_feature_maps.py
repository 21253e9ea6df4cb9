"""Presets of linear attention: equations step by step, how they start, and projections that are redrawn."""

import math

import pytest
import torch
from torch.nn import functional as F

from by_hand import DIM, assert_normal, assert_uniform
from scanl import layers, ops
from scanl.errors import ConfigError
from tests.layers.memory.equations import attention

pytestmark = pytest.mark.cells_by_loop("name")


EQUATIONS = {
    "unnormalised_linear_attention": attention("unnormalised_linear_attention"),
    "noncausal_linear_attention": attention("noncausal_linear_attention"),
    "polynomial_attention": attention("polynomial_attention"),
    "polynomial_attention_by_kernel": attention("polynomial_attention", degree=8),
    "performer": attention("performer", num_features=5),
    "rfa": attention("rfa"),
    "rfa_unbounded": attention("rfa", num_features=5, eps=1e-6),
    "rfa_gate": attention("rfa_gate"),
    "arc_cosine_attention": attention("arc_cosine_attention"),
    "fwp": attention("fwp"),
    "based": attention("based", head_dim=3),
    "rebased": attention("rebased", head_dim=3),
    "dpfp": attention("dpfp"),
    "dpfp_normalised": attention("dpfp", normalize=True),
    "cosformer": attention("cosformer", horizon=20),
}


def test_init_of_linear_attention():
    layer = layers.build("performer", 64, num_heads=1, forget_gate=True, qk_norm="layernorm")
    for project in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj, layer.gate_proj):
        assert_uniform(project.weight, -1 / 8, 1 / 8)
    for norm in (layer.q_norm, layer.k_norm):
        assert (norm.weight == 1).all()
        assert not norm.bias.any()
    assert layer.feature_map.projection.shape == (266, 64)  # 64 ln 64 = 266.17
    assert "feature_map.projection" in layer.state_dict()
    block = layer.feature_map.projection[:64].double()
    angles = F.normalize(block) @ F.normalize(block).T
    torch.testing.assert_close(angles, torch.eye(64).double(), rtol=0, atol=1e-5)


PRESETS = [name for name in layers.names() if issubclass(layers.get(name), layers.LinearAttention)]
NORMALISED = [name for name in PRESETS if layers.get(name)(32).normalize]


@torch.no_grad()
@pytest.mark.parametrize("name", NORMALISED)
def test_normalised_attention_starts_as_large_as_its_input(name):
    """Of unit inputs, at any of 50 starts: no denominator is so near 0 that a quotient explodes."""
    largest = 0.0
    for seed in range(50):
        torch.manual_seed(seed)
        layer = layers.build(name, 32)
        with ops.backend("parallel", "reference"):
            largest = max(largest, layer(torch.randn(2, 24, 32))[0].abs().max().item())
    assert largest < 5


def test_init_of_rfa():
    layer = layers.build("rfa", 128, num_heads=2)
    assert (layer.feature_map.sigma == 1).all()
    assert layer.feature_map.projection.shape == (2, 64, 64)
    assert_normal(layer.feature_map.projection, 1.0)


@pytest.mark.parametrize("name", ["performer", "rfa"])
def test_projections_are_redrawn_on_demand(name):
    layer = layers.build(name, DIM, num_heads=2)
    kept = {key: value.clone() for key, value in layer.state_dict().items()}
    layer.feature_map.redraw(torch.Generator().manual_seed(1))
    drawn = layer.feature_map.projection.clone()
    assert (drawn != kept["feature_map.projection"]).all()
    layer.feature_map.redraw(torch.Generator().manual_seed(1))
    assert torch.equal(layer.feature_map.projection, drawn)
    layer.load_state_dict(kept)
    assert torch.equal(layer.feature_map.projection, kept["feature_map.projection"])
    with pytest.raises(ConfigError, match="redraw is called, expected a random map and not 'elu_plus_one'"):
        layers.build("linear_attention", DIM).feature_map.redraw()


def test_sizes_of_based():
    layer = layers.build("based", 24)
    assert (layer.head_dim, layer.head_v_dim, layer.feature_map.width) == (16, 3, 153)
    assert layers.build("rebased", 24).feature_map.width == 136


@pytest.mark.parametrize("name", ["rfa", "rfa_gate", "arc_cosine_attention"])
def test_init_of_random_feature_attention(name):
    """The released code of RFA: Xavier uniform of gain 1/sqrt(2); the output's bias 0, the others as in PyTorch."""
    layer = layers.build(name, 256)
    for project in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
        limit = math.sqrt(3 / 512)
        assert_uniform(project.weight, -limit, limit)
    for project in (layer.q_proj, layer.k_proj, layer.v_proj):
        assert_uniform(project.bias, -1 / 16, 1 / 16)
    assert not layer.o_proj.bias.any()
