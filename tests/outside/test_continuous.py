"""Continuous-time layers against PyPI's ncps in float64: weights copied by name, outputs, states and every gradient."""

import pytest
import torch

from scanl import layers

pytest.importorskip("ncps", reason="needs the extra `outside`")
import ncps.torch
from ncps.wirings import AutoNCP, FullyConnected

pytestmark = pytest.mark.cells_by_loop

B, T, DIM = 2, 6, 8
PLAIN = {"implicit_param_constraints": False}
CASES = {
    "cfc": ({"width": 5}, lambda: ncps.torch.CfC(DIM, 5, DIM)),
    "cfc_no_gate": (
        {"variant": "no_gate", "hidden_dim": 6, "depth": 2, "activation": "silu"},
        lambda: ncps.torch.CfC(DIM, DIM, mode="no_gate", backbone_units=6, backbone_layers=2, activation="silu"),
    ),
    "cfc_pure": (
        {"variant": "pure", "activation": "gelu", "hidden_dim": 6},
        lambda: ncps.torch.CfC(DIM, DIM, mode="pure", activation="gelu", backbone_units=6),
    ),
    "cfc_mixed": (
        {"mixed_memory": True, "depth": 0, "width": 5},
        lambda: ncps.torch.CfC(DIM, 5, DIM, mixed_memory=True, backbone_layers=0),
    ),
    "cfc_ncp": ({"width": 13}, lambda: ncps.torch.CfC(DIM, AutoNCP(13, DIM))),
    "cfc_ncp_pure": (
        {"width": 15, "sparsity_level": 0.3, "seed": 3, "variant": "pure", "mixed_memory": True},
        lambda: ncps.torch.CfC(DIM, AutoNCP(15, DIM, 0.3, 3), mode="pure", mixed_memory=True),
    ),
    "ltc": ({"width": 10}, lambda: ncps.torch.LTC(DIM, FullyConnected(10, DIM), **PLAIN)),
    "ltc_softplus": (
        {"implicit_param_constraints": True, "substeps": 3},
        lambda: ncps.torch.LTC(DIM, DIM, ode_unfolds=3),
    ),
    "ncp": ({"width": 14, "seed": 5}, lambda: ncps.torch.LTC(DIM, AutoNCP(14, DIM, seed=5), **PLAIN)),
}


@pytest.mark.parametrize("case", CASES)
def test_layer_is_that_of_ncps(case):
    """Row by row, because ncps multiplies the time spans of a batch along the neurons."""
    options, make = CASES[case]
    name = next(name for name in ("cfc_ncp", "cfc", "ltc", "ncp") if case.startswith(name))
    theirs, layer = make().double(), layers.build(name, DIM, **options).double()
    layer.load_state_dict(theirs.state_dict())
    x, spans = torch.randn(B, T, DIM, dtype=torch.float64), torch.rand(B, T, dtype=torch.float64) + 0.5
    y, last = layer(x, timespans=spans)
    rows = []
    for row in range(B):
        state = torch.zeros(1, theirs.state_size, dtype=torch.float64)
        state = (state, state.clone()) if theirs.use_mixed else state
        z, after = theirs(x[row : row + 1], state, spans[row : row + 1])
        rows.append(z)
        after = torch.stack(after, 1) if theirs.use_mixed else after
        torch.testing.assert_close(last[row].flatten(), after.flatten(), rtol=0, atol=1e-9)
    torch.testing.assert_close(y, torch.cat(rows), rtol=0, atol=1e-9)
    (y * y.cos()).sum().backward()
    z = torch.cat(rows)
    (z * z.cos()).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    assert gradients.keys() == dict(layer.named_parameters()).keys()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=1e-9)
