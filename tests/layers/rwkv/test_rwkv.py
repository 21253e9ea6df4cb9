"""AFT and RWKV: each layer against its equation, step by step, how it starts, and what only it knows."""

import math

import pytest
import torch

from by_hand import DIM, T, assert_orthogonal, assert_uniform, channels, shaken, sigmoid, with_before
from scanl import layers
from scanl.errors import ConfigError, ShapeError
from scanl.layers import AFT, RWKV4, RWKV6, RWKV7
from scanl.layers import state as states
from scanl.models import Stack


def rwkv4(layer, xs):
    """Sums over all steps before, as the paper writes them."""
    w, u = torch.exp(layer.time_decay), layer.time_first
    mixed = {name: getattr(layer, f"time_mix_{name}")[0, 0] for name in ("key", "value", "receptance")}
    ks, vs, ys = [], [], []
    for t, (x, before) in enumerate(with_before(xs)):
        k, v, r = (getattr(layer, name).weight @ (mu * x + (1 - mu) * before) for name, mu in mixed.items())
        p, z = torch.exp(u + k) * v, torch.exp(u + k)
        for i in range(t):
            weight = torch.exp(-(t - 1 - i) * w + ks[i])
            p, z = p + weight * vs[i], z + weight
        ks.append(k)
        vs.append(v)
        ys.append(layer.output.weight @ (sigmoid(r) * p / z))
    return ys


def group_norm(o, norm):
    """o: heads by values."""
    o = (o - o.mean(1, keepdim=True)) / torch.sqrt(o.var(1, keepdim=True, correction=0) + norm.eps)
    return o.flatten() * norm.weight + norm.bias


def rwkv6(layer, xs):
    heads = layer.time_faaaa.shape
    S, ys = torch.zeros(heads[0], heads[1], heads[1]), []
    for x, before in with_before(xs):
        lora = torch.tanh((x + (before - x) * layer.time_maa_x[0, 0]) @ layer.time_maa_w1).view(5, -1)
        mixed = {}
        for slot, name in enumerate("wkvrg"):
            share = getattr(layer, f"time_maa_{name}")[0, 0] + lora[slot] @ layer.time_maa_w2[slot]
            mixed[name] = x + (before - x) * share
        r, k, v = (
            (getattr(layer, name).weight @ mixed[name[0]]).view(heads) for name in ("receptance", "key", "value")
        )
        d = layer.time_decay[0, 0] + torch.tanh(mixed["w"] @ layer.time_decay_w1) @ layer.time_decay_w2
        w = torch.exp(-torch.exp(d)).view(heads)
        o = torch.zeros(heads)
        for h in range(heads[0]):
            kv = torch.outer(k[h], v[h])
            o[h] = (S[h] + torch.diag(layer.time_faaaa[h]) @ kv).T @ r[h]
            S[h] = torch.diag(w[h]) @ S[h] + kv
        g = layer.gate.weight @ mixed["g"]
        ys.append(layer.output.weight @ (group_norm(o, layer.ln_x) * g * sigmoid(g)))
    return ys


def rwkv7(layer, xs, firsts=None):
    """firsts: the values of the lowest layer, for a layer above it."""
    heads = layer.r_k.shape
    S, ys = torch.zeros(heads[0], heads[1], heads[1]), []  # rows of values, columns of keys, as the paper has it
    for t, (x, before) in enumerate(with_before(xs)):
        mixed = {name: x + (before - x) * getattr(layer, f"x_{name}")[0, 0] for name in "rwkvag"}
        r, k, v = layer.receptance.weight @ mixed["r"], layer.key.weight @ mixed["k"], layer.value.weight @ mixed["v"]
        d = layer.w0[0, 0] + torch.tanh(mixed["w"] @ layer.w1) @ layer.w2
        w = torch.exp(-torch.exp(-torch.log(1 + torch.exp(-d)) - 0.5)).view(heads)
        a = sigmoid(layer.a0[0, 0] + mixed["a"] @ layer.a1 @ layer.a2)
        g = sigmoid(mixed["g"] @ layer.g1) @ layer.g2
        if firsts is not None:
            v = v + (firsts[t] - v) * sigmoid(layer.v0[0, 0] + mixed["v"] @ layer.v1 @ layer.v2)
        kappa = (k * layer.k_k[0, 0]).view(heads)
        k = k * (1 + (a - 1) * layer.k_a[0, 0])
        r, k, v, a = (part.view(heads) for part in (r, k, v, a))
        o, bonus = torch.zeros(heads), torch.zeros(heads)
        for h in range(heads[0]):
            unit = kappa[h] / torch.sqrt((kappa[h] ** 2).sum())
            S[h] = S[h] @ (torch.diag(w[h]) - torch.outer(unit, unit * a[h])) + torch.outer(v[h], k[h])
            o[h], bonus[h] = S[h] @ r[h], (r[h] * k[h] * layer.r_k[h]).sum() * v[h]
        ys.append(layer.output.weight @ ((group_norm(o, layer.ln_x) + bonus.flatten()) * g))
    return ys


def aft(layer, xs):
    """Sums over all steps up to the present, with the matrix w written out."""
    T = len(xs)
    w = torch.zeros(T, T, layer.width)  # "simple"
    for t in range(T):
        for i in range(t + 1):
            if layer.variant == "full" or (layer.variant == "local" and t - i < layer.window):
                w[t, i] = layer.wbias[t, i]
            elif layer.variant == "conv" and t - i < layer.window:
                for h, kernel in enumerate(layer.wbias):
                    deviation = torch.sqrt(((kernel - kernel.mean()) ** 2).sum() / (len(kernel) - 1))
                    share = layer.width // len(layer.wbias)
                    value = layer.gamma[h] * (kernel[t - i] - kernel.mean()) / deviation + layer.beta[h]
                    w[t, i, h * share : (h + 1) * share] = value
    q, k, v = ([linear.weight @ x + linear.bias for x in xs] for linear in (layer.to_q, layer.to_k, layer.to_v))
    k = [each.repeat_interleave(layer.width // len(each)) for each in k]
    ys = []
    for t in range(T):
        p = sum(torch.exp(k[i] + w[t, i]) * v[i] for i in range(t + 1))
        z = sum(torch.exp(k[i] + w[t, i]) for i in range(t + 1))
        ys.append(layer.project.weight @ (sigmoid(q[t]) * p / z) + layer.project.bias)
    return ys


EQUATIONS = {
    "rwkv4": (lambda: RWKV4(DIM, 6), rwkv4),
    "rwkv6": (lambda: RWKV6(DIM, 4, 3, 5), rwkv6),
    "rwkv7": (lambda: RWKV7(DIM, 4, 3, 4, 5, 6), rwkv7),
    "aft": (lambda: AFT(DIM, width=6), aft),
    "aft_simple": (lambda: layers.build("aft_simple", DIM, width=6), aft),
    "aft_full": (lambda: layers.build("aft_full", DIM, width=6, max_length=T + 2), aft),
    "aft_local": (lambda: layers.build("aft_local", DIM, width=6, max_length=T + 2, window=3), aft),
    "aft_local_longer_than_all": (lambda: AFT(DIM, "local", 6, T + 2, T + 3), aft),
    "aft_conv": (lambda: layers.build("aft_conv", DIM, width=6, window=3, num_heads=2), aft),
    "aft_conv_of_channels": (lambda: AFT(DIM, "conv", 6, window=2, num_heads=6), aft),
}


# --- what only they know


@pytest.mark.usefixtures("double")
def test_values_of_the_lowest_rwkv7_reach_those_above():
    low, high = tied = [RWKV7(DIM, 4, 3, 4, 5, 6) for _ in range(2)]
    for index, layer in enumerate(tied):
        layer.enter_stack(index, tied)
    assert not any(name.startswith("v") and name[1:].isdigit() for name, _ in low.named_parameters())
    shaken(low, 0.3), shaken(high, 0.3)
    x, z = torch.randn(1, T, DIM), torch.randn(1, T, DIM)
    memo = {}
    torch.testing.assert_close(low(x, memo=memo)[0][0], torch.stack(rwkv7(low, list(x[0]))))
    firsts = [low.value.weight @ (u + (before - u) * low.x_v[0, 0]) for u, before in with_before(list(x[0]))]
    torch.testing.assert_close(high(z, memo=memo)[0][0], torch.stack(rwkv7(high, list(z[0]), firsts)))
    with pytest.raises(ConfigError, match="rwkv7: memo has no values of the lowest RWKV-7 layer, expected them"):
        high(z)


def test_a_stack_hands_the_values_up():
    torch.manual_seed(0)
    stack = shaken(Stack(DIM, 3, "rwkv7", layer_options={"head_dim": 4}), 0.3)
    x = torch.randn(2, T, DIM)
    y, _ = stack(x)
    y.square().sum().backward()
    assert all(parameter.grad.any() for block in stack.blocks for parameter in block.mixer.parameters())
    expected, memo = x, {}
    for block in stack.blocks:
        expected = expected + block.mixer(block.mixer_norm(expected), memo=memo)[0]
        expected = expected + block.channel(block.channel_norm(expected))[0]
    torch.testing.assert_close(stack.norm(expected), y)
    compiled = torch.compile(stack, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x)[0], y)


def test_wrapped_rwkv7_stays_alone():
    stack = Stack(DIM, 2, "bidirectional", layer_options={"layer": "rwkv7", "layer_options": {"head_dim": 4}})
    assert stack(torch.randn(1, 3, DIM))[0].shape == (1, 3, DIM)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("variant", ["simple", "full", "local", "conv"])
def test_no_key_of_aft_is_too_large(variant):
    """Keys far apart, large ones leaving the window too: the largest weighs alone."""
    layer = AFT(1, variant, 1, 9, 2)
    with torch.no_grad():
        for linear in (layer.to_k, layer.to_v, layer.project):
            linear.weight.fill_(1)
            linear.bias.zero_()
        layer.to_q.weight.zero_()
        layer.to_q.bias.fill_(50)
    x = torch.tensor([-2000.0, 1000, 5000, 0, -3000, 6000, -1]).view(1, 7, 1).requires_grad_()
    expected = torch.tensor([-2000.0, 1000, 5000, 5000, 5000, 6000, 6000]).view(1, 7, 1)
    y, state = layer(x)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert x.grad.isfinite().all()
    pieces, state = [], None
    for t in range(7):
        y, state = layer(x[:, t : t + 1], state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), expected)


@pytest.mark.parametrize("spreads", [(0.1, 0.1), (40, 0.1), (0.1, 40), (40, 40)], ids=str)
@pytest.mark.parametrize("variant", ["full", "local", "conv"])
def test_aft_over_blocks_is_its_loop(variant, spreads):
    """However far keys and w lie apart: values and gradients, longer than a block of steps, beside the loop."""
    layer = AFT(3, variant, 4, 300, 5, 2)
    exact = AFT(3, variant, 4, 300, 5, 2).double()
    with torch.no_grad():
        layer.to_k.weight.normal_(0, spreads[0])
        layer.wbias.normal_(0, spreads[1])
        if variant == "conv":
            layer.gamma.fill_(spreads[1])
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    x = torch.randn(2, 270 if variant == "full" else 140, 3)
    weights = torch.randn(x.shape).double()
    leaves = [x.double().requires_grad_(), *exact.parameters()]
    expected = exact_averages(exact, leaves[0])
    truth = torch.autograd.grad(expected, leaves, weights)
    for model, dtype in ((exact, torch.float64), (layer, torch.float32)):
        own = [x.to(dtype).requires_grad_(), *model.parameters()]
        y, _ = model(own[0])
        rounding = x.shape[1] * torch.finfo(dtype).eps * (1 + max(spreads))  # sums over T steps; the exponents' size
        own_and_true = zip(
            (y, *torch.autograd.grad(y, own, weights.to(dtype))), (expected.detach(), *truth), strict=True
        )
        for actual, right in own_and_true:
            bound = rounding * (1 + float(right.abs().max()))
            torch.testing.assert_close(actual.detach().double(), right, rtol=0, atol=bound)


def exact_averages(layer, x):
    """AFT, each pair of positions on its own: a softmax over the steps, in each channel."""
    T = x.shape[1]
    back = torch.arange(T)[:, None] - torch.arange(T)
    if layer.variant == "conv":
        deviation = layer.wbias.std(1, keepdim=True)
        kernel = layer.gamma[:, None] * (layer.wbias - layer.wbias.mean(1, keepdim=True)) / deviation
        w = (kernel + layer.beta[:, None])[:, back.clamp(0, layer.window - 1)].permute(1, 2, 0)
        w = w.repeat_interleave(layer.width // len(kernel), 2)
    else:
        w = layer.wbias[:T, :T, None]
    w = torch.where((back < (T if layer.variant == "full" else layer.window))[..., None], w, 0)
    k = layer.to_k(x).repeat_interleave(layer.width // layer.to_k.out_features, 2)
    logits = (k[:, None] + w).masked_fill((back < 0)[..., None], -math.inf)
    o = (logits.softmax(2) * layer.to_v(x)[:, None]).sum(2)
    return layer.project(sigmoid(layer.to_q(x)) * o)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("variant", ["full", "local", "conv"])
def test_rows_of_aft_at_other_positions_are_each_alone(variant):
    layer = shaken(AFT(3, variant, 4, 40, 5, 2), 0.5)
    before, x = [layer(torch.randn(1, steps, 3))[1] for steps in (9, 2)], torch.randn(2, 6, 3)
    y, after = layer(x, states.cat(before))
    for row, state in enumerate(before):
        alone, last = layer(x[row : row + 1], state)
        torch.testing.assert_close(y[row : row + 1], alone)
        torch.testing.assert_close(states.index(after, slice(row, row + 1)), last)


def test_aft_ends_where_its_positions_end():
    layer = AFT(DIM, "local", max_length=5, window=2)
    _, state = layer(torch.randn(1, 4, DIM))
    for arguments in ((torch.randn(1, 6, DIM),), (torch.randn(1, 2, DIM), state)):
        with pytest.raises(ShapeError, match="aft: x ends at step 6, expected at most max_length=5"):
            layer(*arguments)
    assert layer(torch.randn(1, 1, DIM), state)[1].steps.item() == 5


# --- initialisation, of the channel mixers in their blocks too


def start_of_rwkv4(dim, a, c):
    return {
        "time_decay": channels(lambda j: -5 + 8 * (j / (dim - 1)) ** (0.7 + 1.3 * a), dim),
        "time_first": channels(lambda j: math.log(0.3) + 0.5 * ((j + 1) % 3 - 1), dim),
        "time_mix_key": channels(lambda j: (j / dim) ** c, dim),
        "time_mix_value": channels(lambda j: (j / dim) ** c + 0.3 * a, dim),
        "time_mix_receptance": channels(lambda j: (j / dim) ** (c / 2), dim),
    }


def blocks(name, dim, depth):
    """(time mix, channel mix, a, c) of each block of a stack."""
    stack = Stack(dim, depth, name, channel_mixer=name)
    return [(b.mixer, b.channel, i / (depth - 1), 1 - i / depth) for i, b in enumerate(stack.blocks)]


def test_init_of_rwkv4():
    for layer, mixer, a, c in blocks("rwkv4", 12, 4):
        expected = start_of_rwkv4(12, a, c)
        for name, value in expected.items():
            torch.testing.assert_close(getattr(layer, name).flatten(), value)
        for name in ("time_mix_key", "time_mix_receptance"):
            torch.testing.assert_close(getattr(mixer, name).flatten(), expected["time_mix_key"])
        for zero in (layer.key, layer.receptance, layer.output, mixer.receptance, mixer.value):
            assert not zero.weight.any()
        assert_orthogonal(layer.value.weight, 1)
        assert_orthogonal(mixer.key.weight, 2)
    assert_orthogonal(RWKV4(8, 18).value.weight, 1.5)


def start_of_rwkv6(dim, a, c):
    flat = channels(lambda j: 1 - (j / dim) ** c, dim)
    slow = channels(lambda j: 1 - (j / dim) ** (c / 2), dim)
    return {
        **{f"time_maa_{name}": flat for name in "xwk"},
        "time_maa_v": flat - 0.3 * a,
        **{f"time_maa_{name}": slow for name in "rg"},
        "time_decay": channels(lambda j: -6 + 5 * (j / (dim - 1)) ** (0.7 + 1.3 * a), dim),
        "time_faaaa": channels(lambda j: a * (1 - j / (dim - 1)) + 0.1 * ((j + 1) % 3 - 1), dim),
    }


def test_init_of_rwkv6():
    for layer, mixer, a, c in blocks("rwkv6", 128, 3):
        expected = start_of_rwkv6(128, a, c)
        for name, value in expected.items():
            torch.testing.assert_close(getattr(layer, name).flatten(), value)
        for name in ("time_maa_k", "time_maa_r"):
            torch.testing.assert_close(
                getattr(mixer, name).flatten(), channels(lambda j, c=c: 1 - (j / 128) ** c**3, 128)
            )
        assert layer.time_maa_w1.shape == (128, 160)
        assert layer.time_decay_w1.shape == (128, 64)
        assert layer.time_faaaa.shape == (2, 64)
        assert_uniform(layer.time_maa_w2, -0.01, 0.01)
        assert_uniform(layer.time_decay_w2, -0.01, 0.01)
        for zero in (layer.time_maa_w1, layer.time_decay_w1, layer.output.weight):
            assert not zero.any()
        for linear, gain in ((layer.receptance, 1), (layer.value, 1), (layer.key, 0.1), (layer.gate, 0.1)):
            assert_orthogonal(linear.weight, gain)
        torch.testing.assert_close(layer.ln_x.weight, torch.full((128,), (1 - c + 1 / 3) ** 0.7))
        assert layer.ln_x.eps == 64e-5
        assert mixer.key.weight.shape == (448, 128)
        assert_orthogonal(mixer.key.weight, 1)
        assert not mixer.receptance.weight.any()
        assert not mixer.value.weight.any()


def test_init_of_rwkv7():
    dim, size = 128, 64
    zig = channels(lambda j: (z := (j % size - 31.5) / 31.5) * abs(z), dim)
    lin = channels(lambda j: j / (dim - 1) - 0.5, dim)
    for place, (layer, mixer, a, c) in enumerate(blocks("rwkv7", dim, 3)):
        expected = {
            "a0": -0.19 + 0.3 * zig + 0.4 * lin,
            "k_k": 0.71 - 0.1 * lin,
            "k_a": torch.full((dim,), 1.02),
            "r_k": torch.full((dim,), -0.04),
            "w0": -5.5 + 6 * channels(lambda j, a=a: (j / (dim - 1)) ** (1 + a**0.3), dim) + 2.5 * zig,
            **({"v0": 0.73 - 0.4 * lin} if place else {}),
        }
        for name, share in {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}.items():
            expected[f"x_{name}"] = channels(lambda j, e=share * c: 1 - (j / dim) ** e, dim)
        for name, value in expected.items():
            torch.testing.assert_close(getattr(layer, name).flatten(), value)
        for name, rank in {"w": 32, "a": 32, "g": 64, **({"v": 32} if place else {})}.items():
            first, second = getattr(layer, f"{name}1"), getattr(layer, f"{name}2")
            assert first.shape == (dim, rank)
            assert not first.any()
            assert_orthogonal(second, 0.1)
        assert_uniform(layer.receptance.weight, -0.5 / math.sqrt(dim), 0.5 / math.sqrt(dim))
        assert_uniform(layer.value.weight, -0.5 / math.sqrt(dim), 0.5 / math.sqrt(dim))
        assert_uniform(layer.key.weight, -0.05 / math.sqrt(dim), 0.05 / math.sqrt(dim))
        assert not layer.output.weight.any()
        assert layer.ln_x.eps == 64e-5
        torch.testing.assert_close(mixer.x_k.flatten(), channels(lambda j, e=c**4: 1 - (j / dim) ** e, dim))
        assert_uniform(mixer.key.weight, -0.5 / math.sqrt(dim), 0.5 / math.sqrt(dim))
        assert mixer.key.weight.shape == (512, dim)
        assert not mixer.value.weight.any()
    assert_orthogonal(RWKV7(8, 4).w2, 0.2)
    assert RWKV7(1024).g1.shape == (1024, 160)


def test_init_of_aft():
    layer = AFT(32, "full", 16, 200)
    assert_uniform(layer.wbias, -math.sqrt(6 / 400), math.sqrt(6 / 400))
    for linear in (layer.to_q, layer.to_k, layer.to_v):
        assert linear.weight.shape == (16, 32)
        assert_uniform(linear.weight, -math.sqrt(1 / 32), math.sqrt(1 / 32))
    conv = AFT(32, "conv", num_heads=4)
    assert conv.to_k.weight.shape == (4, 32)
    assert conv.wbias.shape == (4, 32)
    assert not conv.gamma.any()
    assert not conv.beta.any()


# --- options

WRONG = [
    (lambda: layers.build("rwkv4", 8, width=0), "rwkv4: width is 0, expected at least 1"),
    (lambda: layers.build("rwkv6", 8, head_dim=3), "rwkv6: head_dim is 3, expected a divisor of dim=8"),
    (lambda: layers.build("aft", 8, variant="ful"), r"aft: unknown variant 'ful'; did you mean 'full'\?"),
    (lambda: AFT(8, max_length=0), "aft: max_length is 0, expected at least 1"),
    (lambda: AFT(8, "conv", window=1), "aft: window is 1, expected at least 2 because of variant 'conv'"),
    (lambda: AFT(8, "conv", num_heads=3), "aft: num_heads is 3, expected a divisor of width=8"),
    (lambda: layers.build("rwkv7", 8, head_dim=0), "rwkv7: head_dim is 0, expected at least 1"),
]


@pytest.mark.parametrize(("build", "message"), WRONG)
def test_wrong_options_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("variant", ["full", "local"])
def test_weights_of_aft_may_have_a_low_rank(variant):
    layer, x = AFT(DIM, variant, 4, 9, 3, rank=2), torch.randn(2, 7, DIM)
    whole = AFT(DIM, variant, 4, 9, 3)
    weights = layer.state_dict()
    u, v = weights.pop("w_u"), weights.pop("w_v")
    assert u.shape == v.shape == (9, 2)
    whole.load_state_dict({**weights, "wbias": u @ v.T})
    torch.testing.assert_close(layer(x)[0], whole(x)[0])
    layer(x)[0].sum().backward()
    assert layer.w_u.grad.any()
    for options, message in (
        ({"rank": 0}, "rank is 0, expected at least 1"),
        ({"rank": 2, "variant": "conv"}, "rank is 2, expected None because of variant='conv'"),
    ):
        with pytest.raises(ConfigError, match=f"aft: {message}"):
            AFT(DIM, **{"variant": "full", **options})
