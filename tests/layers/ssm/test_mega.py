"""Mega: its equation step by step, and what only it knows."""

import math

import pytest
import torch

from by_hand import DIM, T, linear, shaken, sigmoid, silu
from scanl.errors import ConfigError, ShapeError
from scanl.layers import ComplexEMA, Mega, Megalodon
from scanl.models import Block
from tests.layers.ssm.equations import mega_ema, rotated


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


EQUATIONS = {
    "mega": (lambda: Mega(DIM, 4, 6, 3, max_length=24), mega),
    "mega_chunk_laplace_rotary": (lambda: Mega(DIM, 4, 6, 3, 3, activation="laplace", position_bias="rotary"), mega),
    "mega_relu2": (lambda: Mega(DIM, 5, None, 2, max_length=24, activation="relu2"), mega),
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
