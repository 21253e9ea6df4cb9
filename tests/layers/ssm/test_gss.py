"""GSS: its equation step by step, and how it starts."""

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform, gelu, layer_norm
from scanl.layers import GSS
from tests.layers.ssm.equations import held


def gss(layer, xs, spans=None):
    inner, s, ys = layer.dss, 0, []
    imag = torch.exp(inner.Lambda_imag) if inner.imag_exp else inner.Lambda_imag
    Lambda, C = torch.complex(-torch.exp(inner.Lambda_real), imag), torch.complex(inner.C_real, inner.C_imag)
    for x, span in zip(xs, held(spans, xs), strict=True):
        u = layer_norm(gelu(layer.to_v[0].weight @ x), inner.norm)
        s = torch.exp(span * Lambda) * s + (torch.exp(span * Lambda) - 1) / Lambda * u[:, None]
        read = (C * s).sum(1).real + inner.param_D * u
        gate = gelu(layer.to_u[0].weight @ x)
        ys.append(layer.to_out.weight @ (gate * (layer.to_gate.weight @ read)) + layer.to_out.bias)
    return ys


EQUATIONS = {
    "gss": (lambda: GSS(DIM, 2, 4, 5), gss),
    "gss_of_free_frequencies": (lambda: GSS(DIM, state_dim=3, imag_exp=False), gss),
}


@pytest.mark.usefixtures("double")
def test_init_of_gss():
    layer = GSS(1600)
    for name in ("C_real", "C_imag", "Lambda_real", "Lambda_imag", "param_D"):
        assert_normal(getattr(layer.dss, name), 1.0)
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    assert shapes["dss.C_real"] == (400, 512)
    assert shapes["to_u.0.weight"] == (4800, 1600)
    assert shapes["to_v.0.weight"] == (400, 1600)
    assert_uniform(layer.to_gate.weight, -1 / 20, 1 / 20)
