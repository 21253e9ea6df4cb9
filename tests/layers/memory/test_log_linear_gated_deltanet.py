"""LogLinearGatedDeltaNet: its equation step by step, and what it refuses."""

import math

import torch

from by_hand import DIM, linear, rms, sigmoid, silu, softplus, unit
from scanl import layers
from tests.layers.memory.equations import projected


def log_linear_gated_deltanet(layer, xs):
    """A binary counter: what a level holds is added to the next one when its bit is carried."""
    H, G, K, V, L = layer.num_v_heads, layer.num_heads, layer.head_dim, layer.head_v_dim, layer.levels
    S = [[torch.zeros(K, V) for _ in range(L)] for _ in range(H)]
    ys = []
    for t, (x, (q, k, v)) in enumerate(zip(xs, projected(layer, xs, silu), strict=True)):
        beta, weights = sigmoid(linear(layer.b_proj, x)), linear(layer.l_proj, x).view(H, L)
        alpha = torch.exp(-layer.A_log.exp() * softplus(linear(layer.a_proj, x) + layer.dt_bias))
        read = []
        for h in range(H):
            query, key = (unit(part.view(G, K)[h // (H // G)]) for part in (q, k))
            if t > 0:  # what steps 0 to t - 1 left in the lower levels moves up to the first level that is free
                free = (t & -t).bit_length()
                S[h][free] = torch.stack(S[h][:free]).sum(0)
                S[h][:free] = [torch.zeros(K, V)] * free
            S[h] = [alpha[h] * (part - beta[h] * torch.outer(key, key @ part)) for part in S[h]]
            S[h][0] = S[h][0] + beta[h] * torch.outer(key, v.view(H, V)[h])
            o = sum(softplus(layer.L[h, n] * weights[h, n]) * S[h][n].T @ query for n in range(L))
            read.append(rms(o / math.sqrt(K)) * layer.o_norm.weight)
        y = torch.cat(read)
        ys.append(linear(layer.o_proj, y if layer.g_proj is None else y * silu(linear(layer.g_proj, x))))
    return ys


EQUATIONS = {
    "log_linear_gated_deltanet": (
        lambda: layers.build("log_linear_gated_deltanet", DIM, head_dim=3, num_heads=2, num_v_heads=4, max_length=16),
        log_linear_gated_deltanet,
    ),
    "log_linear_gated_deltanet_plain": (
        lambda: layers.build(
            "log_linear_gated_deltanet", DIM, num_heads=2, output_gate=False, conv_size=None, max_length=15
        ),
        log_linear_gated_deltanet,
    ),
}

WRONG = [("log_linear_gated_deltanet", {"max_length": 0}, "max_length is 0, expected at least 1")]
