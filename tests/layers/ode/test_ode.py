"""Networks in continuous time: each layer against its equation, how it starts, and what only it knows."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform, linear, sigmoid
from scanl import layers
from scanl.errors import ConfigError
from scanl.layers.ode.antisym import AntisymmetricRNN
from scanl.layers.ode.cornn import CoRNN
from scanl.layers.ode.lem import LEM
from scanl.layers.ode.lipschitz import Lipschitz
from scanl.layers.ode.noisy import NoisyRNN
from scanl.layers.ode.nwm import NeuralWaveMachine
from scanl.layers.ode.unicornn import UnICORNN
from scanl.layers.ode.wrnn import WaveRNN

pytestmark = pytest.mark.cells_by_loop


def cornn(layer, xs):
    y, z, ys = torch.zeros(DIM), torch.zeros(DIM), []
    for x in xs:
        force = torch.tanh(layer.i2h.weight @ torch.cat([x, z, y]) + layer.i2h.bias) - layer.gamma * y
        if layer.variant == "implicit":
            z = (z + layer.dt * force) / (1 + layer.dt * layer.damping)
        else:
            z = z + layer.dt * (force - layer.damping * z)
        y = y + layer.dt * z
        ys.append(y)
    return ys


def lem(layer, xs):
    y, z, ys = torch.zeros(DIM), torch.zeros(DIM), []
    for x in xs:
        v1, v2, v_y, v_z = linear(layer.inp2hid, x).split(DIM)
        w1, w2, w_z = linear(layer.hid2hid, y).split(DIM)
        long, short = layer.dt * sigmoid(v2 + w2), layer.dt * sigmoid(v1 + w1)
        z = (1 - long) * z + long * torch.tanh(w_z + v_z)
        y = (1 - short) * y + short * torch.tanh(linear(layer.transform_z, z) + v_y)
        ys.append(y)
    return ys


def unicornn(layer, xs):
    y, z, ys = torch.zeros(DIM), torch.zeros(DIM), []
    for x in xs:
        step = layer.dt * sigmoid(layer.c_)
        z = z - step * (torch.tanh(layer.weight_hh * y + linear(layer.fc, x)) + layer.alpha * y)
        y = y + step * z
        ys.append(y)
    return ys


def part_skew(m, beta, gamma):
    """The matrix that multiplies a row, element by element."""
    size = len(m)
    return torch.stack(
        [
            torch.stack(
                [(1 - beta) * (m[i, j] + m[j, i]) + beta * (m[i, j] - m[j, i]) - gamma * (i == j) for j in range(size)]
            )
            for i in range(size)
        ]
    )


def lipschitz(layer, xs):
    a, w = part_skew(layer.B, layer.beta, layer.gamma), part_skew(layer.C, layer.beta, layer.gamma)
    h, ys = torch.zeros(DIM), []

    def slope(h, x):
        change = layer.alpha * (h @ a) + torch.tanh(h @ w + linear(layer.E, x))
        return change * sigmoid(h @ w + linear(layer.E_gate, x)) if layer.config["gated"] else change

    for x in xs:
        half = h + layer.dt / 2 * slope(h, x)
        h = h + layer.dt * slope(half if layer.method == "midpoint" else h, x)
        ys.append(h)
    return ys


def antisym(layer, xs):
    h, ys = torch.zeros(DIM), []
    w = layer.W - layer.W.T - layer.gamma * torch.eye(DIM)
    for x in xs:
        gate = sigmoid(w @ h + linear(layer.V_z, x)) if layer.config["gated"] else 1
        h = h + layer.dt * gate * torch.tanh(w @ h + linear(layer.V, x))
        ys.append(h)
    return ys


def noisy(layer, xs):
    h, ys = torch.zeros(DIM), []
    a, w = part_skew(layer.B, layer.beta, layer.gamma), part_skew(layer.C, layer.beta, layer.gamma)
    for x in xs:
        h = h + layer.d * (layer.alpha * (h @ a) + torch.tanh(h @ w + linear(layer.E, x)))
        ys.append(h)
    return ys


def nwm(layer, xs):
    size = layer.side
    y, z, ys = torch.zeros(size, size), torch.zeros(size, size), []
    dt, gamma, epsilon = layer.dt, getattr(layer, "gamma", 0), getattr(layer, "damping", 0)
    if layer.trained:
        dt, gamma, epsilon = sigmoid(layer.dt), torch.relu(layer.gamma), torch.relu(layer.alpha)

    def near(conv, grid, i, j):
        kernel = conv.weight[0, 0]
        rows, columns = kernel.shape
        return conv.bias[0] + sum(
            kernel[k, m] * grid[(i + k - rows // 2) % size, (j + m - columns // 2) % size]
            for k in range(rows)
            for m in range(columns)
        )

    for x in xs:
        given, new = linear(layer.Wx, x).view(size, size), torch.zeros(size, size)
        for i in range(size):
            for j in range(size):
                force = torch.tanh(given[i, j] + near(layer.Wz, z, i, j) + near(layer.Wy, y, i, j))
                new[i, j] = (z[i, j] + dt * (force - gamma * y[i, j] - epsilon * z[i, j])).squeeze()
        z = new
        y = y + dt * z
        ys.append(linear(layer.readout, y.flatten()))
    return ys


def wrnn(layer, xs):
    act = {"relu": lambda v: torch.where(v > 0, v, 0), "tanh": torch.tanh, "ident": lambda v: v}[layer.activation]
    size, kernel = layer.width, layer.Wy.kernel_size[0]
    h, ys = torch.zeros(layer.num_channels, size), []
    for x in xs:
        given, new = linear(layer.Wx, x).view(layer.num_channels, size), torch.zeros(layer.num_channels, size)
        for o in range(layer.num_channels):
            for n in range(size):
                new[o, n] = act(
                    given[o, n] + layer.Wy.bias[o] + sum(
                        layer.Wy.weight[o, i, k] * h[i, (n + k - kernel // 2) % size]
                        for i in range(layer.num_channels)
                        for k in range(kernel)
                    )
                )  # fmt: skip
        h = new
        ys.append(linear(layer.readout, h.flatten()))
    return ys


EQUATIONS = {
    "cornn": (lambda: CoRNN(DIM, 0.3), cornn),
    "cornn_implicit": (lambda: CoRNN(DIM, 0.3, variant="implicit"), cornn),
    "lem": (lambda: LEM(DIM, 0.7), lem),
    "unicornn": (lambda: UnICORNN(DIM), unicornn),
    "lipschitz": (lambda: Lipschitz(DIM, 0.3, 0.6, 0.2, 0.7), lipschitz),
    "lipschitz_midpoint": (lambda: Lipschitz(DIM, 0.3, method="midpoint"), lipschitz),
    "lipschitz_gated": (lambda: Lipschitz(DIM, 0.3, gated=True), lipschitz),
    "antisym": (lambda: AntisymmetricRNN(DIM, 0.3, 0.2), antisym),
    "antisym_gated": (lambda: AntisymmetricRNN(DIM, 0.3, gated=True), antisym),
    "noisy": (lambda: NoisyRNN(DIM, 0.3, 0.6, 0.2, 0.1, 0.7), noisy),
    "nwm": (lambda: NeuralWaveMachine(DIM, 3, dt=0.3), nwm),
    "nwm_rings": (lambda: NeuralWaveMachine(DIM, 3, "rings", trained=True), nwm),
    "wrnn": (lambda: WaveRNN(DIM, 4, 2, 5), wrnn),
    "wrnn_tanh": (lambda: WaveRNN(DIM, activation="tanh"), wrnn),
}


# --- what only one of them knows

TIMED = ["cornn", "lem", "unicornn", "lipschitz", "antisym", "noisy", "nwm"]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", TIMED)
def test_timespans_are_lengths_of_steps(name):
    """A layer with steps twice as long is the layer with timespans of 2; and each step has its own length."""
    layer, x, spans = layers.build(name, DIM), torch.randn(2, 4, DIM), 0.5 + torch.rand(2, 4)
    once, doubled = layer(x, timespans=torch.full((2, 4), 2.0))[0], layers.build(name, DIM)
    doubled.load_state_dict(layer.state_dict())
    if name == "noisy":
        torch.nn.init.constant_(doubled.d, 0.2)
    else:
        option = "dt" if hasattr(layer, "dt") else "eps"
        setattr(doubled, option, 2 * getattr(layer, option))
    torch.testing.assert_close(doubled(x)[0], once)
    whole, state = layer(x, timespans=spans)[0], None
    for t in range(4):
        y, state = layer(x[:, t : t + 1], state, timespans=spans[:, t : t + 1])
        torch.testing.assert_close(y[:, 0], whole[:, t])


@pytest.mark.usefixtures("double")
def test_unicornn_can_be_run_backwards():
    """From its last state and its inputs, the authors' backward pass has every earlier state."""
    layer, x = UnICORNN(DIM), torch.randn(1, 2000, DIM)
    inputs, step = layer.fc(x), layer.dt * layer.c_.sigmoid()
    y, z = layer(x)[1].unbind(1)
    for t in reversed(range(2000)):
        y = y - step * z
        z = z + step * (torch.tanh(layer.weight_hh * y + inputs[:, t]) + layer.alpha * y)
    torch.testing.assert_close(torch.stack([y, z]), torch.zeros(2, 1, DIM), atol=1e-9, rtol=0)


@pytest.mark.usefixtures("double")
def test_lipschitz_without_a_linear_part_is_antisymmetric():
    ours, theirs, x = AntisymmetricRNN(DIM, 0.1, 0.2), Lipschitz(DIM, 0.1, 1.0, 0.2, 0.0), torch.randn(2, 9, DIM)
    with torch.no_grad():
        theirs.C.copy_(ours.W.T)
        theirs.E.load_state_dict(ours.V.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.usefixtures("double")
def test_antisym_has_nearly_imaginary_eigenvalues():
    w = AntisymmetricRNN(DIM, gamma=0.1).operands(torch.zeros(1, 1, DIM), torch.ones(1, 1, 1))[2]
    torch.testing.assert_close(torch.linalg.eigvals(w).real, torch.full((DIM,), -0.1))


@pytest.mark.usefixtures("double")
def test_noise_is_drawn_in_training_alone():
    quiet, x = NoisyRNN(DIM), torch.randn(2, 30, DIM)
    expected = quiet(x)[0]
    for levels in ({"add_noise": 0.3}, {"mult_noise": 0.5}):
        layer = NoisyRNN(DIM, **levels)
        layer.load_state_dict(quiet.state_dict())
        first, second = layer(x)[0], layer(x)[0]
        assert not torch.equal(first, second)
        assert (first - expected).abs().max() > 0.01
        torch.manual_seed(3)
        first = layer(x)[0]
        torch.manual_seed(3)
        assert torch.equal(layer(x)[0], first)
        layer.eval()
        assert torch.equal(layer(x)[0], expected)


@pytest.mark.usefixtures("double")
def test_noise_has_its_declared_distribution():
    layer, x = NoisyRNN(64, add_noise=0.3, mult_noise=0.4), torch.zeros(8, 50, 64)
    _, step, *_, noise = layer.operands(x, torch.ones(8, 50, 1))
    assert_normal(noise, 0.3)
    assert_uniform(step / 0.1, 0.6, 1.0)
    torch.nn.init.zeros_(layer.d)  # a state that does not move sums the noise
    torch.manual_seed(0)
    y, _ = layer(x)
    torch.manual_seed(0)
    torch.testing.assert_close(y, layer.operands(x, torch.ones(8, 50, 1))[-1].cumsum(1))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("variant", ["torus", "rings"])
def test_nwm_is_a_cornn_with_circulant_weights(variant):
    size = 3
    layer, dense = NeuralWaveMachine(9, size, variant, dt=0.3), CoRNN(9, 0.3)
    rows, columns = layer.Wy.kernel_size
    eye = torch.eye(9).view(9, 1, size, size)
    padded = torch.nn.functional.pad(eye, (columns // 2, columns // 2, rows // 2, rows // 2), mode="circular")
    with torch.no_grad():
        torch.nn.init.eye_(layer.readout.weight)
        torch.nn.init.zeros_(layer.readout.bias)
        whole = [layer.Wx.weight]
        for conv in (layer.Wz, layer.Wy):
            whole.append(torch.nn.functional.conv2d(padded, conv.weight).view(9, 9).T)
        dense.i2h.weight.copy_(torch.cat(whole, 1))
        dense.i2h.bias.copy_(layer.Wx.bias + layer.Wy.bias + layer.Wz.bias)
    x = torch.randn(2, 9, 9)
    torch.testing.assert_close(layer(x)[0], dense(x)[0])


def test_a_pulse_of_a_wave_rnn_travels_one_site_each_step():
    layer = WaveRNN(3, width=5)
    torch.nn.init.zeros_(layer.Wy.bias)
    _, state = layer(torch.tensor([[[0.0, 2.0, 0.0]]]))
    places = []
    for _ in range(6):
        torch.testing.assert_close(state.sum(), torch.tensor(2.0))
        places.append(state.argmax().item())
        _, state = layer.step(torch.zeros(1, 3), state)
    assert places == [0, 4, 3, 2, 1, 0]


# --- initialisation


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


# --- options

WRONG = [
    (lambda: CoRNN(8, 0), "cornn: dt is 0, expected more than 0"),
    (lambda: CoRNN(8, gamma=-1), "cornn: gamma is -1, expected at least 0"),
    (lambda: CoRNN(8, variant="implict"), r"cornn: unknown variant 'implict'; did you mean 'implicit'\?"),
    (lambda: LEM(8, -0.5), "lem: dt is -0.5, expected more than 0"),
    (lambda: UnICORNN(8, alpha=-1), "unicornn: alpha is -1, expected at least 0"),
    (lambda: Lipschitz(8, beta=1.5), "lipschitz: beta is 1.5, expected 0 to 1"),
    (lambda: Lipschitz(8, method="midpont"), r"lipschitz: unknown method 'midpont'; did you mean 'midpoint'\?"),
    (lambda: AntisymmetricRNN(8, gamma=-1), "antisym: gamma is -1, expected at least 0"),
    (lambda: NoisyRNN(8, mult_noise=2), "noisy: mult_noise is 2, expected 0 to 1"),
    (lambda: NoisyRNN(8, add_noise=-2), "noisy: add_noise is -2, expected at least 0"),
    (lambda: NeuralWaveMachine(8, 0), "nwm: side is 0, expected at least 1"),
    (lambda: NeuralWaveMachine(8, variant="rngs"), r"nwm: unknown variant 'rngs'; did you mean 'rings'\?"),
    (lambda: WaveRNN(8, num_channels=9), "wrnn: num_channels is 9, expected at most dim=8 where width is None"),
    (lambda: WaveRNN(8, conv_size=4), "wrnn: conv_size is 4, expected an odd number of at least 1"),
    (lambda: WaveRNN(8, activation="rel"), r"wrnn: unknown activation 'rel'; did you mean 'relu'\?"),
    (lambda: WaveRNN(8, init="fw"), r"wrnn: unknown init 'fw'; did you mean 'fwd'\?"),
]


@pytest.mark.parametrize(("build", "message"), WRONG)
def test_wrong_options_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
