"""Hyena: its equation step by step, how it starts, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, convolve
from scanl import layers
from scanl.layers import Hyena


def hyena(layer, xs, shift=0.0):
    """The filters lag by lag, from the formula of the position, and every convolution as a sum."""
    net, D, L, N = layer.filter_fn.implicit_filter, layer.dim, layer.max_length, layer.order
    rates = torch.linspace(math.log(0.01) / 1.5, math.log(0.01) / 0.3, D * (N - 1)).abs()
    filters = []
    for lag in range(L):
        h = layer.filter_fn.pos_emb.z[0, lag]
        for i in sorted(int(i) for i in net if int(i) % 2 == 0)[:-1]:
            h = torch.sin(net["1"].freq[0] * net[str(i)](h))
        h = list(net.values())[-1](h)
        filters.append(h * (torch.exp(-lag / (L - 1) * rates) + shift))
    filters = torch.stack(filters).view(L, D, N - 1)
    mixed = [
        torch.stack(parts)
        for parts in zip(
            *(m.split(D) for m in convolve([layer.in_proj(x) for x in xs], layer.short_filter)), strict=True
        )
    ]
    v = mixed[-1]
    for n in range(N - 1):
        v = v * mixed[N - 1 - n]
        bias = layer.filter_fn.bias.view(D, N - 1)[:, n]
        v = torch.stack([
            sum(filters[j, :, n] * v[t - j] for j in range(min(L, t + 1))) + bias * v[t] for t in range(len(xs))
        ])  # fmt: skip
    return [layer.out_proj(each) for each in v * mixed[0]]


EQUATIONS = {
    "hyena": (lambda: Hyena(DIM, 5, hidden_dim=6), hyena),
    "hyena_dna": (
        lambda: layers.build("hyena_dna", DIM, max_length=5, hidden_dim=6),
        lambda layer, xs: hyena(layer, xs, shift=0.05),
    ),
    "hyena_of_order_four": (lambda: Hyena(DIM, 40, 4, 6, emb_dim=7, depth=1, frequency=3.0), hyena),
}

WRONG = [
    ("hyena", {"order": 1}, "order is 1, expected at least 2"),
    ("hyena", {"emb_dim": 4}, "emb_dim is 4, expected an odd number of at least 3"),
    ("hyena", {"max_length": 0}, "max_length is 0, expected at least 1"),
    ("hyena", {"conv_size": 0}, "conv_size is 0, expected at least 1"),
]


@pytest.mark.usefixtures("double")
def test_init_of_hyena():
    layer = Hyena(2000, 64, emb_dim=7, frequency=14.0)
    filters, t = layer.filter_fn, torch.arange(64.0)
    assert_normal(filters.bias, 1.0)
    assert (filters.implicit_filter["1"].freq == 14).all()
    lag = filters.pos_emb.z.detach()[0]
    torch.testing.assert_close(lag[:, 0], t / 63)
    for i, band in enumerate([1e-4, 1.00005, 2.0]):
        torch.testing.assert_close(lag[:, 1 + i], torch.cos(2 * math.pi * band * t / 64))
        torch.testing.assert_close(lag[:, 4 + i], -torch.sin(2 * math.pi * band * t / 64))
    deltas = filters.modulation.deltas[0, 0].abs()
    torch.testing.assert_close(torch.exp(-deltas[[0, -1]] * torch.tensor([1.5, 0.3])), torch.full((2,), 0.01))


@pytest.mark.usefixtures("double")
def test_hyena_takes_the_state_of_the_released_code():
    """There one sine stands at three places of a sequence, and so do its frequencies."""
    layer, other = Hyena(DIM, 16), Hyena(DIM, 16)
    given = dict(layer.state_dict())
    given |= {f"filter_fn.implicit_filter.{place}.freq": given["filter_fn.implicit_filter.1.freq"] for place in (3, 5)}
    assert not any(other.load_state_dict(given, strict=True))
    x = torch.randn(1, 9, DIM)
    torch.testing.assert_close(other(x)[0], layer(x)[0])
