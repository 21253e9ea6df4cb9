"""TTM: its equation step by step, what only it knows, how it starts, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform, gelu_tanh, layer_norm, linear, shaken
from scanl.layers import TTM


def share(v):
    return torch.exp(v) / torch.exp(v).sum()


def mlp(first, second, v):
    return linear(second, gelu_tanh(linear(first, v)))


def summary(tokens, norm, first, second):
    scores = torch.stack([mlp(first, second, layer_norm(token, norm)) for token in tokens])
    return [sum(w * token for w, token in zip(share(column), tokens, strict=True)) for column in scores.T]


def ttm(layer, xs):
    memory, ys = [torch.zeros(layer.token_dim)] * layer.num_slots, []
    depth, K = (len(layer.maps) - 4) // 6, layer.token_dim // layer.num_heads
    for x in xs:
        tokens = [*memory, *x.view(layer.num_groups, -1)]
        z = [a + b for a, b in zip(summary(tokens, layer.norms[0], *layer.maps[:2]), layer.positions, strict=True)]
        for block in range(depth):
            maps, norms = layer.maps[4 + 6 * block : 10 + 6 * block], layer.norms[2 + 2 * block : 4 + 2 * block]
            q, k, v = ([linear(m, layer_norm(each, norms[0])).split(K) for each in z] for m in maps[:3])
            for i in range(len(z)):
                out = []
                for head in range(layer.num_heads):
                    w = share(torch.stack([q[i][head] @ key[head] / math.sqrt(K) for key in k]))
                    out.append(sum(a * value[head] for a, value in zip(w, v, strict=True)))
                z[i] = z[i] + linear(maps[3], torch.cat(out))
            z = [each + mlp(maps[4], maps[5], layer_norm(each, norms[1])) for each in z]
        z = [layer_norm(each, layer.norms[-1]) for each in z]
        memory = summary([*tokens, *z], layer.norms[1], *layer.maps[2:4])
        count = layer.num_anchors // layer.num_groups
        ys.append(torch.cat([sum(z[i : i + count]) / count for i in range(0, len(z), count)]))
    return ys


EQUATIONS = {"ttm": (lambda: TTM(DIM, 1, 3, 2, 2), ttm), "ttm_2": (lambda: TTM(DIM, 2, 3, 4, 1, 2, 1.5), ttm)}

WRONG = [
    ("ttm", {"num_groups": 3}, "num_groups is 3, expected a divisor of dim=8"),
    ("ttm", {"num_groups": 4, "num_anchors": 6}, "num_anchors is 6, expected a multiple of num_groups=4"),
    ("ttm", {"num_groups": 4, "num_heads": 4}, "num_heads is 4, expected a divisor of dim / num_groups=2"),
    ("ttm", {"expand": 0.01}, "expand is 0.01, expected at least 1/8 because of dim / num_groups=8"),
]


@pytest.mark.usefixtures("double")
def test_the_order_of_the_tokens_of_a_step_is_irrelevant():
    layer, x = shaken(TTM(DIM, 4, 3, 4, 1)), torch.randn(2, 3, 4, 2)
    y, memory = layer(x.flatten(2))
    other, also = layer(x.flip(2).flatten(2))
    torch.testing.assert_close(other, y)
    torch.testing.assert_close(also, memory)


def test_how_it_starts():
    layer = TTM(64)
    for linear_map in layer.maps:
        limit = math.sqrt(6 / (linear_map.in_features + linear_map.out_features))
        assert_uniform(linear_map.weight, -limit, limit)
        assert not linear_map.bias.any()
    assert_normal(layer.positions, 0.02)
    assert not layer.init_state(1).any()
