"""Timespans in every layer of continuous time, outputs of ncps, and how layers of one kind start."""

import math

import pytest
import torch

from by_hand import DIM, T, assert_normal, assert_uniform, follows_time
from scanl.layers.ode.antisym import AntisymmetricRNN
from scanl.layers.ode.cornn import CoRNN
from scanl.layers.ode.ctrnn import CTRNN
from scanl.layers.ode.lem import LEM
from scanl.layers.ode.lipschitz import Lipschitz
from scanl.layers.ode.ltc import LTC
from scanl.layers.ode.ltc_fused import LTCFused
from scanl.layers.ode.neuralode import NeuralODE
from scanl.layers.ode.noisy import NoisyRNN
from scanl.layers.ode.nwm import NeuralWaveMachine
from scanl.layers.ode.odernn import ODERNN
from scanl.layers.ode.unicornn import UnICORNN
from scanl.layers.ode.wrnn import WaveRNN
from tests.layers.ode.equations import cosine, last_output
from tests.layers.test_equations import CASES

pytestmark = pytest.mark.cells_by_loop


GOLDEN = {
    "cfc": [-0.376695068232, -0.310034555904, -0.417038991945, -0.383350113039],
    "cfc_no_gate": [0.597655090131, 0.281202764141, 0.612317906637, 0.254535635788],
    "cfc_pure": [0.420132855850, 0.373641013052, 0.442535189090, 0.353696940450],
    "cfc_without_backbone": [0.918218033497, -0.135279523116, 0.988925351622, -0.096426321159],
    "cfc_mixed": [0.187429764025, 0.664023332028, 0.194416368553, 0.652052347146],
    "cfc_ncp": [-0.200596263119, -0.086434395237, -0.195160408512, -0.080757693579],
    "cfc_ncp_pure": [-0.077766101860, -0.357887598301, -0.074278596257, -0.349696917529],
    "cfc_ncp_mixed": [0.085810244936, -0.162521323051, 0.017965533478, -0.253097307141],
    "ltc": [1.563419845653, 1.350459447498, 1.561478327640, 1.349220204189],
    "ltc_softplus": [1.545648967620, 1.348062771730, 1.548202589026, 1.350281359494],
    "ltc_ncp": [1.844750132483, 1.311043656659, 1.799713682224, 1.256507436738],
}

CONTINUOUS = [
    "ctrnn", "ctrnn_linear", "ctrnn_trained_tau", "cfc", "cfc_no_gate", "cfc_pure", "cfc_without_backbone", "cfc_mixed",
    "cfc_ncp", "cfc_ncp_pure", "cfc_ncp_mixed", "ltc", "ncp", "ltc_softplus", "ltc_ncp", "irnn", "irnn_from_zero",
    "irnn_of_low_rank", "tarnn", "tarnn_plain", "odernn", "odernn_midpoint", "odernn_rk4", "neuralode",
    "neuralode_euler", "neuralode_midpoint", "odefwp", "odefwp_euler", "odefwp_oja", "odefwp_hebb",
    "odefwp_linear_euler", "odefwp_linear_midpoint", "odefwp_linear_rk4", "ltc_fused",
]  # fmt: skip


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", CONTINUOUS)
def test_a_layer_follows_the_time_between_its_steps(name):
    follows_time(*CASES[name])


@pytest.mark.usefixtures("double")
def test_a_step_of_no_length_keeps_the_state():
    x, spans = torch.randn(2, T, DIM), torch.zeros(2, T)
    for layer in (CTRNN(DIM), CTRNN(DIM, global_feedback=False), LTC(DIM), LTCFused(DIM)):
        state = torch.rand(2, *layer.init_state(1).shape[1:])
        _, last = layer(x, state, timespans=spans)
        torch.testing.assert_close(last, state, atol=1e-12, rtol=0)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", GOLDEN)
def test_outputs_of_ncps(name):
    """Outputs of ncps 1.0.1 in float64 with the same parameters, made of cosines, as are the inputs and time spans."""
    torch.testing.assert_close(last_output(cosine(CASES[name][0]())), torch.tensor(GOLDEN[name]), atol=1e-9, rtol=0)


def test_init_of_fields():
    for field in (ODERNN(64).ode_func, NeuralODE(64, 100, 2).func):
        for each in (field.first, *field.deep, field.last):
            assert_normal(each.weight, 0.1)
            assert not each.bias.any()
    assert ODERNN(64).ode_func.deep[0].weight.shape == (100, 100)
    for weight in ODERNN(64).GRU_update.parameters():
        assert_uniform(weight, -1 / 8, 1 / 8)


def test_init_of_oscillators():
    limit = 1 / math.sqrt(3 * 64)
    for parameter in CoRNN(64).parameters():
        assert_uniform(parameter, -limit, limit)
    for parameter in LEM(64).parameters():
        assert_uniform(parameter, -1 / 8, 1 / 8)
    layer = UnICORNN(256)
    bound = math.sqrt(6 / (1 + 8**2) / 256)  # Kaiming: gain sqrt(2 / (1 + a²)), times sqrt(3 / D)
    assert_uniform(layer.fc.weight, -bound, bound)
    assert not layer.fc.bias.any()
    assert_uniform(layer.weight_hh, 0, 1)
    assert_uniform(layer.c_, -0.1, 0.1)


def test_init_of_stable_systems():
    for layer, std in ((Lipschitz(64), 0.1), (NoisyRNN(64, init_std=2.0), 2.0)):
        for matrix in (layer.B, layer.C):
            assert_normal(matrix, std / 64)
        assert_uniform(layer.E.weight, -1 / 8, 1 / 8)
    torch.testing.assert_close(layer.d.detach(), torch.full((64,), 0.1))
    layer = AntisymmetricRNN(64, gated=True)
    for matrix in (layer.W, layer.V.weight, layer.V_z.weight):
        assert_normal(matrix, 1 / 64)
    assert not layer.V.bias.any()
    assert (layer.V_z.bias == 1).all()


def test_init_of_waves():
    layer = NeuralWaveMachine(64, trained=True)
    assert [p.item() for p in (layer.dt, layer.gamma, layer.alpha)] == [pytest.approx(-1.95), 1, 0.5]
    assert_uniform(layer.Wx.weight, -1 / 8, 1 / 8)
    assert layer.Wy.weight.abs().max() <= 1 / 3
    layer = WaveRNN(64, 8, 2)
    expected = torch.zeros(16, 64)
    expected[[0, 8]] = 1
    assert torch.equal(layer.Wx.weight, expected)
    assert not layer.Wx.bias.any()
    assert torch.equal(layer.Wy.weight, torch.eye(2)[..., None] * torch.tensor([0.0, 0.0, 1.0]))
    assert layer.Wy.bias.any()
    layer = WaveRNN(64, 32, 2, init="eye")
    assert torch.equal(layer.Wy.weight, torch.eye(2)[..., None] * torch.tensor([0.0, 1.0, 0.0]))
    assert_uniform(WaveRNN(64, 1, 32, init="rand").Wy.weight, -1 / math.sqrt(96), 1 / math.sqrt(96))
