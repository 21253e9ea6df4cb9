"""MEGA and Megalodon: their equations step by step, how they start, and what only they know."""

import math
from itertools import pairwise

import pytest
import torch

from by_hand import DIM, T, assert_normal, linear, rms, shaken, sigmoid, silu
from scanl import models
from scanl.errors import ConfigError, ShapeError
from scanl.layers import ComplexEMA, Mega, MegaEMA, Megalodon
from scanl.layers import state as states
from scanl.layers.parts.timestep_norm import TimestepNorm
from scanl.models import Block
from tests.layers.ssm.test_ssm import mega_ema

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


def rotated(v, position, first, second):
    """Each pair of channels (first, second) turned by the angle of its position."""
    out = v.clone()
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        angle = torch.tensor(position * 10000.0 ** (-2 * i / len(v)))
        out[a] = v[a] * angle.cos() - v[b] * angle.sin()
        out[b] = v[b] * angle.cos() + v[a] * angle.sin()
    return out


def position_bias(module, i, j):
    if hasattr(module, "rel_pos_bias"):
        return module.rel_pos_bias[module.reach - 1 + j - i]
    half = range(module.alpha.shape[1] // 2)
    pairs = half, [len(half) + c for c in half]
    return rotated(module.alpha[0], i, *pairs) @ rotated(module.beta[0], j, *pairs)


def mega(layer, xs):
    sizes, ys, ks, vs = [layer.dim, layer.z_dim, layer.hidden_dim, layer.dim], [], [], []
    for t, (x, m) in enumerate(zip(xs, mega_ema(layer.move, xs), strict=True)):
        start = t - t % layer.reach
        update, z, gate, ahead = linear(layer.mx_proj, m).split(sizes)
        q, k = (silu(z) * layer.gamma[i] + layer.beta[i] for i in range(2))
        ks, vs = [*ks, k], [*vs, silu(linear(layer.v_proj, x))]
        bias = [position_bias(layer.rel_pos_bias, t - start, j - start) for j in range(start, t + 1)]
        scores = torch.stack([q @ k for k in ks[start:]])
        if layer.activation == "softmax":
            weights = (scores / math.sqrt(layer.z_dim) + torch.stack(bias)).exp()
            weights = weights / weights.sum()
        else:
            scores = scores / (t - start + 1) + torch.stack(bias)
            weights = torch.where(scores > 0, scores, 0) ** 2
            if layer.activation == "laplace":
                weights = 0.5 * (1 + torch.erf((scores - 0.707107) / (0.282095 * math.sqrt(2))))
        read_out = (weights[:, None] * torch.stack(vs[start:])).sum(0)
        h = silu(ahead + linear(layer.h_proj, silu(gate) * read_out))
        ys.append(sigmoid(update) * (h - x))
    return ys


def cema(layer, xs):
    p = sigmoid(layer.alpha[..., 0])
    turn = torch.arange(1, layer.state_dim + 1) * sigmoid(layer.theta[..., 0]) * 2 * math.pi / layer.state_dim
    q = (1 - p * sigmoid(layer.delta[..., 0])) * torch.complex(turn.cos(), turn.sin())
    gamma = torch.complex(layer.gamma[..., 0], layer.gamma[..., 1]) / math.sqrt(layer.state_dim)
    h, ys = torch.zeros(layer.dim, layer.state_dim, dtype=torch.complex128), []
    for x in xs:
        h = q * h + p * x[:, None]
        ys.append((gamma * h).sum(1).real + layer.omega[:, 0] * x)
    return ys


def timestep_norm(norm, xs):
    ys = []
    for t in range(len(xs)):
        seen = torch.stack(xs[: t + 1]).unflatten(1, (norm.groups, -1))
        mean, var = seen.mean((0, 2)), seen.var((0, 2), correction=0)
        y = (seen[-1] - mean[:, None]) / torch.sqrt(var[:, None] + norm.eps)
        ys.append(y.flatten() * (1 + norm.weight) + norm.bias)
    return ys


def megalodon(layer, xs):
    H, W, ys, ks, vs = layer.num_heads, layer.chunk_size, [], [], []
    width = layer.z_dim // H
    normed = timestep_norm(layer.timenorm, xs)
    for t, average in enumerate(cema(layer.cema, normed)):
        start = t - t % W
        m = rms(average) * (1 + layer.rmsnorm.weight)
        z = torch.cat([rms(part) for part in linear(layer.wz, m).chunk(H)]) / math.sqrt(width)
        q, k = (z * (1 + layer.gamma[i]) + layer.beta[i] for i in range(2))
        pairs = range(0, width, 2), range(1, width, 2)
        q, k = (torch.stack([rotated(part, t - start, *pairs) for part in each.chunk(H)]) for each in (q, k))
        ks, vs = [*ks, k], [*vs, silu(linear(layer.wv, normed[t])).view(H, -1)]
        weights = torch.stack([(q * k).sum(1) for k in ks[start:]]).exp()
        read_out = (weights / weights.sum(0))[..., None] * torch.stack(vs[start:])
        ys.append(linear(layer.wh1, m) + layer.wh2.weight @ (silu(linear(layer.wr, m)) * read_out.sum(0).flatten()))
    return ys


EQUATIONS = {
    "mega": (lambda: Mega(DIM, 4, 6, 3, max_length=24), mega),
    "mega_chunk_laplace_rotary": (lambda: Mega(DIM, 4, 6, 3, 3, activation="laplace", position_bias="rotary"), mega),
    "mega_relu2": (lambda: Mega(DIM, 5, None, 2, max_length=24, activation="relu2"), mega),
    "cema": (lambda: ComplexEMA(DIM, 3), cema),
    "megalodon": (lambda: Megalodon(DIM, 4, 6, 2, 3, 3, 4), megalodon),
    "megalodon_of_one_chunk": (lambda: Megalodon(DIM, 6, None, 1, 3, 24), megalodon),
}


@pytest.mark.usefixtures("double")
def test_a_chunk_as_long_as_the_sequence_is_attention_to_all_of_it():
    whole, x = Mega(DIM, 4, 6, 3, max_length=T), torch.randn(2, T, DIM)
    chunk = Mega(DIM, 4, 6, 3, chunk_size=T)
    chunk.load_state_dict(whole.state_dict())
    torch.testing.assert_close(chunk(x), whole(x))
    with pytest.raises(ShapeError, match=f"mega: x makes a sequence of {T + 1} steps, expected at most"):
        whole(x[:, :1], whole(x)[1])
    chunk(x[:, :1], chunk(x)[1])


@pytest.mark.usefixtures("double")
def test_the_gate_of_mega_mixes_with_what_stands_before_the_norm():
    layer, x, residual = Mega(DIM, 4, 6, 3, 3), torch.randn(2, T, DIM), torch.randn(2, T, DIM)
    gate = layer.mx_proj(layer.move(x)[0])[..., :DIM].sigmoid()
    torch.testing.assert_close(layer(x, residual=residual)[0], layer(x)[0] + gate * (x - residual))
    block = shaken(Block(layer, "none", norm="layernorm"))
    normed = block.mixer_norm(x)
    torch.testing.assert_close(block(x)[0], x + layer(normed, residual=x)[0])
    with pytest.raises(ShapeError, match=r"mega: residual has shape \(1, 7, 8\), expected \(2, 7, 8\) from x"):
        layer(x, residual=residual[:1])


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


@pytest.mark.usefixtures("double")
def test_the_moving_average_of_megalodon_without_a_turn_is_that_of_mega():
    """With beta 1, without the SiLU; `alpha` and `delta` change their names."""
    ours, plain, x = ComplexEMA(DIM, 3), MegaEMA(DIM, 3), torch.randn(2, 20, DIM)
    with torch.no_grad():
        ours.theta.fill_(-1e9)
        plain.alpha.copy_(ours.delta)
        plain.delta.copy_(ours.alpha)
        plain.beta.fill_(1.0)
        plain.gamma.copy_(ours.gamma[..., 0])
        plain.omega.copy_(ours.omega[:, 0])
    torch.testing.assert_close(silu(ours(x)[0]), plain(x)[0])


def test_the_timestep_norm_does_not_drift():
    """A million steps read before: the sums of float64 keep what float32 would round away."""
    norm, steps = TimestepNorm(4, 2), 1_000_000
    x = torch.randn(1, 100, 4) + 3
    _, state = norm(x, None, None)
    state = state._replace(
        steps=state.steps * (steps // 100), sums=state.sums * (steps // 100), rest=state.rest * (steps // 100)
    )
    y = norm(x, state, None)[0]
    values = torch.cat([x.double().expand(steps // 100, 100, 4).flatten(0, 1), x[0].double()]).unflatten(1, (2, 2))
    mean, var = values.mean((0, 2)), values.var((0, 2), correction=0)
    expected = ((x[0, -1].view(2, 2) - mean[:, None]) / torch.sqrt(var[:, None] + 1e-5)).flatten()
    torch.testing.assert_close(y[0, -1].double(), expected, rtol=1e-5, atol=1e-6)


def test_init_of_mega_and_megalodon():
    layer = Mega(64, 300, 300, chunk_size=600)
    for weight in (layer.v_proj.weight, layer.mx_proj.weight, layer.h_proj.weight, layer.gamma):
        assert_normal(weight, 0.02)
    assert_normal(layer.rel_pos_bias.rel_pos_bias, 0.02)
    assert not any(each.any() for each in (layer.beta, layer.v_proj.bias, layer.mx_proj.bias, layer.h_proj.bias))
    assert_normal(Mega(8, 4000, 2, position_bias="rotary").rel_pos_bias.alpha, 0.02)
    layer = Megalodon(128)
    for project in (layer.wv, layer.wz, layer.wr, layer.wh1, layer.wh2):
        assert_normal(project.weight, 1 / math.sqrt(3 * project.in_features))
    assert layer.timenorm.groups == 4
    assert not any(each.any() for each in (layer.gamma, layer.beta, layer.rmsnorm.weight, layer.timenorm.weight))
    turns = layer.cema.theta.sigmoid().flatten().sort(descending=True).values
    torch.testing.assert_close(turns, 128 ** (-torch.arange(1, 129) / 128), rtol=1e-4, atol=1e-6)
    assert_normal(layer.cema.alpha, 0.2)
    assert_normal(layer.cema.gamma[..., 0], 1.0)
    assert not layer.cema.gamma[..., 1].any()
    assert layer.cema.omega.abs().max() <= 1


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mega(8, 0), "mega: z_dim is 0, expected at least 1"),
        (lambda: Mega(8, activation="soft"), "mega: unknown activation 'soft'; did you mean 'softmax'"),
        (lambda: Mega(8, position_bias="none"), "mega: unknown position_bias 'none'"),
        (
            lambda: Mega(8, 3, position_bias="rotary"),
            "mega: z_dim is 3, expected an even number because position_bias is 'rotary'",
        ),
        (lambda: Megalodon(8, 6, num_heads=2), "megalodon: z_dim is 6, expected a multiple of 2 num_heads=4"),
        (lambda: Megalodon(8, 8, 5, 2), "megalodon: hidden_dim is 5, expected a multiple of num_heads=2"),
        (lambda: Megalodon(8, chunk_size=0), "megalodon: chunk_size is 0, expected at least 1"),
        (lambda: Megalodon(8, num_groups=3), "megalodon: num_groups is 3, expected a divisor of dim=8"),
        (lambda: ComplexEMA(8, 0), "cema: state_dim is 0, expected at least 1"),
        (lambda: Block(Mega(8), "none", two_hop=True), "block: two_hop is True, expected False because channel_mixer"),
    ],
)
def test_wrong_options(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
