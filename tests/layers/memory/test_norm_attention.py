"""NormAttention: its equation step by step, and what it refuses."""

import torch

from by_hand import DIM
from scanl import layers
from tests.layers.memory.equations import transnormer


def norm_attention(layer, xs):
    plus = layer.activation == "elu_plus_one"

    def phi(v):
        return torch.where(v > 0, v, v.exp() - 1) + plus

    def weight(pairs):
        return [placed(phi(q), t) @ placed(phi(k), s) for q, k, placed, t, s in pairs]

    return transnormer(layer, xs, len(xs), weight, True)


EQUATIONS = {
    "norm_attention": (lambda: layers.build("norm_attention", DIM, num_heads=2), norm_attention),
    "norm_attention_t2": (lambda: layers.build("norm_attention_t2", DIM, num_heads=1), norm_attention),
}

WRONG = [
    ("norm_attention", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8"),
    ("norm_attention", {"activation": "relu"}, "unknown activation 'relu'"),
]
