"""MesaNet: its equation step by step, how it starts, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, assert_normal, linear, rms, sigmoid, silu, softplus, unit
from scanl import layers
from scanl.layers.memory import mesanet as mesanet_module
from tests.layers.memory.equations import convolved, undecayed

pytestmark = pytest.mark.cells_by_loop("name")


def mesanet(layer, xs):
    """The ridge regression solved outright at each step."""
    H, K = layer.num_heads, layer.head_dim
    qs, ks = (
        convolved(conv, [linear(project, x) for x in xs])
        for conv, project in ((layer.q_conv1d, layer.q_proj), (layer.k_conv1d, layer.k_proj))
    )
    damping = (softplus(layer.lambda_params) + layer.lambda_lower_bound).view(H, K)
    G, S, ys = torch.zeros(H, K, K), torch.zeros(H, K, K), []
    for x, q, k in zip(xs, qs, ks, strict=True):
        alpha, beta = sigmoid(linear(layer.a_proj, x)), sigmoid(linear(layer.b_proj, x))
        q, k, v = q.view(H, K), k.view(H, K), linear(layer.v_proj, x).view(H, K)
        G = torch.stack([alpha[h] * G[h] + beta[h] * torch.outer(unit(k[h]), unit(k[h])) for h in range(H)])
        S = torch.stack([alpha[h] * S[h] + beta[h] * torch.outer(unit(k[h]), v[h]) for h in range(H)])
        solved = [torch.linalg.solve(G[h] + torch.diag(damping[h]), unit(q[h])) for h in range(H)]
        y = torch.cat([rms(S[h].T @ solved[h]) * layer.o_norm.weight for h in range(H)])
        y = y if layer.g_proj is None else y * silu(linear(layer.g_proj, x))
        ys.append(linear(layer.o_proj, y))
    return ys


class Given(torch.nn.Module):
    """A projection that gives these values, whatever it reads."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def forward(self, x):
        return self.values[None]


def unit_rows(x):
    return torch.stack([unit(row) for row in x])


EQUATIONS = {
    "mesanet": (lambda: layers.build("mesanet", DIM, num_heads=2, head_dim=3, max_iterations=6), mesanet),
    "mesanet_gated": (
        lambda: layers.build(
            "mesanet", DIM, head_dim=4, output_gate=True, conv_size=None, lambda_lower_bound=0.1, max_iterations=8
        ),
        mesanet,
    ),
}

WRONG = [
    ("mesanet", {"max_iterations": 0}, "max_iterations is 0, expected at least 1"),
    ("mesanet", {"lambda_lower_bound": 1.0}, "lambda_lower_bound is 1.0, expected less than 1"),
]


def test_init_of_mesanet():
    layer = layers.build("mesanet", 256, output_gate=True)
    for project in (layer.q_proj, layer.v_proj, layer.a_proj, layer.b_proj, layer.g_proj, layer.o_proj):
        assert_normal(project.weight, 0.02)
    assert not torch.cat([layer.a_proj.bias, layer.b_proj.bias]).any()
    torch.testing.assert_close(softplus(layer.lambda_params) + 0.25, torch.ones(256))
    assert {"lambda_params"} <= undecayed(layer)
    assert (layer.num_heads, layer.v_conv1d, layer.max_iterations) == (2, None, 30)


@pytest.mark.usefixtures("double")
@pytest.mark.usefixtures("double")
def test_mesanet_stops_when_all_steps_are_solved(monkeypatch):
    """Its outputs and gradients are those of a direct solve, and 16 unknowns need no 200 iterations."""
    made = []
    product = mesanet_module._product
    monkeypatch.setattr(mesanet_module, "_product", lambda *given: made.append(0) or product(*given))
    q, k = (torch.randn(2, 9, 2, 16, requires_grad=True) for _ in range(2))
    damping = (1 + torch.rand(2, 16)).requires_grad_()
    g = torch.nn.functional.logsigmoid(torch.randn(2, 9, 2))

    def direct(q, k, damping):
        G, xs = torch.zeros(2, 2, 16, 16), []
        for t in range(9):
            G = g[:, t, :, None, None].exp() * G + 0.5 * k[:, t, :, :, None] * k[:, t, :, None]
            xs.append(torch.linalg.solve(G + torch.diag_embed(damping), q[:, t]))
        return torch.stack(xs, 1)

    with torch.no_grad():
        k /= k.norm(dim=-1, keepdim=True)
    x, other = mesanet_module._solve(q, k, 0.5 * k, g, damping, None, None, 200), direct(q, k, damping)
    assert len(made) < 40
    torch.testing.assert_close(x, other)
    cotangent = torch.randn_like(x)
    for own, by_hand in zip(*(torch.autograd.grad(y, (q, k, damping), cotangent) for y in (x, other)), strict=True):
        torch.testing.assert_close(own, by_hand)


def test_mesanet_recalls_a_linear_map():
    """Without decay and almost without damping, keys that span their space and values W k give W back."""
    layer = layers.build("mesanet", 4, num_heads=1, head_dim=4, conv_size=None, lambda_lower_bound=0.0)
    with torch.no_grad():
        layer.lambda_params.fill_(-30.0)
        for bias in (layer.a_proj.bias, layer.b_proj.bias):
            bias.fill_(40.0)
        layer.q_proj.weight.copy_(torch.randn(4, 4))
        layer.k_proj.weight.copy_(torch.randn(4, 4))
        layer.o_proj.weight.copy_(torch.eye(4))
    x = torch.randn(1, 6, 4)
    keys = unit_rows(torch.nn.functional.silu(layer.k_proj(x)[0]))
    layer.v_proj = Given(keys @ torch.arange(16.0).sin().view(4, 4))
    last = unit_rows(torch.nn.functional.silu(layer.q_proj(x)[0]))[-1]
    torch.testing.assert_close(layer(x)[0][0, -1], rms(last @ torch.arange(16.0).sin().view(4, 4)))
