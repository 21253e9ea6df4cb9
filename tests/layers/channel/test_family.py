"""Channel mixers that carry a state, in a stack."""

import pytest
import torch

from by_hand import DIM, T, shaken
from scanl.models import Stack


@pytest.mark.parametrize(("name", "options"), [("rwkv4", {}), ("rwkv6", {"head_dim": 4}), ("rwkv7", {"head_dim": 4})])
def test_channel_mixers_carry_a_state(name, options):
    stack = shaken(Stack(DIM, 2, name, layer_options=options, channel_mixer=name), 0.3)
    x = torch.randn(2, T, DIM)
    whole, last = stack(x)
    left, state = stack(x[:, :3])
    right, state = stack(x[:, 3:], state)
    torch.testing.assert_close(torch.cat([left, right], 1), whole)
    torch.testing.assert_close(state[1].channel, last[1].channel)
    assert last[1].channel.shape == (2, 1, DIM)
