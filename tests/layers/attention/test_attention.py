"""Attention: its equation step by step, how it starts, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, T, assert_normal
from scanl.errors import ShapeError
from scanl.layers import Attention, WindowAttention
from scanl.layers import state as states
from tests.layers.attention.equations import attention

EQUATIONS = {
    "attention": (lambda: Attention(DIM, 2, max_length=T, rope_base=100.0), attention),
    "attention_unrotated": (lambda: Attention(DIM, 4, 2, max_length=64, rope_fraction=0), attention),
}

WRONG = [
    ("attention", {"num_kv_heads": 3}, "num_kv_heads is 3, expected a divisor of num_heads=8"),
    ("attention", {"num_heads": 0}, "num_heads is 0, expected at least 1"),
    ("attention", {"num_heads": 8}, "rope_fraction is 1.0, expected an even number of channels of head_dim=1"),
    ("attention", {"max_length": 0}, "max_length is 0, expected at least 1"),
]


@pytest.mark.usefixtures("double")
def test_attention_has_room_for_max_length_only():
    layer = Attention(DIM, 2, max_length=5)
    message = "attention: x makes a sequence of {} steps, expected at most max_length=5"
    with pytest.raises(ShapeError, match=message.format(6)):
        layer(torch.randn(1, 6, DIM))
    _, state = layer(torch.randn(2, 4, DIM))
    _, state = layer.step(torch.randn(2, DIM), state)
    with pytest.raises(ShapeError, match=message.format(6)):
        layer.step(torch.randn(2, DIM), state)
    with pytest.raises(ShapeError, match=message.format(11)):
        layer(torch.randn(1, 8, DIM), states.index(state, [0, 1]), cu_seqlens=torch.tensor([0, 6, 8]))
    assert layer(torch.randn(1, 8, DIM), cu_seqlens=torch.tensor([0, 5, 8]))[0].shape == (1, 8, DIM)


@pytest.mark.usefixtures("double")
def test_init_of_attention():
    for layer in (WindowAttention(256, bias=True), Attention(256, bias=True)):
        for linear in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
            assert_normal(linear.weight, 1 / 16)
            assert not linear.bias.any()
    assert [linear.out_features for linear in (layer.k_proj, WindowAttention(256).k_proj)] == [256, 32]
