"""DiagAttention: its equation step by step, and what it refuses."""

import math

import torch
from torch.nn import functional as F

from by_hand import DIM
from scanl import layers
from tests.layers.memory.equations import transnormer


def diag_attention(layer, xs):
    def weight(pairs):
        scores = torch.stack([placed(q, t) @ placed(k, s) / math.sqrt(len(q)) for q, k, placed, t, s in pairs])
        return torch.exp(scores) / torch.exp(scores).sum() if layer.softmax else F.relu(scores)

    return transnormer(layer, xs, layer.window, weight, not layer.softmax)


EQUATIONS = {
    "diag_attention": (lambda: layers.build("diag_attention", DIM, num_heads=2, window=3), diag_attention),
    "diag_attention_whole": (lambda: layers.build("diag_attention", DIM, num_heads=4, softmax=True), diag_attention),
    "diag_attention_t2": (lambda: layers.build("diag_attention_t2", DIM, num_heads=2, window=2), diag_attention),
}

WRONG = [
    ("diag_attention", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8"),
    ("diag_attention", {"window": 0}, "window is 0, expected at least 1"),
]
