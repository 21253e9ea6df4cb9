"""HGRN: in pieces, by a mask, and how it starts. Saving is tested in test_saving, its numbers in tests/outside."""

import math

import torch

from by_hand import assert_normal, assert_uniform, shaken
from scanl import models


def test_in_pieces_and_padded():
    model, tokens = shaken(models.hgrn(7, 8, 3, 1.5, "silu")).double(), torch.randint(7, (2, 8))
    whole, _ = model(tokens)
    left, state = model(tokens[:, :3])
    torch.testing.assert_close(torch.cat([left, model(tokens[:, 3:], state)[0]], 1), whole)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 5:] = False
    torch.testing.assert_close(model(tokens, mask=mask)[0][1, :5], whole[1, :5])
    whole.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_how_it_starts():
    """The bound of the forget gate rises from 0 by 1/L a block."""
    model = models.hgrn(300, 64, 4)
    for matrix in (model.embedding, model.head):
        assert_normal(matrix.weight, 1 / 8)
    assert models.hgrn(5, 8, 1, tie_embeddings=True).head is None
    for index, block in enumerate(model.stack.blocks):
        mixer, channel = block.mixer, block.channel
        torch.testing.assert_close(
            torch.as_tensor(mixer.lower_bound()), torch.as_tensor(index / 4).expand(64 if index else ())
        )
        assert channel.activation == "identity"
        for linear in (mixer.input_proj, mixer.out_proj, channel.gate, channel.down):
            limit = 1 / math.sqrt(linear.in_features)
            assert_uniform(linear.weight, -limit, limit)
            assert linear.bias.abs().max() <= limit
        assert isinstance(block.mixer_norm, torch.nn.LayerNorm)
    assert model.embedding_scale == 8
