"""Sashimi: its equation step by step, and what only it knows."""

import pytest
import torch

from by_hand import DIM, gelu, layer_norm, linear, shaken
from scanl.errors import ConfigError
from scanl.layers import Sashimi
from scanl.layers import state as states
from tests.layers.ssm.equations import s4


def blocks(tier, xs):
    for block in tier.blocks:
        mixed = s4(block.mixer, [layer_norm(x, block.norm) for x in xs])
        xs = [x + y for x, y in zip(xs, mixed, strict=True)]
        xs = [x + linear(block.ff[2], gelu(linear(block.ff[0], layer_norm(x, block.ff_norm)))) for x in xs]
    return xs


def tier_of(tier, xs):
    if tier.slow is not None:
        p, slow = tier.pool, []
        for k in range(len(xs) // p):
            pool = [xs[k * p + j][c] for c in range(tier.dim) for j in range(p)]
            slow.append(linear(tier.down, torch.stack(pool)))
        answers = [linear(tier.up, y) for y in tier_of(tier.slow, slow)] if slow else []
        added = []
        for t in range(len(xs)):
            k = t // p - 1  # the pool before this one
            added.append(answers[k][t % p :: p] if k >= 0 else torch.zeros(tier.dim))
        xs = [x + y for x, y in zip(xs, added, strict=True)]
    return [x + y for x, y in zip(xs, blocks(tier, xs), strict=True)]


def sashimi(layer, xs):
    return [layer_norm(y, layer.norm) for y in tier_of(layer.tier, xs)]


EQUATIONS = {"sashimi": (lambda: Sashimi(DIM, (2,), 2, 1, 1, 2), sashimi)}


@pytest.mark.usefixtures("double")
def test_two_pools_at_every_phase():
    """In one call, in pieces of every length, and rows at different phases together; beside the plain form."""
    layer, x = shaken(Sashimi(4, (2, 3), 2, 1, 1, 2)), torch.randn(2, 26, 4)
    whole, last = layer(x)
    torch.testing.assert_close(whole[0], torch.stack(sashimi(layer, list(x[0]))))
    for size in (1, 7, 25):
        state, ys = None, []
        for piece in x.split(size, 1):
            y, state = layer(piece, state)
            ys.append(y)
        torch.testing.assert_close(torch.cat(ys, 1), whole)
        for (_, a), (_, b) in zip(states.leaves(state), states.leaves(last), strict=True):
            torch.testing.assert_close(a, b)
    early, late = layer(x[:1, :5])[1], layer(x[1:, :9])[1]
    y, _ = layer(torch.stack([x[0, 5:15], x[1, 9:19]]), states.cat([early, late]))
    torch.testing.assert_close(y, torch.stack([whole[0, 5:15], whole[1, 9:19]]))


def test_wrong_options():
    with pytest.raises(ConfigError, match=r"sashimi: pool\[1\] is 0, expected at least 1"):
        Sashimi(8, (4, 0))
