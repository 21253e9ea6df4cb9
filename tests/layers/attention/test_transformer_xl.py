"""TransformerXL: its equation step by step, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal
from scanl import layers
from scanl.errors import ShapeError


def code(distance, dim):
    angles = [distance * 10000 ** (-2 * i / dim) for i in range(dim // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


def transformer_xl(layer, xs):
    """Over lists: which steps each step sees, and the four terms of each score."""
    H, K, S, M = layer.num_heads, layer.head_dim, layer.chunk_size, layer.window
    ys = []
    for t, x in enumerate(xs):
        first = {"bounded": t - t % S - M, "same_length": t - M + 1, "growing": 0}[layer.variant]
        visible, out = range(max(0, first), t + 1), []
        for head in range(H):
            rows = slice(head * K, (head + 1) * K)
            q, scores = layer.q_proj.weight[rows] @ x, []
            for j in visible:
                distance = t - j if layer.clamp is None else min(t - j, layer.clamp)
                r, k = layer.r_proj.weight[rows] @ code(distance, DIM), layer.k_proj.weight[rows] @ xs[j]
                scores.append((q @ k + q @ r + layer.u[head] @ k + layer.v[head] @ r) / math.sqrt(K))
            weights = torch.stack(scores).exp()
            weights = weights / weights.sum()
            out.append(sum(w * (layer.v_proj.weight[rows] @ xs[j]) for w, j in zip(weights, visible, strict=True)))
        ys.append(layer.o_proj.weight @ torch.cat(out))
    return ys


def make(**more):
    return layers.build("transformer_xl", DIM, num_heads=2, **{"window": 3, "chunk_size": 2} | more)


EQUATIONS = {
    "transformer_xl": (make, transformer_xl),
    "transformer_xl_longer_segment": (lambda: make(chunk_size=5, window=2, clamp=3), transformer_xl),
    "transformer_xl_same_length": (lambda: make(variant="same_length", head_dim=3), transformer_xl),
    "transformer_xl_growing": (lambda: make(variant="growing", max_length=20), transformer_xl),
}

WRONG = [
    ("transformer_xl", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8 without head_dim"),
    ("transformer_xl", {"variant": "long"}, "unknown variant 'long'"),
    ("transformer_xl", {"clamp": -1}, "clamp is -1, expected at least 0"),
]


def test_initial_values_are_the_authors():
    layer = layers.build("transformer_xl", 64, num_heads=4)
    for weight in layer.parameters():
        assert_normal(weight, 0.02)


@pytest.mark.usefixtures("double")
def test_the_gradient_stops_where_the_segment_begins():
    """That of the inputs; the projections of the memory have a gradient."""
    layer, x = make(window=4), torch.randn(1, 6, DIM, requires_grad=True)
    y, _ = layer(x)
    for t in range(6):
        (grad,) = torch.autograd.grad(y[:, t].sum(), x, retain_graph=True)
        assert grad[0].any(1).tolist() == [t - t % 2 <= j <= t for j in range(6)]
    # Weights whose gradient comes from the memory alone: step 2 begins a segment, and sees steps 0 and 1.
    alone = torch.cat([torch.zeros(1, 2, DIM), x[:, 2:3].detach()], 1)
    slopes = [torch.autograd.grad(layer(each)[0][:, 2].sum(), layer.v_proj.weight)[0] for each in (x[:, :3], alone)]
    assert not torch.allclose(*slopes)


@pytest.mark.usefixtures("double")
def test_gradients_within_a_segment_are_the_derivatives():
    """The laws of derivatives, over one segment behind a memory."""
    layer, x = make(chunk_size=4, window=2), torch.randn(2, 4, DIM, requires_grad=True)
    _, memory = layer(torch.randn(2, 4, DIM))
    assert torch.autograd.gradcheck(lambda x: layer(x, memory)[0], (x,), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x, memory)[0], (x,), fast_mode=True)


@pytest.mark.usefixtures("double")
def test_same_length_does_not_depend_on_segments():
    x, ys = torch.randn(2, 11, DIM), []
    for size in (1, 4, 20):
        torch.manual_seed(0)
        ys.append(make(variant="same_length", window=5, chunk_size=size)(x)[0])
    torch.testing.assert_close(ys[0], ys[1])
    torch.testing.assert_close(ys[0], ys[2])


def test_a_growing_memory_has_an_end():
    layer = make(variant="growing", max_length=5)
    _, state = layer(torch.zeros(1, 4, DIM))
    with pytest.raises(
        ShapeError, match="transformer_xl: x makes a sequence of 6 steps, expected at most max_length=5"
    ):
        layer(torch.zeros(1, 2, DIM), state)
