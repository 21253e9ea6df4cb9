"""RetNet: its equation step by step, how it starts, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, T, assert_uniform, linear, rms, silu
from scanl import layers

pytestmark = pytest.mark.cells_by_loop("name")


def retnet(layer, xs):
    H, K = layer.num_heads, layer.key_dim
    theta = 1 / 10000 ** torch.linspace(0, 1, K // 2)
    S, ys = [0] * H, []
    for t, x in enumerate(xs):
        q, k, v = (linear(project, x).view(H, -1) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
        read = []
        for h in range(H):
            turned = [torch.view_as_complex(z[h].view(-1, 2)) * torch.exp(1j * theta * t) for z in (q, k)]
            q_h, k_h = (torch.view_as_real(z).flatten() for z in turned)
            S[h] = (1 - 2 ** (-5 - h)) * S[h] + torch.outer(k_h / math.sqrt(K), v[h])
            read.append(rms(S[h].T @ q_h, 1e-6))
        ys.append(linear(layer.out_proj, silu(linear(layer.g_proj, x)) * torch.cat(read)))
    return ys


EQUATIONS = {
    "retnet": (lambda: layers.build("retnet", DIM, num_heads=2), retnet),
    "retnet_narrow": (lambda: layers.build("retnet", DIM, num_heads=4, expand_v=1.5), retnet),
}

WRONG = [
    ("retnet", {"num_heads": 8}, "num_heads is 8, expected a divisor of dim/2=4"),
    ("retnet", {"num_heads": 2, "expand_v": 0.625}, "expand_v is 0.625, expected dim=8 times it to be a multiple of"),
]


def test_init_of_retnet():
    layer = layers.build("retnet", 256)
    for project in (layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj):
        limit = 2**-2.5 * math.sqrt(6 / sum(project.weight.shape))
        assert_uniform(project.weight, -limit, limit)
    limit = 2**-1 * math.sqrt(6 / (256 + 512))
    assert_uniform(layer.out_proj.weight, -limit, limit)


@pytest.mark.usefixtures("double")
def test_retention_does_not_care_where_it_starts():
    """Only differences of positions count, a million steps on as well."""
    layer, x = layers.build("retnet", DIM, num_heads=2), torch.randn(1, T, DIM)
    late = layer.init_state(1)._replace(steps=torch.tensor([[1_000_000]]))
    torch.testing.assert_close(layer(x, late)[0], layer(x)[0], rtol=1e-7, atol=1e-8)
    assert layer(x, late)[1].steps.item() == 1_000_000 + T
