"""HGRN: its equation step by step, and what only it knows."""

import pytest
import torch

from by_hand import DIM, T, layer_norm, sigmoid, silu
from scanl.layers import HGRN


def hgrn(layer, xs, gamma=0.0):
    h, ys = torch.zeros(layer.dim, dtype=torch.complex128), []
    for x in xs:
        parts = silu(layer.input_proj.weight @ x + layer.input_proj.bias)
        c = torch.complex(parts[0::2], parts[1::2])
        keep = gamma + (1 - gamma) * sigmoid(layer.lambda_proj.weight @ x + layer.lambda_proj.bias)
        h = keep * torch.exp(1j * layer.theta[0, 0]) * h + (1 - keep) * c
        normed = layer_norm(torch.cat([h.real, h.imag]), layer.norm)
        gate = silu(layer.gate.weight @ x + layer.gate.bias)
        ys.append(layer.out_proj.weight @ (normed * gate) + layer.out_proj.bias)
    return ys


EQUATIONS = {"hgrn": (lambda: HGRN(DIM), hgrn)}


@pytest.mark.usefixtures("double")
def test_lower_bound_of_hgrn_rises_with_depth():
    stack = [HGRN(DIM) for _ in range(4)]
    for index, layer in enumerate(stack):
        layer.enter_stack(index, stack)
    assert [name for layer in stack for name, _ in layer.named_parameters() if "gamma" in name] == ["gamma"]
    for depth, layer in enumerate(stack):
        torch.testing.assert_close(torch.as_tensor(layer.lower_bound()).expand(DIM), torch.full((DIM,), depth / 4))
    torch.nn.init.normal_(stack[0].gamma)
    share = stack[0].gamma.softmax(0)
    for depth, layer in enumerate(stack):
        bound = share.cumsum(0)[depth] - share[0]
        x = torch.randn(1, T, DIM)
        torch.testing.assert_close(layer(x)[0][0], torch.stack(hgrn(layer, list(x[0]), bound)))
    assert torch.as_tensor(stack[3].lower_bound() > stack[2].lower_bound()).all()
