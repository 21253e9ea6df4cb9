"""LinearAttention: its equation step by step, what only it knows, and what it refuses."""

import pytest
import torch
from torch.nn import functional as F

from by_hand import DIM
from scanl import layers
from scanl.errors import ConfigError
from tests.layers.memory.equations import attention

pytestmark = pytest.mark.cells_by_loop("name")


EQUATIONS = {
    "linear_attention": attention(expand_k=0.5, expand_v=2.0),
    "linear_attention_bidirectional_unnormalised": attention(causal=False, feature_map="identity", normalize=False),
    "linear_attention_taylor": attention(feature_map="taylor"),
    "linear_attention_cosformer_bidirectional": attention(feature_map="cosine_reweighting", horizon=20, causal=False),
}

WRONG = [
    ("linear_attention", {"num_heads": 3}, "expand_k is 1.0, expected dim=8 times it to be a multiple of num_heads=3"),
    ("linear_attention", {"head_dim": 0}, "head_dim is 0, expected at least 1"),
    (
        "linear_attention",
        {"forget_gate": True, "causal": False},
        "forget_gate is True, expected False because of causal=False",
    ),
    ("linear_attention", {"qk_norm": "l2"}, "qk_norm is 'l2', expected 'sum' or 'layernorm' or None"),
]


def test_performer_comes_near_softmax():
    torch.manual_seed(0)
    layer = layers.build(
        "linear_attention", DIM, num_heads=2, feature_map="positive_random_features", num_features=20_000
    )
    x = torch.randn(2, 20, DIM)
    q, k, v = (project(x).view(2, 20, 2, 4).transpose(1, 2) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x)[0], layer.o_proj(expected), rtol=0, atol=0.03)


def test_wrong_feature_maps_are_refused():
    with pytest.raises(ConfigError, match=r"unknown feature map 'elu_plus_on'; did you mean 'elu_plus_one'\?"):
        layers.build("linear_attention", 8, feature_map="elu_plus_on")
    with pytest.raises(ConfigError, match="linear_attention: num_features is 0, expected at least 1"):
        layers.build("linear_attention", 8, feature_map="fourier_features", num_features=0)
    with pytest.raises(ConfigError, match="linear_attention: horizon is 0, expected more than 0"):
        layers.build("linear_attention", 8, feature_map="cosine_reweighting", horizon=0)
