"""GSA: its equation step by step, and what it refuses."""

import torch

from by_hand import DIM, linear, rms, sigmoid, silu
from scanl import layers
from tests.layers.memory.equations import slots


def gsa(layer, xs):
    H = layer.num_heads
    kept = [(sigmoid(linear(layer.f_proj, x)) ** (1 / layer.gate_logit_normalizer)).view(H, -1) for x in xs]

    def queries(t, x):
        return [silu(linear(project, x)).view(H, -1) for project in (layer.q_proj, layer.k_proj, layer.v_proj)]

    def read(x, o):
        return rms(silu(torch.cat(o)), layer.g_norm.eps) * layer.g_norm.weight

    return slots(layer, xs, kept, [1 - a for a in kept], queries, read)


EQUATIONS = {
    "gsa": (lambda: layers.build("gsa", DIM, num_heads=2, num_slots=3), gsa),
    "gsa_wide": (
        lambda: layers.build("gsa", DIM, num_heads=4, num_slots=5, expand_k=0.5, expand_v=2.0, gate_logit_normalizer=1),
        gsa,
    ),
}

WRONG = [
    ("gsa", {"num_heads": 3}, "expand_k is 1.0, expected dim=8 times it to be a multiple of num_heads=3"),
    ("gsa", {"num_slots": 0}, "num_slots is 0, expected at least 1"),
    ("gsa", {"gate_logit_normalizer": 0}, "gate_logit_normalizer is 0, expected more than 0"),
]
