"""How classic, gated and orthogonal networks start, and the lengths that orthogonal matrices keep."""

import math

import pytest
import torch

from by_hand import DIM, T, assert_normal, assert_orthogonal, assert_uniform
from scanl.layers.memory.expdecay import ExpDecay
from scanl.layers.rnn.implicit import Implicit
from scanl.layers.rnn.jordan import Jordan
from scanl.layers.rnn.layernorm_elman import LayerNormElman
from scanl.layers.rnn.layernorm_lstm import LayerNormLSTM
from scanl.layers.rnn.ligru import LiGRU
from scanl.layers.rnn.nnrnn import NonNormalRNN
from scanl.layers.rnn.onlstm import ONLSTM
from scanl.layers.rnn.ornn import DTriv, ExpRNN, OrthogonalRNN, ScoRNN
from scanl.layers.rnn.urnn import URNN
from scanl.layers.ssm.linrnn_lti import LinRNNLTI

pytestmark = pytest.mark.cells_by_loop


def blocks_of(a):
    """The numbers of the 2 × 2 blocks, after a look that there is nothing else."""
    found = a.diagonal(1)[::2]
    rest = a.clone()
    for j in range(len(found)):
        torch.testing.assert_close(rest[2 * j + 1, 2 * j], -found[j])
        rest[2 * j, 2 * j + 1] = rest[2 * j + 1, 2 * j] = 0
    assert not rest.any()
    return found


def test_init_of_the_others():
    layer = Jordan(100, 200)
    for weight, limit in ((layer.A, 0.1), (layer.B.weight, 1), (layer.C.weight, 1)):
        assert_uniform(weight, -limit * (6 / 300) ** 0.5, limit * (6 / 300) ** 0.5)
    assert not (layer.B.bias.any())
    assert not (layer.C.bias.any())
    W = Implicit(32, gain=0.7).W
    torch.testing.assert_close(W @ W.T, 0.49 * torch.eye(32), atol=1e-5, rtol=0)
    system = LinRNNLTI(64, 4000, r_max=0.9)
    assert_uniform((system.lambda_re**2 + system.lambda_im**2) / 0.81, 0, 1)
    assert_uniform(torch.atan2(system.lambda_im, system.lambda_re), -torch.pi, torch.pi)
    assert_normal(system.B_re, 1 / 128**0.5)
    assert_normal(system.C_im, 1 / 4000**0.5)
    assert_normal(ExpDecay(4000).decay, 1.0)


@pytest.mark.usefixtures("double")
def test_layer_norm_removes_the_scale_of_weights():
    x = torch.randn(2, T, DIM)
    for layer, together in ((LayerNormLSTM(DIM, norm_eps=1e-15), False), (LayerNormElman(DIM, norm_eps=1e-15), True)):
        y = layer(x)[0]
        with torch.no_grad():
            layer.weight_ih.mul_(3)
            layer.weight_hh.mul_(3 if together else 7)
        torch.testing.assert_close(layer(x)[0], y)
        with torch.no_grad():
            layer.weight_hh.mul_(2)
        assert (layer(x)[0] - y).abs().max() > 1e-3 if together else torch.allclose(layer(x)[0], y)


def test_init_of_the_gated_cells():
    for layer in (ONLSTM(64), LayerNormLSTM(64), LayerNormElman(64)):
        for name, parameter in layer.named_parameters():
            if "norm" in name:
                assert (parameter == float("weight" in name)).all(), name
            else:
                assert_uniform(parameter, -1 / 8, 1 / 8)
    assert [ONLSTM(dim).chunk_size for dim in (650, 64, 12, 7, 11)] == [10, 8, 6, 7, 1]
    layer = LiGRU(64)
    assert_orthogonal(layer.u.weight, 1)
    assert_uniform(layer.w.weight, -1 / 8, 1 / 8)
    assert (layer.norm.momentum, layer.norm.eps) == (0.05, 1e-5)


@pytest.mark.usefixtures("double")
def test_recurrent_matrices_keep_lengths():
    w = URNN(7, 6).recurrent_matrix()
    torch.testing.assert_close(w @ w.mH, torch.eye(6, dtype=w.dtype))
    for make in (ExpRNN, DTriv, ScoRNN, lambda dim: OrthogonalRNN(dim, "cayley", "henaff")):
        for dim in (7, 8):
            w = make(dim).recurrent_kernel()
            torch.testing.assert_close(w @ w.T, torch.eye(dim))
    w = NonNormalRNN(8).recurrent_matrix()
    torch.testing.assert_close(w @ w.T, torch.eye(8))


@pytest.mark.usefixtures("double")
def test_a_network_without_thresholds_keeps_the_length_of_its_state():
    for layer, b in ((URNN(DIM), "hidden_bias"), (ExpRNN(DIM), "nonlinearity.b")):
        torch.nn.init.zeros_(layer.get_parameter(b))
        before = torch.randn(2, *layer.init_state(1).shape[1:])
        _, after = layer(torch.zeros(2, 50, DIM), before)
        torch.testing.assert_close(after.flatten(1).norm(dim=1), before.flatten(1).norm(dim=1), rtol=1e-2, atol=0)


def test_init_of_orthogonal_networks():
    layer = ExpRNN(256)
    assert_uniform(blocks_of(layer.recurrent_kernel.A.detach()), -math.pi, math.pi)
    assert_normal(layer.input_kernel.weight, math.sqrt(2 / 256))
    assert_uniform(layer.nonlinearity.b, -0.01, 0.01)
    layer = ScoRNN(256)
    theta = torch.acos((1 - blocks_of(layer.recurrent_kernel.A.detach()).double() ** 2).div(
        1 + blocks_of(layer.recurrent_kernel.A.detach()).double() ** 2
    ))  # fmt: skip
    assert_uniform(theta, 0, math.pi / 2)
    assert (layer.recurrent_kernel.A.diagonal(1) <= 0).all()
    assert_uniform(layer.input_kernel.weight, -0.01, 0.01)
    assert not layer.nonlinearity.b.any()
    torch.manual_seed(0)
    moving = DTriv(16)
    torch.manual_seed(0)
    torch.testing.assert_close(moving.recurrent_kernel(), ExpRNN(16).recurrent_kernel())
    assert not moving.recurrent_kernel.A.any()
    layer = NonNormalRNN(256)
    assert_uniform(blocks_of(layer.log_P.detach()), -math.pi, 0)
    assert_uniform(layer.theta, 0, 2 * math.pi)
    assert not layer.UppT.any()
    assert (layer.alpha == 1).all()
    assert_normal(layer.U.weight, math.sqrt(2 / 512))
    assert_uniform(layer.nonlinearity.b, -0.01, 0.01)
