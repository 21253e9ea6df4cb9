"""Models of MEGA and Megalodon: in pieces, packed, saved, and how they start."""

import math
from itertools import pairwise

import pytest
import torch

from by_hand import assert_normal, shaken
from scanl import models
from scanl.layers import state as states

SMALL = {
    "mega": lambda: models.mega(7, 8, 2, 1.5, {"z_dim": 4, "hidden_dim": 6, "state_dim": 2, "chunk_size": 3}),
    "megalodon": lambda: models.megalodon(
        7,
        8,
        2,
        scale_embedding=True,
        expand=1.5,
        swiglu=True,
        layer_options={"z_dim": 4, "hidden_dim": 6, "state_dim": 2, "chunk_size": 3, "num_groups": 2},
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_whole_models_in_pieces_packed_and_saved(name, tmp_path):
    model, tokens = shaken(SMALL[name]()).double(), torch.randint(7, (2, 8))
    whole, last = model(tokens)
    state, pieces = model.init_state(2), []
    for start, end in pairwise([0, 4, 4, 5, 8]):
        logits, state = model(tokens[:, start:end], state)
        pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    for (place, a), (also, b) in zip(states.leaves(state), states.leaves(last), strict=True):
        assert place == also
        torch.testing.assert_close(a, b)
    anew, _ = model(tokens, starts=torch.tensor([[0, 0, 0, 0, 0, 1, 0, 0], [0] * 8]).bool())
    torch.testing.assert_close(anew, torch.cat([torch.cat([whole[:1, :5], model(tokens[:1, 5:])[0]], 1), whole[1:]]))
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 5:] = False
    logits, state = model(tokens, mask=mask)
    torch.testing.assert_close(logits[1, :5], whole[1, :5])
    torch.testing.assert_close(model(tokens[1:, 5:], states.index(state, [1]))[0], whole[1:, 5:])
    whole.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    model.float().save(tmp_path)
    torch.testing.assert_close(type(model).load(tmp_path)(tokens)[0], model(tokens)[0])
    assert len(list(model.generate(tokens[:, :2], max_new_tokens=2, temperature=0))) == 2


def test_init_of_the_whole_models():
    model = models.mega(300, 64, 2, tie_embeddings=False)
    mixer, channel = model.stack.blocks[1].mixer, model.stack.blocks[1].channel
    assert (mixer.z_dim, mixer.hidden_dim, mixer.chunk_size) == (16, 128, 2048)
    for weight in (channel.fc1.weight, channel.fc2.weight, mixer.v_proj.weight):
        assert_normal(weight, 0.02)
    for matrix in (model.embedding, model.head):
        assert_normal(matrix.weight, 1 / 8)
    assert models.mega(5, 8, 1).head is None
    model = models.megalodon(300, 64, 2, swiglu=True)
    mixer, channel = model.stack.blocks[1].mixer, model.stack.blocks[1].channel
    for linear_map in (channel.gate, channel.up, channel.down, mixer.wh2):
        assert_normal(linear_map.weight, 1 / math.sqrt(3 * linear_map.in_features))
        assert linear_map.bias is None
    for matrix in (model.embedding, model.head):
        assert_normal(matrix.weight, 1 / 8)
        assert matrix.weight.abs().max() <= 3 / 8
    assert model.stack.norm.groups == mixer.timenorm.groups == 2
    assert not model.stack.norm.weight.any()
