"""Megalodon: its equation step by step, and how it starts."""

import math

import torch

from by_hand import DIM, assert_normal, linear, rms, silu
from scanl.layers import Mega, Megalodon
from tests.layers.ssm.equations import cema, rotated


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
    "megalodon": (lambda: Megalodon(DIM, 4, 6, 2, 3, 3, 4), megalodon),
    "megalodon_of_one_chunk": (lambda: Megalodon(DIM, 6, None, 1, 3, 24), megalodon),
}


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
