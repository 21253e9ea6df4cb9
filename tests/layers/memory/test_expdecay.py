"""ExpDecay: its equation step by step, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, T, linear, sigmoid
from scanl.layers import GLA
from scanl.layers.memory.expdecay import ExpDecay

pytestmark = pytest.mark.cells_by_loop


def expdecay(layer, xs):
    H, K = layer.num_heads, DIM // layer.num_heads
    S, ys = torch.zeros(H, K, K), []
    for x in xs:
        q, k, v = (linear(project, x).view(H, K) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
        S = sigmoid(layer.decay)[..., None] * S + k[..., None] * v[:, None]
        ys.append(linear(layer.o_proj, (S * q[..., None]).sum(1).flatten()))
    return ys


EQUATIONS = {"expdecay": (lambda: ExpDecay(DIM, 2), expdecay)}

REFUSED = [(lambda: ExpDecay(8, 3), "expdecay: num_heads is 3, expected a divisor of dim=8")]


@pytest.mark.usefixtures("double")
def test_expdecay_is_gla_with_a_constant_decay():
    layer, x = ExpDecay(DIM, 2), torch.randn(2, T, DIM)
    gla = GLA(DIM, 1.0, 1.0, 2, output_gate=False, gate_logit_normalizer=1)
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(gla, name).weight.copy_(getattr(layer, name).weight)
        gla.gk_proj[0].weight.zero_()
        gla.gk_proj[1].bias.copy_(layer.decay.flatten())
        for each in (layer, gla):
            each.o_proj.weight.copy_(torch.eye(DIM))
    y = layer(x)[0].view(2, T, 2, -1) / 2  # GLA divides by sqrt(K)
    rms = torch.sqrt((y**2).mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(gla(x)[0].view_as(y), y / rms)
