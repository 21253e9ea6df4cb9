"""RTransformer: its equation step by step, its block in a stack, and what it refuses."""

import pytest
import torch

from by_hand import DIM, T, layer_norm, shaken
from scanl.errors import ShapeError
from scanl.layers import RTransformer
from scanl.models import Block
from tests.layers.attention.equations import attention
from tests.layers.rnn.test_local_rnn import local_rnn


def rtransformer(layer, xs, residual=None):
    start = h = residual or xs
    for network, norm in zip(layer.local, layer.norms, strict=True):
        h = [a + b for a, b in zip(h, local_rnn(network, xs), strict=True)]
        xs = [layer_norm(each, norm) for each in h]
    return [a - b + c for a, b, c in zip(h, start, attention(layer.attention, xs), strict=True)]


EQUATIONS = {
    "rtransformer": (lambda: RTransformer(DIM, 2, 3, max_length=24), rtransformer),
    "rtransformer_2": (lambda: RTransformer(DIM, 1, 2, 2, "elman", 24), rtransformer),
}

WRONG = [("rtransformer", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8")]


@pytest.mark.usefixtures("double")
def test_a_block_is_the_authors_with_the_norm_first():
    layer, x = shaken(RTransformer(DIM, 2, 3, 2, max_length=24)), torch.randn(1, T, DIM)
    block = shaken(Block(layer, "mlp", {"activation": "relu"}, norm="layernorm"))
    h = block(x)[0] - block.channel(block.channel_norm(x + layer(block.mixer_norm(x), residual=x)[0]))[0]
    normed = [layer_norm(row, block.mixer_norm) for row in x[0]]
    expected = [a + b for a, b in zip(x[0], rtransformer(layer, normed, list(x[0])), strict=True)]
    torch.testing.assert_close(h[0], torch.stack(expected))
    with pytest.raises(ShapeError, match=r"rtransformer: residual has shape \(1, 6, 8\), expected \(1, 7, 8\) from x"):
        layer(x, residual=x[:, 1:])
    with pytest.raises(ShapeError, match="attention: x makes a sequence of 25 steps, expected at most max_length=24"):
        layer(torch.randn(1, 25, DIM))
