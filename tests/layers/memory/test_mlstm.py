"""MLSTM: its equation step by step, how it starts, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, linear, sigmoid, silu
from scanl import layers
from scanl.layers import state as states
from tests.layers.memory.equations import convolved

pytestmark = pytest.mark.cells_by_loop("name")


def mlstm(layer, xs):
    """The recurrence without a stabiliser; the 1e-6 of the released code is added to a denominator times e^-m."""
    H, cell = layer.num_heads, layer.mlstm_cell
    P = layer.width // H

    def headwise(module, v):
        return torch.block_diag(*module.weight) @ v + (0 if module.bias is None else module.bias)

    mixed = [linear(layer.proj_up, x).chunk(2) for x in xs]
    branches = convolved(layer.conv1d.conv, [u for u, _ in mixed])
    C, n, m, ys = torch.zeros(H, P, P), torch.zeros(H, P), torch.zeros(H), []
    for (u, z), conv in zip(mixed, branches, strict=True):
        q, k, v = headwise(layer.q_proj, conv), headwise(layer.k_proj, conv), headwise(layer.v_proj, u)
        gates = torch.cat([q, k, v])
        i, f = torch.exp(linear(cell.igate, gates)), sigmoid(linear(cell.fgate, gates))
        m = torch.maximum(f.log() + m, i.log())
        q, k, v = q.view(H, P), k.view(H, P) / math.sqrt(P), v.view(H, P)
        C = f[:, None, None] * C + i[:, None, None] * k[:, :, None] * v[:, None, :]
        n = f[:, None] * n + i[:, None] * k
        heads = []
        for h in range(H):
            o = C[h].T @ q[h] / (max(abs(n[h] @ q[h]), torch.ones(())) + 1e-6 * torch.exp(m[h]))
            heads.append((o - o.mean()) / torch.sqrt(o.var(correction=0) + 1e-5))
        y = torch.cat(heads) * (1 + cell.outnorm.weight) + layer.learnable_skip * conv
        ys.append(linear(layer.proj_down, y * silu(z)))
    return ys


EQUATIONS = {
    "mlstm": (lambda: layers.build("mlstm", DIM, num_heads=2, expand=1.5, multiple_of=4), mlstm),
    "mlstm_bias": (
        lambda: layers.build("mlstm", DIM, num_heads=4, multiple_of=8, block_size=2, bias=True, conv_size=2),
        mlstm,
    ),
}

WRONG = [
    ("mlstm", {"num_heads": 3}, "num_heads is 3, expected a divisor of 64 channels because of expand=2.0"),
    ("mlstm", {"block_size": 0}, "block_size is 0, expected at least 1"),
    ("mlstm", {"block_size": 3}, "block_size is 3, expected a divisor of 64 channels because of expand=2.0"),
    ("mlstm", {"expand": 0}, "expand is 0, expected more than 0"),
]


def test_init_of_mlstm():
    layer = layers.build("mlstm", 200)
    layer.enter_stack(0, [layer] * 3)
    assert layer.width == 448
    small = math.sqrt(2 / 1000)
    for project in (layer.proj_up, layer.q_proj, layer.k_proj, layer.v_proj):
        assert_normal(project.weight, small)
    assert_normal(layer.proj_down.weight, 2 / 3 / math.sqrt(200))
    assert not layer.mlstm_cell.igate.weight.any()
    assert not layer.mlstm_cell.fgate.weight.any()
    assert (layer.mlstm_cell.fgate.bias == torch.linspace(3, 6, 4)).all()
    assert (layer.learnable_skip == 1).all()
    assert not layer.mlstm_cell.outnorm.weight.any()
    wide = layers.build("mlstm", 2, num_heads=4000, multiple_of=4000)
    assert_normal(wide.mlstm_cell.igate.bias, 0.1)


def test_gates_of_mlstm_stay_in_range():
    """Input gates of e^±40 and forget gates of nearly 0 and nearly 1, in float32, as in float64."""
    torch.manual_seed(0)
    layer = layers.build("mlstm", DIM, num_heads=4, multiple_of=8)
    with torch.no_grad():
        layer.mlstm_cell.igate.weight.normal_(std=30)
        layer.mlstm_cell.fgate.weight.normal_(std=30)
    x = torch.randn(2, 300, DIM)
    y, state = layer(x)
    exact, _ = layer.double()(x.double())
    assert all(leaf.isfinite().all() for _, leaf in states.leaves(state))
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-3)
