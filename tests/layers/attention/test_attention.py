"""Softmax attention: each layer against its equation, step by step, how it starts, and what only it knows."""

import math

import pytest
import torch

from by_hand import DIM, T, assert_normal, convolve, rms, sigmoid, silu, unit
from scanl import layers
from scanl.errors import ConfigError, ShapeError
from scanl.layers import Attention, WindowAttention
from scanl.layers import state as states
from scanl.layers.attention.forgetting_attention import ForgettingAttention
from scanl.layers.attention.multi_state_attention import BLOCK


def attention(layer, xs):
    def turned(v, t):
        v = v.clone()
        for i in range(layer.rotated // 2):
            j, angle = i + layer.rotated // 2, t * layer.rope_base ** (-2 * i / layer.rotated)
            a, b = v[..., i].clone(), v[..., j].clone()
            v[..., i], v[..., j] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
        return v

    shared, K = layer.num_heads // layer.num_kv_heads, layer.head_dim
    ks = [turned(layer.k_proj(x).view(-1, K), t) for t, x in enumerate(xs)]
    vs, ys = [layer.v_proj(x).view(-1, K) for x in xs], []
    for t, x in enumerate(xs):
        q, out = turned(layer.q_proj(x).view(-1, K), t), []
        seen = range(max(0, t - layer.reach + 1), t + 1)
        for head in range(layer.num_heads):
            scores = torch.stack([q[head] @ ks[j][head // shared] / math.sqrt(K) for j in seen])
            weights = torch.exp(scores) / torch.exp(scores).sum()
            out.append(sum(w * vs[j][head // shared] for w, j in zip(weights, seen, strict=True)))
        ys.append(layer.o_proj(torch.cat(out)))
    return ys


def forgetting_attention(layer, xs):
    H, ys = layer.num_heads, []

    def normed(norm, v):
        v = v.view(H, -1)
        return v if norm is None else v / torch.sqrt((v**2).mean(-1, keepdim=True) + 1e-5) * norm.weight.view(H, -1)

    qs = [normed(layer.q_norm, layer.q_proj(x)) for x in xs]
    ks = [normed(layer.k_norm, layer.k_proj(x)) for x in xs]
    vs, fs = [layer.v_proj(x).view(H, -1) for x in xs], [1 / (1 + torch.exp(-layer.f_proj(x))) for x in xs]
    for t, x in enumerate(xs):
        out = []
        for h in range(H):
            weights = [
                torch.exp(qs[t][h] @ ks[j][h] / math.sqrt(layer.head_dim)) * math.prod(f[h] for f in fs[j + 1 : t + 1])
                for j in range(t + 1)
            ]
            out.append(sum(w * vs[j][h] for j, w in enumerate(weights)) / sum(weights))
        y = torch.cat(out)
        ys.append(layer.o_proj(y if layer.g_proj is None else y / (1 + torch.exp(-layer.g_proj(x)))))
    return ys


def path_attention(layer, xs):
    """Every token rewrites the keys before it, and is read by plain attention."""
    shared, K = layer.num_heads // layer.num_kv_heads, layer.head_dim
    projections = list(layer.w_proj) if isinstance(layer.w_proj, torch.nn.Sequential) else [layer.w_proj]
    ws = list(xs)
    for project in projections:
        ws = [project(w) for w in ws]
    ws = [silu(w).view(-1, K) for w in convolve(ws, layer.w_conv1d)]
    keys, values, ys = [], [], []
    for x, w in zip(xs, ws, strict=True):
        beta = 2 * sigmoid(layer.bt_proj(x))
        w = torch.stack([unit(row) for row in w])
        keys = [torch.stack([k - b * (k @ u) * u for k, b, u in zip(key, beta, w, strict=True)]) for key in keys]
        q, k = layer.q_proj(x).view(-1, K), layer.k_proj(x).view(-1, K)
        if layer.maybe_q_norm is not None:
            q = torch.stack([rms(row) for row in q]) * layer.maybe_q_norm.weight
            k = torch.stack([rms(row) for row in k]) * layer.maybe_k_norm.weight
        keys.append(k)
        values.append(layer.v_proj(x).view(-1, K))
        out = []
        for head in range(layer.num_heads):
            weights = torch.exp(torch.stack([key[head // shared] @ q[head] / math.sqrt(K) for key in keys]))
            weights = weights / weights.sum()
            out.append(sum(p * value[head // shared] for p, value in zip(weights, values, strict=True)))
        ys.append(layer.o_proj(torch.cat(out)))
    return ys


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
    "path_attention": (
        lambda: layers.build("path_attention", DIM, num_heads=4, num_kv_heads=2, max_length=T, rank=3),
        path_attention,
    ),
    "path_attention_normed": (
        lambda: layers.build(
            "path_attention", DIM, num_heads=2, max_length=64, rank=None, conv_bias=True, qk_norm=True
        ),
        path_attention,
    ),
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
    "forgetting_attention": (lambda: ForgettingAttention(DIM, 2, max_length=T), forgetting_attention),
    "forgetting_attention_gated": (
        lambda: ForgettingAttention(DIM, 4, max_length=64, qk_norm=True, output_gate=True),
        forgetting_attention,
    ),
    "window_attention": (lambda: WindowAttention(DIM, 2, window=3), attention),
    "window_attention_shared": (lambda: WindowAttention(DIM, 6, 2, head_dim=4, window=4, bias=True), attention),
    "attention": (lambda: Attention(DIM, 2, max_length=T, rope_base=100.0), attention),
    "attention_unrotated": (lambda: Attention(DIM, 4, 2, max_length=64, rope_fraction=0), attention),
}


@pytest.mark.usefixtures("double")
def test_rotary_positions_are_relative_a_million_steps_on():
    layer, x = WindowAttention(DIM, 2, window=4), torch.randn(1, T, DIM)
    y, _ = layer(x)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        far = layer.to(dtype).init_state(1)._replace(position=torch.tensor([1_000_000]))
        _, memory = layer(torch.randn(1, 4, DIM, dtype=dtype), far)
        _, memory = layer(x[:, :3].to(dtype), memory)
        after, _ = layer(x[:, 3:].to(dtype), memory)
        torch.testing.assert_close(after.double(), y[:, 3:], rtol=0, atol=tolerance)


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


def test_init_of_forgetting_attention():
    layer = ForgettingAttention(256, qk_norm=True, output_gate=True)
    for linear in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj, layer.f_proj, layer.g_proj):
        assert_normal(linear.weight, 0.02)
    assert not layer.f_proj.bias.any()
    assert (layer.q_norm.weight == 1).all()


def test_forgetting_attention_of_a_long_sequence_in_pieces():
    """What a head has forgotten is a sum over thousands of steps; each piece starts from it."""
    layer, x = ForgettingAttention(DIM, 2, max_length=3000), torch.randn(1, 3000, DIM)
    torch.nn.init.normal_(layer.f_proj.weight, std=3.0)
    exact, _ = layer.double()(x.double())
    state, layer = None, layer.float()
    for start in range(0, 3000, 500):
        y, state = layer(x[:, start : start + 500], state)
        torch.testing.assert_close(y.double(), exact[:, start : start + 500], rtol=0, atol=1e-5)


def test_init_of_path_attention():
    layer = layers.build("path_attention", 256, qk_norm=True)
    for linear in (layer.q_proj, layer.k_proj, layer.v_proj, *layer.w_proj, layer.bt_proj, layer.o_proj):
        assert_normal(linear.weight, 0.02)
    assert not layer.bt_proj.bias.any()
    assert (layer.maybe_q_norm.weight == 1).all()
    assert layer.w_proj[0].weight.shape == (32, 256)


@pytest.mark.usefixtures("double")
def test_path_attention_over_several_chunks():
    """As in pieces that end elsewhere, one of two tokens; and without reflections it is attention without positions."""
    layer, x = layers.build("path_attention", DIM, num_heads=2, max_length=150), torch.randn(2, 150, DIM)
    whole, last = layer(x)
    y, state = layer(x[:, :90])
    z, state = layer(x[:, 90:148], state)
    few, state = layer(x[:, 148:], state)
    torch.testing.assert_close(torch.cat([y, z, few], 1), whole)
    torch.testing.assert_close(state.memory.keys, last.memory.keys)
    layer.bt_proj.bias.data.fill_(-1e3)
    plain = Attention(DIM, 2, max_length=150, rope_fraction=0.0)
    plain.load_state_dict({key: layer.state_dict()[key] for key in plain.state_dict()})
    torch.testing.assert_close(layer(x)[0], plain(x)[0])


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


WRONG = [
    ("path_attention", {"num_heads": 3}, "path_attention: num_heads is 3, expected a divisor of dim=8"),
    ("path_attention", {"num_kv_heads": 3}, "path_attention: num_kv_heads is 3, expected a divisor of num_heads=8"),
    ("path_attention", {"rank": 0}, "path_attention: rank is 0, expected at least 1"),
    ("multi_state_attention", {"window": 0}, "multi_state_attention: window is 0, expected at least 1"),
    ("multi_state_attention", {"variant": "h2o"}, "multi_state_attention: unknown variant 'h2o'"),
    ("forgetting_attention", {"max_length": 0}, "forgetting_attention: max_length is 0, expected at least 1"),
    ("forgetting_attention", {"num_heads": 3}, "forgetting_attention: num_heads is 3, expected a divisor of dim=8"),
    ("window_attention", {"window": 0}, "window_attention: window is 0, expected at least 1"),
    ("window_attention", {"num_heads": 3}, "window_attention: num_heads is 3, expected a divisor of dim=8"),
    (
        "window_attention",
        {"rope_fraction": 1.5},
        "rope_fraction is 1.5, expected 0 to 1",
    ),
    ("attention", {"num_kv_heads": 3}, "attention: num_kv_heads is 3, expected a divisor of num_heads=8"),
    ("attention", {"num_heads": 0}, "attention: num_heads is 0, expected at least 1"),
    (
        "attention",
        {"num_heads": 8},
        "attention: rope_fraction is 1.0, expected an even number of channels of head_dim=1",
    ),
    ("attention", {"max_length": 0}, "attention: max_length is 0, expected at least 1"),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG)
def test_wrong_options_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        layers.build(name, DIM, **options)
