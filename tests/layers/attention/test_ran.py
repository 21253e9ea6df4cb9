"""RAN: its equation step by step, what only it knows, how it starts, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, layer_norm, linear, shaken, sigmoid, silu
from scanl.layers import RAN
from scanl.layers import state as states
from tests.layers.attention.equations import turned_pairs


def glu(first, gate, v):
    return linear(first, v) * sigmoid(linear(gate, v))


def perceived(layer, rows, query):
    """The result of one row of H = LN([g; x]), which attends to all of rows."""
    K, out = layer.head_dim, []
    turned = layer.head_dim // 2 * 2

    def heads(module, place, row):
        return [
            head if place is None else turned_pairs(head, place, turned, layer.rope_base)
            for head in silu(linear(module, row)).split(K)
        ]

    for head in range(layer.num_heads):
        q = heads(layer.q_proj, query, rows[query])[head]
        scores = [q @ heads(layer.k_proj, j, row)[head] / math.sqrt(K) for j, row in enumerate(rows)]
        weights = torch.exp(torch.stack(scores))
        values = [heads(layer.v_proj, None, row)[head] for row in rows]
        out.append(sum(w * value for w, value in zip(weights / weights.sum(), values, strict=True)))
    o = silu(linear(layer.o_proj, torch.cat(out))) + glu(layer.glu, layer.glu_gate, rows[query])
    o = layer_norm(o, layer.attn_norm)
    return (o - o.mean()) / torch.sqrt((o**2).mean() + 1e-7)


def ran(layer, xs):
    cell, last, ys, results, W = layer.cell_0, None, [], [], layer.reach
    for start in range(0, len(xs), W):
        rows = [layer_norm(row, layer.norm) for row in (cell, *xs[start : start + W])]
        ys += [perceived(layer, rows[: t + 1] if layer.causal else rows, t) for t in range(1, len(rows))]
        result = perceived(layer, rows, 0)
        results.append(result)
        cell = result
        if last is not None:
            cell = layer_norm(result + glu(layer.cell_glu, layer.cell_gate, last), layer.cell_norm)
        last = result
    return [layer_norm(y, layer.out_norm) if layer.causal else reviewed(layer, y, results) for y in ys]


def reviewed(layer, y, results):
    """An output that attends to the results of all windows."""
    to_q, to_k, to_v, to_o, first, gate = layer.review
    q = silu(linear(to_q, y))
    weights = torch.exp(torch.stack([q @ silu(linear(to_k, result)) for result in results]) / math.sqrt(layer.dim))
    o = sum(w * silu(linear(to_v, result)) for w, result in zip(weights / weights.sum(), results, strict=True))
    return layer_norm(silu(linear(to_o, o)) + glu(first, gate, q), layer.out_norm)


EQUATIONS = {
    "ran": (lambda: RAN(DIM, 2, window=2), ran),
    "ran_wide": (lambda: RAN(DIM, 3, 3, 3, 100.0), ran),
    "ran_one": (lambda: RAN(DIM, 1, window=1), ran),
    "ran_noncausal": (lambda: RAN(DIM, 2, window=2, causal=False), ran),
    "ran_noncausal_wide": (lambda: RAN(DIM, 3, 3, 5, causal=False), ran),
}

WRONG = [
    ("ran", {"window": 0}, "window is 0, expected at least 1"),
    ("ran", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8 without head_dim"),
]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("causal", [True, False])
def test_rows_at_different_steps_of_their_windows(causal):
    """They give what each gives alone."""
    layer, x = shaken(RAN(DIM, 2, window=3, causal=causal)), torch.randn(2, 5, DIM)
    started = [layer(torch.randn(1, steps, DIM))[1] for steps in (1, 6)]
    y, last = layer(x, states.cat(started))
    for row, state in enumerate(started):
        alone, after = layer(x[row : row + 1], state)
        torch.testing.assert_close(y[row : row + 1], alone)
        torch.testing.assert_close(states.index(last, [row]), after)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_are_the_derivatives_and_reach_every_parameter(causal):
    """Over four windows, the last not full, since the law's sequence has two."""
    layer, x = shaken(RAN(DIM, 2, window=2, causal=causal)), torch.randn(1, 7, DIM, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))[0]

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)
    gradients = torch.autograd.grad(layer(x)[0].square().sum(), parameters)
    assert all(gradient.any() for gradient in gradients)


def test_how_it_starts():
    layer = RAN(96)
    for linear_map in layer._maps():
        assert_normal(linear_map.weight, 0.02 * 0.8796)  # cut off at two deviations
        assert linear_map.weight.abs().max() <= 0.04
        assert not linear_map.bias.any()
    assert not layer.cell_0.any()
