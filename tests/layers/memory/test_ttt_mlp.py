"""TTTMLP: its equation step by step, how it starts, and what it refuses."""

import pytest

from by_hand import DIM, assert_normal
from scanl import layers
from tests.layers.memory.equations import ttt

pytestmark = pytest.mark.cells_by_loop("name")


EQUATIONS = {"ttt_mlp": (lambda: layers.build("ttt_mlp", DIM, num_heads=2, chunk_size=3, base_lr=2.0), ttt)}

WRONG = [("ttt_mlp", {"chunk_size": 0}, "chunk_size is 0, expected at least 1")]


def test_init_of_ttt():
    layer = layers.build("ttt_mlp", 256)
    weights = (layer.q_proj.weight, layer.o_proj.weight, layer.W1, layer.W2, layer.learnable_ttt_lr_weight)
    for weight in weights:
        assert_normal(weight, 0.02)
    zeros = (layer.b1, layer.b2, layer.learnable_ttt_lr_bias, layer.learnable_token_idx, layer.ttt_norm_bias)
    assert not any(part.any() for part in zeros)
    assert (layer.ttt_norm_weight == 1).all()
    assert (layer.num_heads, layer.base_lr, layer.chunk_size) == (4, 0.1, 16)
    assert (layer.W1.shape, layer.b2.shape) == ((4, 64, 256), (4, 1, 64))
