"""RPE: its equation step by step, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, linear
from scanl.layers import RPE


def rpe(layer, xs):
    first, second = layer.widths
    H, r, rows = layer.num_heads, torch.zeros(second), []
    count = (first + 1) // 2
    for t, x in enumerate(xs):
        rnn = layer.rnn
        r = torch.tanh(rnn.weight_ih_l0 @ x[first:] + rnn.bias_ih_l0 + rnn.weight_hh_l0 @ r + rnn.bias_hh_l0)
        angles = [t / 10000 ** (i / count) for i in range(count)]
        place = torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles])[:first]
        parts = x[:first] + place, r
        heads = []
        for maps in (layer.q_proj, layer.k_proj, layer.v_proj):
            a, b = (linear(m, part) for m, part in zip(maps, parts, strict=True))
            heads.append(
                torch.cat([a, b]).view(H, -1)
                if layer.variant == "heads"
                else torch.stack([torch.cat(pair) for pair in zip(a.view(H, -1), b.view(H, -1), strict=True)])
            )
        rows.append(heads)
    ys = []
    for t in range(len(xs)):
        out = []
        for head in range(H):
            scores = [rows[t][0][head] @ rows[j][1][head] / math.sqrt(layer.head_dim) for j in range(t + 1)]
            weights = torch.exp(torch.stack(scores))
            out.append(sum(w * rows[j][2][head] for j, w in enumerate(weights / weights.sum())))
        ys.append(linear(layer.o_proj, torch.cat(out)))
    return ys


EQUATIONS = {
    "rpe": (lambda: RPE(DIM, 4, 4, max_length=24), rpe),
    "rpe_slices": (lambda: RPE(DIM, 2, 6, "slices", 24), rpe),
}

WRONG = [
    ("rpe", {"num_heads": 4, "width": 3}, "width is 3, expected a multiple of 2 below dim=8"),
    ("rpe", {"num_heads": 2, "width": 8}, "width is 8, expected a multiple of 4 below dim=8"),
    ("rpe", {"num_heads": 2, "width": 3, "variant": "slices"}, "width is 3, expected a multiple of 2 below dim=8"),
    ("rpe", {"variant": "rows"}, "unknown variant 'rows'"),
]


@pytest.mark.usefixtures("double")
def test_with_the_recurrence_alone_the_order_of_words_counts():
    """Of two words before, the network alone knows the order; without it and without sinusoids attention does not."""
    layer, x = RPE(DIM, 2, 4, max_length=24), torch.randn(1, 3, DIM)
    swapped = x[:, [1, 0, 2]]
    with torch.no_grad():
        for maps in (layer.q_proj, layer.k_proj, layer.v_proj):
            maps[0].weight.zero_()
        assert not torch.allclose(layer(x)[0][:, 2], layer(swapped)[0][:, 2])
        layer.rnn.weight_hh_l0.zero_()
        torch.testing.assert_close(layer(x)[0][:, 2], layer(swapped)[0][:, 2])
