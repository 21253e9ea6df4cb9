"""CompressiveTransformer: its equation step by step, its loss, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM
from scanl import layers
from scanl.layers import auxiliary
from tests.layers.attention.test_transformer_xl import code

NAME = "compressive_transformer"


def compressed(layer, xs):
    """One row for `pool` inputs."""
    rows = []
    for i in range(0, len(xs), layer.pool):
        group = torch.stack(xs[i : i + layer.pool])
        if layer.pooling == "conv":
            rows.append(sum(layer.compress.weight[:, :, j] @ x for j, x in enumerate(group)) + layer.compress.bias)
        else:
            rows.append(group.mean(0) if layer.pooling == "mean" else group.max(0).values)
    return rows


def compressive_transformer(layer, xs):
    """Over lists: the rows that each step sees, in the order of the keys."""
    K, S, ys = layer.head_dim, layer.chunk_size, []
    for t, x in enumerate(xs):
        start = t - t % S
        memory = max(0, start - layer.window)
        slots = compressed(layer, xs[:memory])[-layer.num_slots :] if layer.num_slots else []
        rows, out = [*slots, *xs[memory : t + 1]], []
        for head in range(layer.num_heads):
            of = slice(head * K, (head + 1) * K)
            q, scores = layer.q_proj.weight[of] @ x, []
            for index, row in enumerate(rows):
                distance = len(rows) - 1 - index
                distance = distance if layer.clamp is None else min(distance, layer.clamp)
                r, k = layer.r_proj.weight[of] @ code(distance, DIM), layer.k_proj.weight[of] @ row
                scores.append(((q + layer.u[head]) @ k + (q + layer.v[head]) @ r) / math.sqrt(K))
            weights = torch.stack(scores).exp()
            weights = weights / weights.sum()
            out.append(sum(w * (layer.v_proj.weight[of] @ row) for w, row in zip(weights, rows, strict=True)))
        ys.append(layer.o_proj.weight @ torch.cat(out))
    return ys


def make(**more):
    return layers.build(NAME, DIM, num_heads=2, **{"window": 2, "chunk_size": 2, "num_slots": 2, "pool": 2} | more)


EQUATIONS = {
    NAME: (make, compressive_transformer),
    f"{NAME}_mean": (lambda: make(pooling="mean", chunk_size=1, pool=1, clamp=4), compressive_transformer),
    f"{NAME}_max": (lambda: make(pooling="max", window=4, num_slots=5, head_dim=3), compressive_transformer),
}

WRONG = [
    (NAME, {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8 without head_dim"),
    (NAME, {"num_heads": 2, "window": 3, "chunk_size": 2}, "window is 3, expected a multiple of chunk_size=2"),
    (NAME, {"num_heads": 2, "window": 4, "chunk_size": 4, "pool": 3}, "pool is 3, expected a divisor of chunk_size=4"),
    (NAME, {"pooling": "min"}, "unknown pooling 'min'"),
]


@pytest.mark.usefixtures("double")
def test_without_compressed_rows_it_is_transformer_xl():
    layer, plain = make(num_slots=0), layers.build("transformer_xl", DIM, num_heads=2, window=2, chunk_size=2)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 9, DIM)
    torch.testing.assert_close(layer(x)[0], plain(x)[0])


@pytest.mark.usefixtures("double")
def test_the_loss_trains_the_compression_and_nothing_else():
    """Its value is that of the equation, and a call in pieces collects the same as the whole."""
    layer, x = make(), torch.randn(2, 9, DIM, requires_grad=True)
    with auxiliary.collect() as losses:
        y, _ = layer(x)
    loss = losses.by_name()["reconstruction"]
    assert losses.total() == loss
    grads = torch.autograd.grad(loss, [x, *layer.parameters()], allow_unused=True, retain_graph=True)
    named = dict(zip(["x", *(name for name, _ in layer.named_parameters())], grads, strict=True))
    assert {name for name, grad in named.items() if grad is not None} == {"compress.weight", "compress.bias"}
    assert all(named[name].any() for name in ("compress.weight", "compress.bias"))
    y.square().sum().backward()
    assert layer.compress.weight.grad is None

    def attention(h, rows):
        q, k, v = (
            project(part).unflatten(-1, (2, 4)).transpose(0, 1)
            for project, part in ((layer.q_proj, h), (layer.k_proj, rows), (layer.v_proj, rows))
        )
        return (q @ k.mT / 2).softmax(-1) @ v

    norms = [  # segments of steps 2 and 3, 4 and 5, 6 and 7; the rows that leave after each
        (attention(row[end - 2 : end], row[end - 4 : end - 2]) - attention(row[end - 2 : end], new)).norm()
        for row in x
        for end in (4, 6, 8)
        for new in [torch.stack(compressed(layer, list(row[end - 4 : end - 2])))]
    ]
    torch.testing.assert_close(loss, torch.stack(norms).mean())
    state = None
    with auxiliary.collect() as losses:
        for piece in x.split([3, 2, 4], 1):
            _, state = layer(piece, state)
    torch.testing.assert_close(losses.total(), loss)


@pytest.mark.usefixtures("double")
def test_rows_at_different_steps_collect_the_mean_over_their_segments():
    layer, x = make(), torch.randn(2, 5, DIM)
    states = [layer(torch.randn(1, n, DIM))[1] for n in (4, 7)]
    alone = []
    for row, state in zip(x[:, None], states, strict=True):
        with auxiliary.collect() as losses:
            layer(row, state)
        alone.append(losses.total())
    with auxiliary.collect() as losses:
        layer(x, type(states[0])(*(torch.cat(leaves) for leaves in zip(*states, strict=True))))
    torch.testing.assert_close(losses.total(), (2 * alone[0] + 3 * alone[1]) / 5)


def test_nothing_is_collected_without_a_trained_compression():
    for options in ({"pooling": "mean"}, {"num_slots": 0}):
        with auxiliary.collect() as losses:
            make(**options)(torch.zeros(1, 9, DIM))
        assert losses.total() == 0
    assert auxiliary.collecting() is None
