"""LogLinearMamba2: its equation step by step, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, linear, rms, silu, softplus
from scanl import layers
from tests.layers.memory.equations import convolved

pytestmark = pytest.mark.cells_by_loop("name")


def level_of(t, s):
    """0 for the step itself; otherwise one more than the highest bit in which two positions differ."""
    return (t ^ s).bit_length()


def log_linear_mamba2(layer, xs):
    """The sum over all pairs of steps, with the level of each pair written out."""
    H, G, N, P, L = layer.num_heads, layer.num_groups, layer.state_dim, layer.head_dim, layer.levels
    mixed = [linear(layer.in_proj, x).split([H * P, H * P + 2 * G * N, H, H * L]) for x in xs]
    branches = [u.split(layer.widths) for u in convolved(layer.conv1d, [u for _, u, _, _ in mixed])]
    deltas = [softplus(dt + layer.dt_bias) for _, _, dt, _ in mixed]
    ys = []
    for t, (z, _, _, weights) in enumerate(mixed):
        read = []
        for h in range(H):
            g = h // (H // G)
            y = layer.D[h] * branches[t][0].view(H, P)[h]
            for s in range(t + 1):
                level = level_of(t, s)
                weight = softplus(layer.L[h, level] * weights.view(H, L)[h, level])
                decay = math.prod(torch.exp(-layer.A_log[h].exp() * deltas[r][h]) for r in range(s + 1, t + 1))
                score = branches[t][2].view(G, N)[g] @ branches[s][1].view(G, N)[g]
                y = y + weight * decay * score * deltas[s][h] * branches[s][0].view(H, P)[h]
            read.append(y)
        gated = torch.cat(read) * silu(z)
        y = torch.cat([rms(part) for part in gated.chunk(G)]) * layer.norm.weight
        ys.append(linear(layer.out_proj, y))
    return ys


EQUATIONS = {
    "log_linear_mamba2": (
        lambda: layers.build("log_linear_mamba2", DIM, state_dim=3, head_dim=4, num_groups=2, max_length=16),
        log_linear_mamba2,
    )
}

WRONG = [("log_linear_mamba2", {"max_length": 0}, "max_length is 0, expected at least 1")]


@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_levels_keep_what_is_not_finite_out_of_earlier_steps(fault):
    layer = layers.build("log_linear_mamba2", DIM, state_dim=3, head_dim=4, max_length=300)
    x = torch.randn(2, 200, DIM)
    clean = layer(x)[0]
    x[1, 150, 2] = fault
    y = layer(x)[0]
    torch.testing.assert_close(y[0], clean[0])
    torch.testing.assert_close(y[1, :150], clean[1, :150])
    assert not y[1, 150].isfinite().any()
