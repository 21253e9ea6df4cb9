"""MultiStateAttention: its equation step by step, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal
from scanl import layers
from scanl.layers import Attention, WindowAttention
from scanl.layers import state as states
from scanl.layers.attention.multi_state_attention import BLOCK


def multi_state_attention(layer, xs):
    """Rows in a list, one of which is deleted once there are too many."""
    shared, K = layer.num_heads // layer.num_kv_heads, layer.head_dim

    def turned(v, t):
        half = layer.rotated // 2
        angles = t * layer.rope_base ** (-torch.arange(half) / max(1, half))
        a, b, rest = v.split([half, half, K - 2 * half], -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest], -1)

    rows, ys = [], []
    for t, x in enumerate(xs):
        q = turned(layer.q_proj(x).view(-1, K), t)
        rows.append((turned(layer.k_proj(x).view(-1, K), t), layer.v_proj(x).view(-1, K)))
        out, mean = [], torch.zeros(len(rows))
        for head in range(layer.num_heads):
            weights = torch.exp(torch.stack([k[head // shared] @ q[head] / math.sqrt(K) for k, _ in rows]))
            weights = weights / weights.sum()
            mean = mean + weights
            out.append(sum(p * v[head // shared] for p, (_, v) in zip(weights, rows, strict=True)))
        if len(rows) > layer.reach:
            del rows[int(mean.argmin()) if layer.variant == "tova" else 0]
        ys.append(layer.o_proj(torch.cat(out)))
    return ys


EQUATIONS = {
    "multi_state_attention": (
        lambda: layers.build("multi_state_attention", DIM, num_heads=2, window=3),
        multi_state_attention,
    ),
    "multi_state_attention_shared": (
        lambda: layers.build("multi_state_attention", DIM, num_heads=4, num_kv_heads=2, window=2, bias=True),
        multi_state_attention,
    ),
    "multi_state_attention_window": (
        lambda: layers.build(
            "multi_state_attention", DIM, num_heads=2, window=2, variant="window", rope_fraction=0.5, rope_base=100.0
        ),
        multi_state_attention,
    ),
}

WRONG = [
    ("multi_state_attention", {"window": 0}, "window is 0, expected at least 1"),
    ("multi_state_attention", {"variant": "h2o"}, "unknown variant 'h2o'"),
]


@pytest.mark.usefixtures("double")
def test_multi_state_attention_with_room_for_all_is_attention():
    """And as its variant "window", it is attention over a window."""
    x = torch.randn(2, 9, DIM)
    layer, plain = layers.build("multi_state_attention", DIM, num_heads=2, window=9), Attention(DIM, 2, max_length=9)
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x)[0], plain(x)[0])
    for linear in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
        assert_normal(linear.weight, DIM**-0.5)
    layer = layers.build("multi_state_attention", DIM, num_heads=2, window=3, variant="window")
    window = WindowAttention(DIM, 2, 2, window=4, rope_fraction=1.0)
    window.load_state_dict(layer.state_dict() | {"o_proj.bias": torch.zeros(DIM)})
    torch.testing.assert_close(layer(x)[0], window(x)[0])


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("variant", ["tova", "window"])
def test_blocks_of_multi_state_attention_are_its_steps(variant):
    """Over several blocks, values, the gradient and the last state are those of a loop, and those of pieces."""
    layer = layers.build("multi_state_attention", DIM, num_heads=4, num_kv_heads=2, window=6, variant=variant)
    x = torch.randn(1, 2 * BLOCK + 3, DIM, requires_grad=True)
    y, state = layer(x)
    loop = torch.stack(multi_state_attention(layer, x[0]))[None]
    torch.testing.assert_close(y, loop)
    torch.testing.assert_close(*(torch.autograd.grad(each.sin().sum(), x) for each in (y, loop)))
    first, kept = layer(x[:, : BLOCK - 5])
    second, kept = layer(x[:, BLOCK - 5 :], kept)
    torch.testing.assert_close(torch.cat([first, second], 1), y)
    torch.testing.assert_close(kept, state)


@pytest.mark.usefixtures("double")
def test_a_full_cache_beside_an_empty_one():
    """A sequence that has read more than M tokens, and one that begins, give in one batch what they give alone."""
    layer = layers.build("multi_state_attention", DIM, num_heads=2, window=6)
    x, (_, full) = torch.randn(2, 20, DIM), layer(torch.randn(1, 9, DIM))
    parts = [full, layer.init_state(1)]
    y, state = layer(x, type(full)(*(torch.cat(leaves) for leaves in zip(*parts, strict=True))))
    for row, part in enumerate(parts):
        alone, kept = layer(x[row : row + 1], part)
        torch.testing.assert_close(y[row : row + 1], alone)
        torch.testing.assert_close(states.index(state, [row]), kept)
