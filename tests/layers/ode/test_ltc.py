"""LTC: its equation step by step, how it starts, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, assert_uniform, sigmoid, softplus
from scanl.layers.ode.ltc import LTC, NCP
from scanl.layers.ode.ltc_fused import LTCFused
from tests.layers.ode.equations import ones

pytestmark = pytest.mark.cells_by_loop


def ltc(layer, xs, spans=None):
    """Algorithm 1, neuron by neuron, as a fraction of currents over conductances."""
    own = layer.rnn_cell
    made_positive = softplus if layer.implicit_param_constraints else lambda v: torch.where(v > 0, v, 0)
    w, g, c, sensory_w = (made_positive(v) for v in (own.w, own.gleak, own.cm, own.sensory_w))
    v, ys = torch.zeros(layer.width), []
    for x, span in zip(xs, spans if spans is not None else ones(xs), strict=True):
        u = own.input_w * x + own.input_b
        for _ in range(layer.substeps):
            new = []
            for i in range(layer.width):
                a = own.sparsity_mask[:, i] * w[:, i] * sigmoid(own.sigma[:, i] * (v - own.mu[:, i]))
                b = sensory_w[:, i] * sigmoid(own.sensory_sigma[:, i] * (u - own.sensory_mu[:, i]))
                b = own.sensory_sparsity_mask[:, i] * b
                inertia = c[i] * layer.substeps / span
                above = inertia * v[i] + g[i] * own.vleak[i] + a @ own.erev[:, i] + b @ own.sensory_erev[:, i]
                new.append(above / (inertia + g[i] + a.sum() + b.sum() + 1e-8))
            v = torch.stack(new)
        ys.append(own.output_w * v[:DIM] + own.output_b)
    return ys


EQUATIONS = {
    "ltc": (lambda: LTC(DIM, substeps=2), ltc),
    "ncp": (lambda: NCP(DIM), ltc),
    "ltc_softplus": (lambda: LTC(DIM, 10, 3, True), ltc),
    "ltc_ncp": (lambda: NCP(DIM, 14, 2), ltc),
}

REFUSED = [
    (lambda: LTC(8, 7), "ltc: width is 7, expected at least dim=8"),
    (lambda: NCP(8, 10), "ncp: width is 10, expected at least 3 more than dim=8"),
    (lambda: LTC(8, substeps=0), "ltc: substeps is 0, expected at least 1"),
]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("implicit", [False, True])
def test_voltages_of_ltc_stay_between_the_potentials_that_pull_them(implicit):
    layer = LTC(DIM, implicit_param_constraints=implicit)
    state, own = 5 * torch.rand(3, DIM) - 2.5, layer.rnn_cell
    _, last = layer(20 * torch.randn(3, 30, DIM), state, timespans=10 * torch.rand(3, 30))
    pulls = torch.cat([own.vleak[None], own.erev, own.sensory_erev])
    assert (last <= torch.maximum(state, pulls.max(0).values) + 1e-9).all()
    assert (last >= torch.minimum(state, pulls.min(0).values) - 1e-9).all()


def test_init_of_ltc():
    own = LTC(48, 64).rnn_cell
    for prefix, shape in (("", (64, 64)), ("sensory_", (48, 64))):
        for name, low, high in (("w", 0.001, 1), ("sigma", 3, 8), ("mu", 0.3, 0.8)):
            assert getattr(own, prefix + name).shape == shape
            assert_uniform(getattr(own, prefix + name), low, high)
        signs = getattr(own, f"{prefix}erev")
        assert (signs.abs() == 1).all()
        assert abs((signs == 1).float().mean() - 2 / 3) < 5 * (2 / 9 / signs.numel()) ** 0.5
    for name, low, high in (("gleak", 0.001, 1), ("vleak", -0.2, 0.2), ("cm", 0.4, 0.6)):
        assert_uniform(getattr(own, name), low, high)
    assert (own.input_w == 1).all()
    assert (own.output_w == 1).all()
    assert not own.input_b.any()
    assert not own.output_b.any()
    wired = NCP(48).rnn_cell
    assert torch.equal(wired.erev.abs(), wired.sparsity_mask)
    assert torch.equal(wired.sensory_erev.abs(), wired.sensory_sparsity_mask)
    fused = LTCFused(400, tau=2.0)
    torch.testing.assert_close(fused.log_tau.exp(), torch.full((400,), 2.0))
    assert (fused.A.abs() == 1).all()
    assert abs(fused.A.mean()) < 5 / 20
    assert_uniform(fused.recurrent_map.weight, -1 / 20, 1 / 20)
