"""Unitary, orthogonal and multiplicatively gated networks: equations, initial values, and what only each knows."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform, linear, sigmoid
from scanl import layers
from scanl.errors import ConfigError, ShapeError
from scanl.layers.rnn.gatedattn import GatedAttention
from scanl.layers.rnn.nnrnn import NonNormalRNN
from scanl.layers.rnn.ornn import DTriv, ExpRNN, OrthogonalRNN, ScoRNN
from scanl.layers.rnn.urlstm import URLSTM
from scanl.layers.rnn.urnn import URNN
from scanl.ops import linear_attention

pytestmark = pytest.mark.cells_by_loop


def urlstm(layer, xs):
    h, c, ys = torch.zeros(DIM), torch.zeros(DIM), []
    for x in xs:
        f, r, u, o = (layer.weight_ih @ x + layer.weight_hh @ h + layer.bias).split(DIM)
        f, r = sigmoid(f + layer.forget_bias), sigmoid(r - layer.forget_bias)
        g = r * (1 - (1 - f) ** 2) + (1 - r) * f**2
        c = g * c + (1 - g) * torch.tanh(u)
        h = sigmoid(o) * torch.tanh(c)
        ys.append(h)
    return ys


def urnn(layer, xs):
    """Factor by factor, with the transform as a sum."""
    size = layer.width
    place = torch.arange(size)
    fourier = torch.exp(-2j * math.pi * place[:, None] * place / size) / math.sqrt(size)
    v = torch.complex(layer.reflection[:, :size], layer.reflection[:, size:])
    h, ys = torch.complex(layer.h_0[0, :size], layer.h_0[0, size:]), []
    for x in xs:
        h = fourier @ (torch.exp(1j * layer.theta[0]) * h)
        h = h - 2 * v[0].conj() * (v[0] * h).sum() / (v[0].abs() ** 2).sum()
        h = fourier.conj() @ (torch.exp(1j * layer.theta[1]) * h[layer.permutation])
        h = h - 2 * v[1].conj() * (v[1] * h).sum() / (v[1].abs() ** 2).sum()
        given = x @ layer.V
        z = torch.exp(1j * layer.theta[2]) * h + torch.complex(given[:size], given[size:])
        raised = z.abs() + layer.hidden_bias
        h = z * torch.where(raised > 0, raised, 0) / (z.abs() + 1e-5)
        ys.append(torch.cat([h.real, h.imag]) @ layer.U + layer.out_bias)
    return ys


def real_modrelu(z, b):
    return torch.where(z.abs() + b > 0, torch.sign(z) * (z.abs() + b), 0)


def skew(m):
    return torch.tensor([]) if not len(m) else torch.triu(m, 1) - torch.triu(m, 1).T


def exponential(a):
    """By its series, of a part of a that is small, squared again."""
    a, term, total = a / 2**10, torch.eye(len(a)), torch.eye(len(a))
    for n in range(1, 15):
        term = term @ a / n
        total = total + term
    for _ in range(10):
        total = total @ total
    return total


def ornn(layer, xs):
    a, eye, h, ys = skew(layer.recurrent_kernel.A), torch.eye(DIM), torch.zeros(DIM), []
    w = exponential(a) if layer.recurrent_kernel.variant == "exp" else torch.linalg.inv(eye + a) @ (eye - a)
    count = round(layer.config["negative"] * DIM)
    w = layer.recurrent_kernel.base @ w @ torch.diag(torch.cat([torch.ones(DIM - count), -torch.ones(count)]))
    for x in xs:
        h = real_modrelu(h @ w + layer.input_kernel.weight @ x, layer.nonlinearity.b)
        ys.append(h)
    return ys


def nnrnn(layer, xs):
    p, middle = exponential(skew(layer.log_P)), torch.triu(layer.UppT, 1).clone()
    for j in range(DIM // 2):
        turn = torch.stack([layer.theta[j].cos(), -layer.theta[j].sin(), layer.theta[j].sin(), layer.theta[j].cos()])
        middle[2 * j : 2 * j + 2, 2 * j : 2 * j + 2] += layer.alpha[j] * turn.view(2, 2)
    h, ys = torch.zeros(DIM), []
    for x in xs:
        h = real_modrelu(h @ p @ middle @ p.T + layer.U.weight @ x, layer.nonlinearity.b)
        ys.append(h)
    return ys


def gatedattn(layer, xs):
    h, ys = torch.zeros(layer.width), []
    for x in xs:
        h = torch.exp(-torch.exp(layer.nu_log)) * h + linear(layer.in_m, x) * linear(layer.in_x, x)
        ys.append(layer.readout.weight @ ((layer.out_m.weight @ h) * (layer.out_x.weight @ h)))
    return ys


EQUATIONS = {
    "urlstm": (lambda: URLSTM(DIM), urlstm),
    "urnn": (lambda: URNN(DIM), urnn),
    "urnn_wide": (lambda: URNN(DIM, 11), urnn),
    "ornn": (lambda: OrthogonalRNN(DIM, "cayley", "henaff"), ornn),
    "exprnn": (lambda: ExpRNN(DIM), ornn),
    "dtriv": (lambda: DTriv(DIM), ornn),
    "scornn": (lambda: ScoRNN(DIM), ornn),
    "nnrnn": (lambda: NonNormalRNN(DIM), nnrnn),
    "gatedattn": (lambda: GatedAttention(DIM, 6, 5), gatedattn),
}


# --- what only one of them knows


def test_a_refined_gate_lies_between_its_bounds():
    """Read off one step from c = 1 with the candidate at 0."""
    layer = URLSTM(64)
    for parameter in (layer.weight_ih, layer.weight_hh):
        torch.nn.init.zeros_(parameter)
    torch.nn.init.normal_(layer.bias[:128], std=3)
    _, state = layer.step(torch.zeros(1, 64), torch.stack([torch.zeros(1, 64), torch.ones(1, 64)], 1))
    f = torch.sigmoid(layer.bias[:64] + layer.forget_bias)
    assert (f**2 - 1e-6 <= state[0, 1]).all()
    assert (state[0, 1] <= 1 - (1 - f) ** 2 + 1e-6).all()


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


@pytest.mark.usefixtures("double")
def test_rebase_leaves_the_matrix_where_it_is():
    for make in (ExpRNN, ScoRNN, DTriv):
        layer = make(DIM)
        torch.nn.init.normal_(layer.recurrent_kernel.A)
        w = layer.recurrent_kernel()
        layer.rebase()
        torch.testing.assert_close(layer.recurrent_kernel(), w)
        assert not layer.recurrent_kernel.A.any()


@pytest.mark.usefixtures("double")
def test_nnrnn_without_its_transients_is_orthogonal():
    layer, plain, x = NonNormalRNN(DIM), ExpRNN(DIM), torch.randn(2, 9, DIM)
    with torch.no_grad():
        plain.recurrent_kernel.A.zero_()
        plain.recurrent_kernel.base.copy_(layer.recurrent_matrix())
        plain.input_kernel.weight.copy_(layer.U.weight)
        plain.nonlinearity.b.copy_(layer.nonlinearity.b)
    torch.testing.assert_close(layer(x), plain(x))
    assert layer.penalty() == 0
    torch.nn.init.constant_(layer.alpha, 1.5)
    torch.testing.assert_close(layer.penalty(), torch.tensor(0.25 * DIM / 2))


def test_a_learned_initial_state_is_trained():
    layer = URNN(DIM)
    layer(torch.randn(2, 3, DIM))[0].sum().backward()
    assert layer.h_0.grad.all()
    torch.testing.assert_close(layer.init_state(2).flatten(1), layer.h_0.expand(2, -1))


@pytest.mark.usefixtures("double")
def test_gated_attention_is_linear_attention():
    layer, x, weights = GatedAttention(3, 12, 9), torch.randn(2, 7, 3), torch.randn(3, 3, 3)
    layer.set_attention(*weights)
    q, k, v = (x @ w.T for w in weights)
    expected, _ = linear_attention(q[:, :, None], k[:, :, None], v[:, :, None], scale=1.0)
    torch.testing.assert_close(layer(x)[0], expected[:, :, 0])
    with pytest.raises(ConfigError, match="gatedattn: width is 3, expected 12 because of dim=3"):
        GatedAttention(3).set_attention(*weights)
    with pytest.raises(ShapeError, match=r"gatedattn: key has shape \(2, 3\), expected \(3, 3\)"):
        layer.set_attention(weights[0], weights[1][:2], weights[2])


# --- initialisation


def test_init_of_urlstm():
    layer = URLSTM(256)
    for weight in (layer.weight_ih, layer.weight_hh):
        assert_uniform(weight, -1 / 16, 1 / 16)
    assert not layer.bias.any()
    assert_uniform(layer.forget_bias.sigmoid(), 1 / 256, 255 / 256)


def test_init_of_urnn():
    layer = URNN(64, 32)
    limit = math.sqrt(6 / 128)
    assert_uniform(layer.V, -limit, limit)
    assert_uniform(layer.U, -limit, limit)
    assert_uniform(layer.reflection, -math.sqrt(6 / 66), math.sqrt(6 / 66))
    assert_uniform(layer.theta, -math.pi, math.pi)
    assert_uniform(layer.hidden_bias, -0.01, 0.01)
    assert_uniform(layer.h_0, -math.sqrt(3 / 64), math.sqrt(3 / 64))
    assert not layer.out_bias.any()
    assert sorted(layer.permutation.tolist()) == list(range(32))


def blocks_of(a):
    """The numbers of the 2 × 2 blocks, after a look that there is nothing else."""
    found = a.diagonal(1)[::2]
    rest = a.clone()
    for j in range(len(found)):
        torch.testing.assert_close(rest[2 * j + 1, 2 * j], -found[j])
        rest[2 * j, 2 * j + 1] = rest[2 * j + 1, 2 * j] = 0
    assert not rest.any()
    return found


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


def test_init_of_gated_attention():
    layer = GatedAttention(64, 512)
    assert_uniform((-layer.nu_log.exp()).exp(), 0, 1)
    assert_uniform(layer.in_m.weight, -1 / 8, 1 / 8)


# --- options

WRONG = [
    (lambda: URLSTM(1), "urlstm: dim is 1, expected at least 2"),
    (lambda: URNN(8, 0), "urnn: width is 0, expected at least 1"),
    (lambda: OrthogonalRNN(8, "cayly"), r"ornn: unknown variant 'cayly'; did you mean 'cayley'\?"),
    (lambda: ExpRNN(8, init="henaf"), r"exprnn: unknown init 'henaf'; did you mean 'henaff'\?"),
    (lambda: layers.build("scornn", 8, negative=2.0), "scornn: negative is 2.0, expected 0 to 1"),
    (lambda: NonNormalRNN(7), "nnrnn: dim is 7, expected an even number of at least 2"),
    (lambda: NonNormalRNN(8, "haar"), "nnrnn: unknown init 'haar'"),
    (lambda: GatedAttention(8, 0), "gatedattn: width is 0, expected at least 1"),
]


@pytest.mark.parametrize(("build", "message"), WRONG)
def test_wrong_options_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
