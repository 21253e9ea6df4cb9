"""RSA: its equation step by step, its two limits, how it starts, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, linear, sigmoid
from scanl.layers import RSA, Attention
from tests.layers.attention.equations import turned_pairs


def rsa(layer, xs):
    K, ys = layer.head_dim, []
    qs, ks = ([[turned_pairs(row, t, layer.rotated, layer.rope_base) for row in linear(m, x).view(-1, K)]
               for t, x in enumerate(xs)] for m in (layer.q_proj, layer.k_proj))  # fmt: skip
    vs = [linear(layer.v_proj, x).view(-1, K) for x in xs]
    for t in range(len(xs)):
        out = []
        for head, kind in enumerate(layer.kinds):
            seen = range(t + 1 if layer.causal else len(xs))
            weights = torch.exp(torch.stack([qs[t][head] @ ks[j][head] / math.sqrt(K) for j in seen]))
            share, rate, o = sigmoid(layer.mu[head]), layer.rate[head], torch.zeros(K)
            for j in seen:
                d = abs(t - j)
                if kind == "regular":
                    rem = torch.tanh(rate) ** d
                else:
                    rem = sigmoid(rate) ** d * getattr(torch, kind[:3])(d * layer.theta[head])
                o = o + ((1 - share) * weights[j] / weights.sum() + (share * rem if d else 0)) * vs[j][head]
            out.append(o)
        ys.append(linear(layer.o_proj, torch.cat(out)))
    return ys


EQUATIONS = {
    "rsa": (lambda: RSA(DIM, 4, max_length=24), rsa),
    "rsa_regular": (lambda: RSA(DIM, 2, max_length=24, variant="regular", rope_fraction=0.5), rsa),
    "rsa_cyclical": (lambda: RSA(DIM, 3, 2, 24, "cyclical", bias=True), rsa),
    "rsa_noncausal": (lambda: RSA(DIM, 4, max_length=24, causal=False), rsa),
}

WRONG = [
    ("rsa", {"variant": "dilated"}, "unknown variant 'dilated'"),
    ("rsa", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8 without head_dim"),
]


@pytest.mark.usefixtures("double")
def test_its_limits_are_attention_and_a_linear_rnn_without_the_present_step():
    layer, x = RSA(DIM, 2, max_length=24, variant="regular"), torch.randn(1, 6, DIM)
    with torch.no_grad():
        layer.mu.fill_(-60)
    plain = Attention(DIM, 2, max_length=24, rope_fraction=0.0)
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if "proj" in name})
    torch.testing.assert_close(layer(x)[0], plain(x)[0])
    with torch.no_grad():
        layer.mu.fill_(60)
    h, rates, ys = torch.zeros(2, DIM // 2), torch.tanh(layer.rate)[:, None], []
    for step in x[0]:
        ys.append(layer.o_proj((rates * h).flatten()))
        h = rates * h + layer.v_proj(step).view(2, -1)
    torch.testing.assert_close(layer(x)[0][0], torch.stack(ys))


def test_how_it_starts():
    layer = RSA(96, 48)
    assert_normal(layer.q_proj.weight, 96**-0.5)
    assert layer.mu.abs().max() <= 3
    size = layer.rate.abs()
    assert size.min() >= 1
    assert size.max() <= 2
    regular = torch.tensor([kind == "regular" for kind in layer.kinds])
    assert 0 < (layer.rate[regular] < 0).sum() < regular.sum()
    assert (layer.rate[~regular] > 0).all()
    torch.testing.assert_close(layer.theta, torch.full((48,), math.pi / 4))
    assert RSA(8, 2, variant="regular").theta is None
