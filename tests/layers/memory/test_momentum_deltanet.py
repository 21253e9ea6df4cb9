"""MomentumDeltaNet: its equation step by step, how it starts, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform, linear, rms, sigmoid, silu, softplus, unit
from scanl import layers
from tests.layers.memory.equations import assert_time_steps, projected, undecayed

pytestmark = pytest.mark.cells_by_loop("name")


def momentum_deltanet(layer, xs):
    H, K, V = layer.num_heads, layer.head_dim, layer.head_v_dim
    S, M, ys = torch.zeros(H, K, V), torch.zeros(H, K, V), []
    for x, (q, k, v) in zip(xs, projected(layer, xs, silu), strict=True):
        q, k, v = q.view(H, K), k.view(H, K), v.view(H, V)
        eta = 1 + torch.tanh(linear(layer.e_proj, x) / math.sqrt(layer.dim))
        theta = torch.atan(eta * torch.exp(layer.log_factor))
        beta = torch.sin(theta) ** 2 * sigmoid(linear(layer.b_proj, x))
        decay = torch.exp(-layer.A_log.exp() * softplus(linear(layer.a_proj, x) + layer.dt_bias))
        alpha = torch.cos(theta) ** 2 * decay
        mu = torch.exp(-layer.Mu_log.exp() * softplus(linear(layer.m_proj, x) + layer.mu_bias))
        mu = mu.clamp(min=math.exp(layer.min_log_mu))
        read, memories, momenta = [], [], []
        for h in range(H):
            query, key = unit(q[h] - layer.D_log[h].exp() * k[h]), unit(k[h])
            momenta.append(mu[h] * M[h] + eta[h] * torch.outer(key, v[h] - alpha[h] * S[h].T @ key))
            memories.append(alpha[h] * S[h] + beta[h] * momenta[h])
            read.append(rms(memories[h].T @ query / math.sqrt(K)) * layer.o_norm.weight)
        S, M, y = torch.stack(memories), torch.stack(momenta), torch.cat(read)
        y = y if layer.g_proj is None else y * silu(linear(layer.g_proj, x))
        ys.append(linear(layer.o_proj, y))
    return ys


EQUATIONS = {
    "momentum_deltanet": (lambda: layers.build("momentum_deltanet", DIM, head_dim=3, num_heads=2), momentum_deltanet),
    "momentum_deltanet_plain": (
        lambda: layers.build(
            "momentum_deltanet", DIM, expand_v=1.0, num_heads=2, output_gate=False, conv_size=None, min_log_mu=-0.1
        ),
        momentum_deltanet,
    ),
}

WRONG = [("momentum_deltanet", {"head_dim": 0}, "head_dim is 0, expected at least 1")]


def test_init_of_momentum_deltanet():
    layer = layers.build("momentum_deltanet", 64, head_dim=2, num_heads=4000)
    for name, high in (("A_log", 16), ("Mu_log", 16), ("log_factor", 4), ("D_log", 1)):
        assert_uniform(getattr(layer, name).exp(), 0, high)
    assert_time_steps(layer.dt_bias)
    assert torch.equal(layer.mu_bias, layer.dt_bias)
    assert layer.min_log_mu == -2
    assert_normal(layer.e_proj.weight, 0.02)
    assert_normal(layer.m_proj.weight, 0.02)
    assert {"A_log", "Mu_log", "log_factor", "D_log", "dt_bias", "mu_bias"} <= undecayed(layer)
