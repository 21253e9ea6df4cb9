"""Recurrences that are elementwise, or linear in their state: their equations, how they start, what only they know."""

import math

import pytest
import torch

from by_hand import DIM, T, assert_uniform, layer_norm, linear, shaken, sigmoid, with_before
from scanl import layers
from scanl.errors import ConfigError
from scanl.layers.rnn.gilr import GILR
from scanl.layers.rnn.glru_scan import GLRUScan
from scanl.layers.rnn.indrnn import IndRNN
from scanl.layers.rnn.qrnn import QRNN
from scanl.layers.rnn.sru import SRU
from scanl.layers.rnn.trnn import TRNN

pytestmark = pytest.mark.cells_by_loop

PHI = {"relu": lambda v: torch.where(v > 0, v, 0), "tanh": torch.tanh, "identity": lambda v: v}


def indrnn(layer, xs):
    s, ys = torch.zeros(DIM), []
    for x in xs:
        s = PHI[layer.activation](layer.weight_hh * s + linear(layer.fc, x))
        ys.append(s)
    return ys


def sru(layer, xs):
    columns = layer.weight.view(DIM, DIM, 3)
    (v_f, v_r), (b_f, b_r) = layer.weight_c.split(DIM), layer.bias.split(DIM)
    c, ys = torch.zeros(DIM), []
    for x in xs:
        given = x if layer.layer_norm is None else layer_norm(x, layer.layer_norm)
        new, f, r = (given @ columns[:, :, part] for part in range(3))
        f, r = sigmoid(f + v_f * c + b_f), sigmoid(r + v_r * c + b_r)
        c = f * c + (1 - f) * new
        ys.append(r * c + (1 - r) * x * layer.scale_x)
    return ys


def qrnn(layer, xs):
    c, ys = torch.zeros(DIM), []
    for t in range(len(xs)):
        raw = layer.linear.bias.clone()
        for j, weight in enumerate(layer.linear.weight.split(DIM, 1)):
            raw = raw + (weight @ xs[t - j] if t >= j else 0)
        z, f, *more = raw.split(DIM)
        f = sigmoid(f) if layer.variant == "old" else 1 - sigmoid(f)
        c = f * c + (sigmoid(more[1]) if layer.pooling == "ifo" else 1 - f) * torch.tanh(z)
        ys.append(sigmoid(more[0]) * c if more else c)
    return ys


def trnn(layer, xs):
    h, ys = torch.zeros(DIM), []
    for x, before in with_before(xs):
        seen = x if layer.variant == "rnn" else torch.cat([x, before])
        z, f = linear(layer.z_proj, seen), sigmoid(linear(layer.f_proj, seen))
        if layer.variant == "rnn":
            h = f * h + (1 - f) * z
            ys.append(h)
            continue
        o = torch.tanh(linear(layer.o_proj, seen))
        h = f * h + (z * o if layer.variant == "gru" else (1 - f) * z)
        ys.append(h if layer.variant == "gru" else h * o)
    return ys


def gilr(layer, xs):
    s, ys = torch.zeros(DIM), []
    for x in xs:
        gate, impulse = linear(layer.linear, x).split(DIM)
        if layer.activation == "elu":
            impulse = torch.where(impulse > 0, impulse, torch.exp(impulse) - 1)
        elif layer.activation == "tanh":
            impulse = torch.tanh(impulse)
        s = sigmoid(gate) * s + (1 - sigmoid(gate)) * impulse
        ys.append(s)
    return ys


def glru_scan(layer, xs):
    surrogate = gilr(layer.gilr, xs)
    c, ys = torch.zeros(DIM), []
    for x, (now, before) in zip(xs, with_before(surrogate), strict=True):
        f, i, o, z = linear(layer.linear, torch.cat([before if layer.shifted else now, x])).split(DIM)
        c = sigmoid(f) * c + sigmoid(i) * torch.tanh(z)
        ys.append(sigmoid(o) * (torch.tanh(c) if layer.squash else c))
    return ys


EQUATIONS = {
    "indrnn": (lambda: IndRNN(DIM), indrnn),
    "indrnn_tanh": (lambda: IndRNN(DIM, "tanh"), indrnn),
    "sru": (lambda: SRU(DIM), sru),
    "sru_norm": (lambda: SRU(DIM, layer_norm=True, highway_bias=-3.0, rescale=False), sru),
    "sru_v1": (lambda: layers.build("sru_v1", DIM), sru),
    "qrnn": (lambda: QRNN(DIM), qrnn),
    "qrnn_f": (lambda: QRNN(DIM, "f", 1, "new"), qrnn),
    "qrnn_ifo": (lambda: QRNN(DIM, "ifo", 3), qrnn),
    "trnn": (lambda: TRNN(DIM), trnn),
    "tgru": (lambda: layers.build("tgru", DIM), trnn),
    "tlstm": (lambda: layers.build("tlstm", DIM), trnn),
    "gilr": (lambda: GILR(DIM), gilr),
    "gilr_tanh": (lambda: GILR(DIM, "tanh"), gilr),
    "glru_scan": (lambda: GLRUScan(DIM), glru_scan),
    "glru_scan_as_released": (lambda: GLRUScan(DIM, False, True), glru_scan),
}


# --- what only it knows


@pytest.mark.usefixtures("double")
def test_the_state_of_a_bounded_indrnn_grows_gamma_fold_at_most():
    layer = IndRNN(DIM, max_length=50, gamma=5.0)
    with torch.no_grad():
        layer.weight_hh.fill_(1.5)
        layer.fc.bias.zero_()
    y, _ = layer(torch.zeros(1, 50, DIM), torch.ones(1, DIM))
    torch.testing.assert_close(y[0, -1], torch.full((DIM,), 5.0))
    y[0, -1].sum().backward()
    torch.testing.assert_close(layer.weight_hh.grad, torch.full((DIM,), 50 * 5 ** (49 / 50)))  # the way back is open


@pytest.mark.usefixtures("double")
def test_trnn_is_qrnn_of_a_linear_candidate():
    x, layer, other = torch.randn(2, T, DIM), shaken(TRNN(DIM)), QRNN(DIM, "f", 1)
    with torch.no_grad():
        other.linear.weight.copy_(torch.cat([1e-5 * layer.z_proj.weight, layer.f_proj.weight]))
        other.linear.bias.copy_(torch.cat([torch.zeros(DIM), layer.f_proj.bias]))
    torch.testing.assert_close(1e5 * other(x)[0], layer(x)[0])  # the tanh of small numbers is linear


# --- initialisation


def test_init_of_indrnn():
    layer = IndRNN(4000)
    assert_uniform(layer.weight_hh, 0, 1)
    assert_uniform(layer.fc.weight, -math.sqrt(6 / 65 / 4000), math.sqrt(6 / 65 / 4000))
    assert not layer.fc.bias.any()
    high = 5 ** (1 / 20)
    assert_uniform(IndRNN(4000, max_length=20, gamma=5).weight_hh, 0, high)
    assert_uniform(IndRNN(4000, max_length=20, gamma=5, init="long").weight_hh - 1, 1 / high - 1, high - 1)
    assert IndRNN(4).hints["weight_hh"].weight_decay is False


def test_init_of_sru():
    layer, limit = SRU(256, highway_bias=-3.0), math.sqrt(3 / 256)
    columns = layer.weight.view(256, 256, 3)
    assert_uniform(columns[..., 0], -limit, limit)
    for gate in (1, 2):
        assert_uniform(columns[..., gate], -limit * math.sqrt(0.5), limit * math.sqrt(0.5))
    assert_uniform(layer.weight_c, -math.sqrt(1.5), math.sqrt(1.5))
    assert layer.bias.tolist() == [0.0] * 256 + [-3.0] * 256
    torch.testing.assert_close(layer.scale_x, torch.tensor([math.sqrt(1 + 2 * math.exp(-3))]))
    assert SRU(8, rescale=False).scale_x == 1
    assert_uniform(SRU(256, "v1", layer_norm=True).weight, -0.1 * limit, 0.1 * limit)
    assert set(layer.state_dict()) == set(SRU(8, "v1").state_dict()) == {"weight", "weight_c", "bias", "scale_x"}


def test_init_of_qrnn_and_trnn():
    assert_uniform(QRNN(64, conv_size=4).linear.weight, -1 / 16, 1 / 16)
    assert_uniform(TRNN(64).f_proj.weight, -1 / 8, 1 / 8)
    assert TRNN(64).z_proj.bias is None


def test_init_of_gilr_and_its_lstm():
    layer = GLRUScan(64)
    for part in (GILR(64), layer.gilr):
        assert_uniform(part.linear.weight, -0.05, 0.05)
        assert not part.linear.bias.any()
    assert_uniform(layer.linear.weight, -0.05, 0.05)
    assert layer.linear.bias.tolist() == [5.0] * 64 + [0.0] * 192


# --- options

WRONG = [
    (lambda: IndRNN(0), "indrnn: dim is 0, expected at least 1"),
    (lambda: IndRNN(8, "rel"), r"indrnn: unknown activation 'rel'; did you mean 'relu'\?"),
    (lambda: IndRNN(8, max_length=0), "indrnn: max_length is 0, expected at least 1"),
    (lambda: IndRNN(8, gamma=0.5), "indrnn: gamma is 0.5, expected at least 1"),
    (lambda: IndRNN(8, init="long"), "indrnn: max_length is None, expected a number of steps because of init="),
    (lambda: SRU(0), "sru: dim is 0, expected at least 1"),
    (lambda: QRNN(0), "qrnn: dim is 0, expected at least 1"),
    (lambda: QRNN(8, "if"), r"qrnn: unknown pooling 'if'; did you mean 'ifo'\?"),
    (lambda: QRNN(8, conv_size=0), "qrnn: conv_size is 0, expected at least 1"),
    (lambda: QRNN(8, variant="nwe"), r"qrnn: unknown variant 'nwe'; did you mean 'new'\?"),
    (lambda: TRNN(0), "trnn: dim is 0, expected at least 1"),
    (lambda: TRNN(8, "lst"), r"trnn: unknown variant 'lst'; did you mean 'lstm'\?"),
    (lambda: GILR(0), "gilr: dim is 0, expected at least 1"),
    (lambda: GILR(8, "eu"), r"gilr: unknown activation 'eu'; did you mean 'elu'\?"),
]


@pytest.mark.parametrize(("build", "message"), WRONG)
def test_wrong_options_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
