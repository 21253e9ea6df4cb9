"""ForgettingAttention: its equation step by step, how it starts, what only it knows, and what it refuses."""

import math

import torch

from by_hand import DIM, T, assert_normal
from scanl.layers.attention.forgetting_attention import ForgettingAttention


def forgetting_attention(layer, xs):
    H, ys = layer.num_heads, []

    def normed(norm, v):
        v = v.view(H, -1)
        return v if norm is None else v / torch.sqrt((v**2).mean(-1, keepdim=True) + 1e-5) * norm.weight.view(H, -1)

    qs = [normed(layer.q_norm, layer.q_proj(x)) for x in xs]
    ks = [normed(layer.k_norm, layer.k_proj(x)) for x in xs]
    vs, fs = [layer.v_proj(x).view(H, -1) for x in xs], [1 / (1 + torch.exp(-layer.f_proj(x))) for x in xs]
    for t, x in enumerate(xs):
        out = []
        for h in range(H):
            weights = [
                torch.exp(qs[t][h] @ ks[j][h] / math.sqrt(layer.head_dim)) * math.prod(f[h] for f in fs[j + 1 : t + 1])
                for j in range(t + 1)
            ]
            out.append(sum(w * vs[j][h] for j, w in enumerate(weights)) / sum(weights))
        y = torch.cat(out)
        ys.append(layer.o_proj(y if layer.g_proj is None else y / (1 + torch.exp(-layer.g_proj(x)))))
    return ys


EQUATIONS = {
    "forgetting_attention": (lambda: ForgettingAttention(DIM, 2, max_length=T), forgetting_attention),
    "forgetting_attention_gated": (
        lambda: ForgettingAttention(DIM, 4, max_length=64, qk_norm=True, output_gate=True),
        forgetting_attention,
    ),
}

WRONG = [
    ("forgetting_attention", {"max_length": 0}, "max_length is 0, expected at least 1"),
    ("forgetting_attention", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8"),
]


def test_init_of_forgetting_attention():
    layer = ForgettingAttention(256, qk_norm=True, output_gate=True)
    for linear in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj, layer.f_proj, layer.g_proj):
        assert_normal(linear.weight, 0.02)
    assert not layer.f_proj.bias.any()
    assert (layer.q_norm.weight == 1).all()


def test_forgetting_attention_of_a_long_sequence_in_pieces():
    """What a head has forgotten is a sum over thousands of steps; each piece starts from it."""
    layer, x = ForgettingAttention(DIM, 2, max_length=3000), torch.randn(1, 3000, DIM)
    torch.nn.init.normal_(layer.f_proj.weight, std=3.0)
    exact, _ = layer.double()(x.double())
    state, layer = None, layer.float()
    for start in range(0, 3000, 500):
        y, state = layer(x[:, start : start + 500], state)
        torch.testing.assert_close(y.double(), exact[:, start : start + 500], rtol=0, atol=1e-5)
