"""Gated cells that PyTorch does not have: each against its equation, how it starts, and what only it knows."""

import math

import pytest
import torch

from by_hand import DIM, T, assert_orthogonal, assert_uniform, layer_norm, linear, sigmoid
from scanl import layers
from scanl.errors import ConfigError
from scanl.layers import GRU, LSTM
from scanl.layers.rnn.layernorm_elman import LayerNormElman
from scanl.layers.rnn.layernorm_lstm import LayerNormLSTM
from scanl.layers.rnn.ligru import LiGRU
from scanl.layers.rnn.onlstm import ONLSTM

pytestmark = pytest.mark.cells_by_loop


def onlstm(layer, xs):
    """Equations (6) to (14), neuron by neuron."""
    chunks, size = DIM // layer.chunk_size, layer.chunk_size
    h, c, ys = torch.zeros(DIM), torch.zeros(DIM), []
    for x in xs:
        raw = linear(layer.ih[0], x) + linear(layer.hh, h)
        shares = [torch.exp(part) / torch.exp(part).sum() for part in raw[: 2 * chunks].split(chunks)]
        o, z, i, f = raw[2 * chunks :].split(DIM)
        new = torch.zeros(DIM)
        for d in range(DIM):
            master_i = 1 - shares[0][: d // size + 1].sum()
            master_f = shares[1][: d // size + 1].sum()
            omega = master_f * master_i
            f_hat = sigmoid(f[d]) * omega + (master_f - omega)
            i_hat = sigmoid(i[d]) * omega + (master_i - omega)
            new[d] = f_hat * c[d] + i_hat * torch.tanh(z[d])
        c = new
        h = sigmoid(o) * torch.tanh(c)
        ys.append(h)
    return ys


def layernorm_lstm(layer, xs):
    h, c, ys = torch.zeros(DIM), torch.zeros(DIM), []
    for x in xs:
        raw = layer_norm(layer.weight_ih @ x, layer.layernorm_i) + layer_norm(layer.weight_hh @ h, layer.layernorm_h)
        i, f, g, o = raw.split(DIM)
        c = sigmoid(f) * c + sigmoid(i) * torch.tanh(g)
        normed = layer_norm(c, layer.layernorm_c)
        h = sigmoid(o) * torch.tanh(normed)
        c = normed if layer.carry_normed else c
        ys.append(h)
    return ys


def layernorm_elman(layer, xs):
    h, ys = torch.zeros(DIM), []
    for x in xs:
        raw = layer_norm(layer.weight_ih @ x + layer.weight_hh @ h, layer.layernorm)
        h = torch.tanh(raw) if layer.activation == "tanh" else torch.where(raw > 0, raw, 0)
        ys.append(h)
    return ys


def ligru(layer, xs):
    """With batch norm: the statistics that it has kept."""
    h, ys = torch.zeros(DIM), []
    for x in xs:
        raw = layer.w.weight @ x
        if layer.variant == "batchnorm":
            scaled = (raw - layer.norm.running_mean) / torch.sqrt(layer.norm.running_var + layer.norm.eps)
            raw = scaled * layer.norm.weight + layer.norm.bias
        else:
            raw = layer_norm(raw, layer.norm)
        a, z = (raw + layer.u.weight @ h).split(DIM)
        h = sigmoid(z) * h + (1 - sigmoid(z)) * torch.where(a > 0, a, 0)
        ys.append(h)
    return ys


def in_use(layer):
    """The layer in evaluation mode, its batch norm with other statistics than those at the start."""
    layer.norm.running_mean.normal_()
    layer.norm.running_var.uniform_(0.5, 2)
    return layer.eval()


EQUATIONS = {
    "onlstm": (lambda: ONLSTM(DIM, 2), onlstm),
    "onlstm_single": (lambda: ONLSTM(DIM, 1, forget_bias=1.0), onlstm),
    "layernorm_lstm": (lambda: LayerNormLSTM(DIM), layernorm_lstm),
    "layernorm_lstm_carried": (lambda: LayerNormLSTM(DIM, carry_normed=True, norm_eps=1e-3), layernorm_lstm),
    "layernorm_elman": (lambda: LayerNormElman(DIM), layernorm_elman),
    "layernorm_elman_relu": (lambda: LayerNormElman(DIM, "relu"), layernorm_elman),
    "ligru": (lambda: in_use(LiGRU(DIM)), ligru),
    "ligru_layernorm": (lambda: LiGRU(DIM, "layernorm"), ligru),
}


# --- what only it knows


@pytest.mark.usefixtures("double")
def test_master_gates_of_onlstm_keep_the_high_neurons_and_write_the_low_ones():
    """Sharp shares put the cuts at chunks: neurons from the first on are kept as they are, neurons before the second
    are written, and where both hold the usual gates decide."""
    layer = ONLSTM(DIM, 2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.hh.bias[2] = layer.hh.bias[4 + 1] = 1e3  # written: chunks before 2; kept: chunks from 1
        layer.hh.bias[8 + DIM : 8 + 2 * DIM] = 0.5  # z
    state = torch.randn(1, 2, DIM)
    c = layer(torch.zeros(1, 1, DIM), state)[1][0, 1]
    new = torch.full((2,), math.tanh(0.5))
    old = state[0, 1]
    torch.testing.assert_close(c, torch.cat([new, old[2:4] / 2 + new / 2, old[4:]]))


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


@pytest.mark.usefixtures("double")
def test_batch_norm_of_ligru_learns_the_statistics_of_all_steps():
    layer, x = LiGRU(DIM), torch.randn(3, T, DIM)
    raw = (x @ layer.w.weight.T).flatten(0, 1).detach()
    normed = (raw - raw.mean(0)) / torch.sqrt(raw.var(0, correction=0) + 1e-5)
    expected, h = [], torch.zeros(3, DIM)
    for given in normed.view(3, T, -1).unbind(1):
        a, z = (given + h @ layer.u.weight.T).split(DIM, -1)
        h = sigmoid(z) * h + (1 - sigmoid(z)) * a.relu()
        expected.append(h)
    torch.testing.assert_close(layer(x)[0], torch.stack(expected, 1))
    torch.testing.assert_close(layer.norm.running_mean, 0.05 * raw.mean(0))
    torch.testing.assert_close(layer.norm.running_var, 0.95 + 0.05 * raw.var(0))
    layer(x[:1, :1])  # one step has no variance: the statistics that were kept are used, and stay
    torch.testing.assert_close(layer.norm.running_mean, 0.05 * raw.mean(0))
    assert not torch.equal(layer.eval()(x)[0], torch.stack(expected, 1))


# --- initialisation


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


CHRONO = {
    "lstm": (lambda **start: LSTM(2500, **start), lambda cell: cell.bias_ih_l0 + cell.bias_hh_l0, (1, 0)),
    "gru": (lambda **start: GRU(2500, **start), lambda cell: cell.bias_ih_l0 + cell.bias_hh_l0, (1, None)),
    "onlstm": (
        lambda **start: ONLSTM(2500, 2500, **start),
        lambda cell: (cell.ih[0].bias + cell.hh.bias)[2:],
        (3, 2),
    ),
    "layernorm_lstm": (
        lambda **start: LayerNormLSTM(2500, **start),
        lambda cell: cell.layernorm_i.bias + cell.layernorm_h.bias,
        (1, 0),
    ),
}


@pytest.mark.parametrize("name", CHRONO)
def test_chrono_start_spreads_the_memories_up_to_the_longest(name):
    make, biases, (keep, write) = CHRONO[name]
    gates = biases(make(t_max=100)).detach().view(-1, 2500)
    assert_uniform(gates[keep].exp() - 50, -49.0 + 1e-4, 49.0 + 1e-4)  # U(1, 99)
    lasting = 1 / (1 - sigmoid(gates[keep].double()))
    assert 2 <= lasting.min() < 3
    assert 99 < lasting.max() <= 100
    if write is not None:
        torch.testing.assert_close(gates[write], -gates[keep])
        gates = biases(make(forget_bias=1.5)).detach().view(-1, 2500)
        torch.testing.assert_close(gates[keep], torch.full((2500,), 1.5))
        assert gates[write].abs().max() < 0.1


# --- options

WRONG = [
    (lambda: ONLSTM(8, 3), "onlstm: chunk_size is 3, expected a divisor of dim=8"),
    (lambda: ONLSTM(0), "onlstm: dim is 0, expected at least 1"),
    (lambda: ONLSTM(8, forget_bias=1.0, t_max=9), "onlstm: t_max is 9, expected None because of forget_bias=1.0"),
    (lambda: LayerNormLSTM(0), "layernorm_lstm: dim is 0, expected at least 1"),
    (lambda: LayerNormLSTM(8, t_max=2), "layernorm_lstm: t_max is 2, expected at least 3"),
    (lambda: LayerNormElman(0), "layernorm_elman: dim is 0, expected at least 1"),
    (lambda: LayerNormElman(8, "rel"), r"layernorm_elman: unknown activation 'rel'; did you mean 'relu'\?"),
    (lambda: GRU(8, False, 9), "gru: t_max is 9, expected None because of bias=False"),
    (lambda: LiGRU(8, "batch"), r"ligru: unknown variant 'batch'; did you mean 'batchnorm'\?"),
    (lambda: layers.build("ligru", 0), "ligru: dim is 0, expected at least 1"),
]


@pytest.mark.parametrize(("build", "message"), WRONG)
def test_wrong_options_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("steps", [0, 1])
def test_one_row_of_ligru_in_training_is_normalised_as_in_evaluation_and_hooks_see_it(steps):
    layer, x, calls = in_use(LiGRU(DIM)), torch.randn(1, steps, DIM, dtype=torch.float64, requires_grad=True), []
    evaluated, _ = layer.eval()(x)
    before = [value.clone() for value in layer.norm.buffers()]
    layer.train().norm.register_forward_hook(lambda *_: calls.append(1))
    y, _ = layer(x)
    (y * y).sum().backward()
    assert calls == [1]
    torch.testing.assert_close(y, evaluated)
    assert all(map(torch.equal, layer.norm.buffers(), before))
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad.any() == bool(steps)


@pytest.mark.usefixtures("double")
def test_two_rows_of_ligru_in_training_have_statistics():
    layer, x = LiGRU(DIM), torch.randn(1, 2, DIM)
    first, second = (x[0] @ layer.w.weight.T).detach()
    layer(x)
    torch.testing.assert_close(layer.norm.running_mean, 0.05 * (first + second) / 2)
    torch.testing.assert_close(layer.norm.running_var, 0.95 + 0.05 * (first - second).square() / 2)


def test_gate_penalty_of_ligru_is_the_mean_of_its_gates():
    layer, x, h, penalty = LiGRU(DIM, "layernorm"), torch.randn(1, T, DIM), torch.randn(1, DIM), []
    found = layer.gate_penalty(x, h)
    for step in x.unbind(1):
        a, z = (layer.norm(layer.w(step)) + layer.u(h)).chunk(2, -1)
        z = torch.sigmoid(z)
        h = z * h + (1 - z) * torch.relu(a)
        penalty.append(4 * z * (1 - z))
    torch.testing.assert_close(found, torch.stack(penalty).mean())
    with torch.no_grad():
        layer.norm.weight[DIM:] = 1e6  # gates of 0 and 1
    assert layer.gate_penalty(x) < 1e-6
