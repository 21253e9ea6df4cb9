"""Mamba3: its equation step by step, how it starts, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, linear, rms, shaken, sigmoid, silu, softplus
from scanl import layers
from tests.layers.memory.equations import assert_time_steps, undecayed

pytestmark = pytest.mark.cells_by_loop("name")


def mamba3(layer, xs):
    H, N, P, R, A = layer.num_heads, layer.state_dim, layer.head_dim, layer.rank, layer.pairs
    S, angle = torch.zeros(H, N, P), torch.zeros(H, A)
    before_k, before_x = torch.zeros(H, R, N), torch.zeros(H, R, P)
    ys = []

    def turned(v, h):
        v = v.clone()
        for j in range(A):
            m, n = (2 * j, 2 * j + 1) if R == 1 else (j, j + N // 2)
            a, b, by = v[m].clone(), v[n].clone(), angle[h, j]
            v[m], v[n] = a * by.cos() - b * by.sin(), a * by.sin() + b * by.cos()
        return v

    for x in xs:
        z, u, B, C, dt, a, trapezoid, turn = linear(layer.in_proj, x).split(layer.widths)
        dt, lam = softplus(dt + layer.dt_bias), sigmoid(trapezoid)
        alpha = torch.exp(-dt * softplus(a).clamp(min=layer.A_floor))
        angle = angle + torch.outer(dt, math.pi * torch.tanh(turn))
        z, u = z.view(H, P), u.view(H, P)
        B, C = (part.view(R, layer.num_groups, N) for part in (B, C))
        read, keys, inputs, memories = [], [], [], []
        for h in range(H):
            g = h // (H // layer.num_groups)
            k = [turned(rms(B[r, g]) * layer.B_norm.weight + layer.B_bias[h, r], h) for r in range(R)]
            q = [turned(rms(C[r, g]) * layer.C_norm.weight + layer.C_bias[h, r], h) for r in range(R)]
            ins = [u[h] if R == 1 else u[h] * layer.mimo_x[h, r] for r in range(R)]
            now = alpha[h] * S[h]
            for r in range(R):
                now = now + (1 - lam[h]) * dt[h] * alpha[h] * torch.outer(before_k[h, r], before_x[h, r])
                now = now + lam[h] * dt[h] * torch.outer(k[r], ins[r])
            y = torch.zeros(P)
            for r in range(R):
                o, gate = now.T @ q[r] + layer.D[h] * ins[r], z[h] if R == 1 else z[h] * layer.mimo_z[h, r]
                if layer.norm is not None:
                    o = rms(o) * layer.norm.weight.view(H, P)[h]
                y = y + (1 if R == 1 else layer.mimo_o[h, r]) * o * silu(gate)
            read.append(y)
            keys.append(torch.stack(k))
            inputs.append(torch.stack(ins))
            memories.append(now)
        S, before_k, before_x = torch.stack(memories), torch.stack(keys), torch.stack(inputs)
        ys.append(linear(layer.out_proj, torch.cat(read)))
    return ys


EQUATIONS = {
    "mamba3": (lambda: layers.build("mamba3", DIM, state_dim=8, head_dim=4, num_groups=2), mamba3),
    "mamba3_normed": (
        lambda: layers.build("mamba3", DIM, state_dim=6, head_dim=8, rope_fraction=1.0, output_norm=True, A_floor=0.5),
        mamba3,
    ),
    "mamba3_mimo": (lambda: layers.build("mamba3_mimo", DIM, state_dim=8, head_dim=8, rank=3), mamba3),
    "mamba3_mimo_normed": (
        lambda: layers.build("mamba3_mimo", DIM, state_dim=4, head_dim=4, num_groups=2, rank=2, output_norm=True),
        mamba3,
    ),
}

WRONG = [
    ("mamba3", {"head_dim": 5}, r"head_dim is 5, expected a divisor of expand \* dim, with expand=2 and dim=8"),
    (
        "mamba3",
        {"head_dim": 4, "num_groups": 3},
        r"num_groups is 3, expected a divisor of expand \* dim / head_dim, with",
    ),
    ("mamba3", {"rank": 0}, "rank is 0, expected at least 1"),
    ("mamba3", {"head_dim": 4, "rope_fraction": 0.3}, "rope_fraction is 0.3, expected 0.5 or 1"),
    ("mamba3", {"head_dim": 4, "state_dim": 2}, "state_dim is 2, expected at least 2 / rope_fraction=4"),
]


def test_init_of_mamba3():
    layer = layers.build("mamba3_mimo", 64, head_dim=32)
    assert layer.in_proj.weight.shape == (4 * 64 + 2 * 4 * 128 + 3 * 4 + 32, 64)
    assert all((part == 1).all() for part in (layer.B_bias, layer.C_bias, layer.D, layer.mimo_z, layer.B_norm.weight))
    assert layer.B_bias.shape == (4, 4, 128)
    assert (torch.cat([layer.mimo_x, layer.mimo_o]) == 1 / 4).all()
    assert {"dt_bias", "D"} <= undecayed(layer)
    assert_time_steps(layers.build("mamba3", 4, expand=2000, state_dim=4, head_dim=1).dt_bias)


@pytest.mark.usefixtures("double")
def test_mamba3_turned_by_a_half_at_each_one_tracks_parity():
    """A rotation by π wherever the input is 1 turns the state's sign, and a step of 0 keeps it."""
    layer = layers.build("mamba3", 2, state_dim=4, head_dim=4, expand=2, rope_fraction=1.0)
    torch.nn.init.zeros_(layer.in_proj.weight)
    *_, a, trapezoid, turn = layer.in_proj.weight.split(layer.widths)
    with torch.no_grad():
        layer.dt_bias.fill_(math.log(math.e - 1))  # Δ = 1
        turn[:, 0], turn[:, 1] = 1e3, 0.0  # x is (bit, 1)
        a[:, 1] = -1e3
        trapezoid[:, 1] = 1e3
    bits = torch.tensor([1.0, 0, 1, 1, 0, 1, 1, 1])
    _, state = layer(torch.stack([bits, torch.ones(8)], -1)[None])
    half_turns = (state.angle / math.pi).round() % 2
    assert (half_turns == bits.sum() % 2).all()


@pytest.mark.usefixtures("double")
def test_mamba3_mimo_in_pieces_of_time_is_the_whole():
    """A packed sequence is not cut; a row of a batch is. Values, states, and all gradients, the second one too."""
    layer = shaken(layers.build("mamba3_mimo", DIM, state_dim=8, head_dim=4, expand=2, rank=2))
    x = torch.randn(1, 150, DIM, requires_grad=True)
    results = []
    for more in ({}, {"cu_seqlens": torch.tensor([0, 150])}):
        y, state = layer(x, **more)
        leaves = [x, *layer.parameters()]
        grads = torch.autograd.grad(y.square().sum() + state.ssm.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(grads[0].square().sum(), x)
        results.append([y, *state, *grads, *second])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)


def test_pieces_of_mamba3_mimo_whose_products_are_large_are_computed_again_as_they_were():
    """A layer multiplies large matrices by another program, which saves other tensors for the backward pass."""
    layer, x = layers.build("mamba3_mimo", 64), torch.randn(16, 65, 64)
    y, _ = layer(x)
    y.sum().backward()
    assert all(weight.grad.isfinite().all() for weight in layer.parameters())
