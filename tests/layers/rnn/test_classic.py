"""Classic recurrences: Jordan networks, reservoirs, equilibria, linear systems, constant decay."""

import pytest
import torch

from by_hand import DIM, T, assert_normal, assert_uniform, linear, shaken, sigmoid
from scanl import layers
from scanl.errors import ConfigError
from scanl.layers import GLA
from scanl.layers.memory.expdecay import ExpDecay
from scanl.layers.rnn.esn import ESN
from scanl.layers.rnn.implicit import Implicit
from scanl.layers.rnn.jordan import Jordan
from scanl.layers.ssm.linrnn_lti import LinRNNLTI
from scanl.ops import ConvergenceError

pytestmark = pytest.mark.cells_by_loop

PHI = {"tanh": torch.tanh, "sigmoid": sigmoid, "identity": lambda v: v}


def jordan(layer, xs):
    u, ys = torch.zeros(DIM), []
    for x in xs:
        s = torch.tanh(layer.A @ u + linear(layer.B, x))
        y = PHI[layer.activation](linear(layer.C, s))
        u = layer.alpha * u + y
        ys.append(y)
    return ys


def esn(layer, xs):
    s, ys = torch.zeros(layer.width), []
    for x in xs:
        s = (1 - layer.leak) * s + layer.leak * torch.tanh(layer.W @ s + layer.Win @ x + layer.bias)
        ys.append(linear(layer.readout, s))
    return ys


def implicit(layer, xs):
    """The map applied until nothing changes."""
    ys = []
    for x in xs:
        s = torch.zeros(DIM)
        for _ in range(400):
            s = torch.tanh(layer.W @ s + linear(layer.U, x))
        ys.append(s)
    return ys


def linrnn_lti(layer, xs):
    a = torch.complex(layer.lambda_re, layer.lambda_im)
    b, c = torch.complex(layer.B_re, layer.B_im), torch.complex(layer.C_re, layer.C_im)
    s, ys = torch.zeros(layer.state_dim, dtype=torch.complex128), []
    for x in xs:
        s = a * s + b @ x.to(s.dtype)
        ys.append((c @ s).real + layer.D * x)
    return ys


def expdecay(layer, xs):
    H, K = layer.num_heads, DIM // layer.num_heads
    S, ys = torch.zeros(H, K, K), []
    for x in xs:
        q, k, v = (linear(project, x).view(H, K) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
        S = sigmoid(layer.decay)[..., None] * S + k[..., None] * v[:, None]
        ys.append(linear(layer.o_proj, (S * q[..., None]).sum(1).flatten()))
    return ys


EQUATIONS = {
    "jordan": (lambda: Jordan(DIM), jordan),
    "jordan_units": (lambda: Jordan(DIM, 5, 0.6, "sigmoid"), jordan),
    "jordan_linear": (lambda: Jordan(DIM, activation="identity"), jordan),
    "esn": (lambda: ESN(DIM, connectivity=0.3, input_connectivity=0.5), esn),
    "esn_leaky": (lambda: ESN(DIM, 10, 0.9, 0.3, 0.5, 0.5, 0.7, 0.2), esn),
    "implicit": (lambda: Implicit(DIM), implicit),
    "implicit_broyden": (lambda: Implicit(DIM, 0.3, "broyden"), implicit),
    "linrnn_lti": (lambda: LinRNNLTI(DIM, 6), linrnn_lti),
    "expdecay": (lambda: ExpDecay(DIM, 2), expdecay),
}


# --- what only it knows


@pytest.mark.usefixtures("double")
def test_jordan_without_feedback_sees_one_step():
    layer, x = Jordan(DIM, 5), torch.randn(2, T, DIM)
    with torch.no_grad():
        layer.A.zero_()
    torch.testing.assert_close(layer(x)[0], torch.tanh(layer.C(torch.tanh(layer.B(x)))))


@pytest.mark.usefixtures("double")
def test_a_reservoir_forgets_where_it_started():
    """Two states come together under the same input; with a radius far above 1 and no input they do not."""
    layer, x = ESN(DIM, 40, spectral_radius=0.8, leak=0.5), torch.randn(1, 200, DIM)
    one, other = (layer(x, 3 * torch.randn(1, 40))[1] for _ in range(2))
    assert (one - other).abs().max() < 1e-5
    wild, still = ESN(DIM, 40, spectral_radius=3.0, connectivity=0.5), torch.zeros(1, 200, DIM)
    one, other = (wild(still, torch.randn(1, 40))[1] for _ in range(2))
    assert (one - other).abs().max() > 0.1


@pytest.mark.usefixtures("double")
def test_reservoirs_are_deep_and_bidirectional_by_the_wrappers():
    x = torch.randn(2, T, DIM)
    both = layers.build("bidirectional", DIM, layer="esn", layer_options={"width": 10})
    assert both(x)[0].shape == x.shape
    assert not torch.equal(both.forward_layer.W, both.backward_layer.W)
    assert [name for name, _ in both.named_parameters() if "readout" not in name] == []


@pytest.mark.usefixtures("double")
def test_the_start_of_the_solver_changes_nothing_but_the_iterations():
    layer, x = shaken(Implicit(DIM, tolerance=1e-12)), torch.randn(2, T, DIM)
    y, last = layer(x)
    torch.testing.assert_close(layer(x, torch.randn(2, DIM))[0], y, rtol=0, atol=1e-10)
    torch.testing.assert_close(last, y[:, -1])
    hasty = Implicit(DIM, tolerance=1e-12, max_iterations=1)
    hasty.load_state_dict(layer.state_dict())
    hasty(x[:, :1], y[:, 0])  # from the solution itself, one evaluation is enough
    with pytest.raises(ConvergenceError, match="did not converge in 1 iterations"):
        hasty(x[:, :1])


@pytest.mark.usefixtures("double")
def test_the_gradient_of_an_equilibrium_is_that_of_a_long_unrolling():
    layer, x = shaken(Implicit(DIM)), torch.randn(1, 3, DIM)
    found = torch.autograd.grad(layer(x)[0].square().sum(), tuple(layer.parameters()))
    expected = torch.autograd.grad(torch.stack(implicit(layer, x[0])).square().sum(), tuple(layer.parameters()))
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("double")
def test_a_linear_system_is_a_convolution_and_a_dense_recurrence():
    layer, x = LinRNNLTI(DIM, 6), torch.randn(1, T, DIM)
    a, b, c = (torch.complex(getattr(layer, f"{n}_re"), getattr(layer, f"{n}_im")) for n in ("lambda", "B", "C"))
    y = layer(x)[0][0]
    kernel = [(c @ torch.diag(a**j) @ b).real + (torch.diag(layer.D) if j == 0 else 0) for j in range(T)]
    convolved = torch.stack([sum(kernel[j] @ x[0, t - j] for j in range(t + 1)) for t in range(T)])
    torch.testing.assert_close(y, convolved)
    P = torch.randn(6, 6, dtype=torch.complex128)
    A, B, C = P @ torch.diag(a) @ P.inverse(), P @ b, c @ P.inverse()
    s, dense = torch.zeros(6, dtype=torch.complex128), []
    for step in x[0]:
        s = A @ s + B @ step.to(s.dtype)
        dense.append((C @ s).real + layer.D * step)
    torch.testing.assert_close(y, torch.stack(dense))


@pytest.mark.usefixtures("double")
def test_expdecay_is_gla_with_a_constant_decay():
    layer, x = ExpDecay(DIM, 2), torch.randn(2, T, DIM)
    gla = GLA(DIM, 1.0, 1.0, 2, output_gate=False, gate_logit_normalizer=1)
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(gla, name).weight.copy_(getattr(layer, name).weight)
        gla.gk_proj[0].weight.zero_()
        gla.gk_proj[1].bias.copy_(layer.decay.flatten())
        for each in (layer, gla):
            each.o_proj.weight.copy_(torch.eye(DIM))
    y = layer(x)[0].view(2, T, 2, -1) / 2  # GLA divides by sqrt(K)
    rms = torch.sqrt((y**2).mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(gla(x)[0].view_as(y), y / rms)


# --- initialisation


def test_init_of_a_reservoir():
    torch.manual_seed(0)
    layer = ESN(50, spectral_radius=0.9, connectivity=0.2, input_connectivity=0.3, input_scaling=0.5, bias_scaling=0.1)
    assert layer.W.shape == (200, 200)
    torch.testing.assert_close(torch.linalg.eigvals(layer.W.double()).abs().max().item(), 0.9, rtol=1e-5, atol=0)
    weights = layer.W[layer.W != 0]
    assert abs(len(weights) / 200**2 - 0.2) < 5 * 0.4 / 200
    assert_normal(weights / weights.std(), 1.0)
    assert set(layer.Win.unique().tolist()) == {-0.5, 0.0, 0.5}
    assert abs((layer.Win != 0).float().mean() - 0.3) < 5 * 0.46 / 100
    assert abs((layer.Win > 0).sum() / (layer.Win != 0).sum() - 0.5) < 5 * 0.5 / 54
    torch.testing.assert_close(layer.bias.abs(), torch.full((200,), 0.1))
    default = ESN(50)
    torch.testing.assert_close(torch.linalg.eigvals(default.W.double()).abs().max().item(), 1.0, rtol=1e-5, atol=0)
    assert (default.leak, default.bias.any().item()) == (1.0, False)
    assert [name for name, _ in layer.named_parameters()] == ["readout.weight", "readout.bias"]


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


# --- options

WRONG = [
    (lambda: Jordan(8, 0), "jordan: hidden_dim is 0, expected at least 1"),
    (lambda: Jordan(8, alpha=1.0), "jordan: alpha is 1.0, expected less than 1"),
    (lambda: Jordan(8, activation="tan"), r"jordan: unknown activation 'tan'; did you mean 'tanh'\?"),
    (lambda: ESN(8, 0), "esn: width is 0, expected at least 1"),
    (lambda: ESN(8, leak=0.0), "esn: leak is 0.0, expected more than 0"),
    (lambda: ESN(8, spectral_radius=-1.0), "esn: spectral_radius is -1.0, expected at least 0"),
    (lambda: ESN(8, input_connectivity=2.0), "esn: input_connectivity is 2.0, expected 0 to 1"),
    (lambda: Implicit(0), "implicit: dim is 0, expected at least 1"),
    (lambda: Implicit(8, gain=1.0), "implicit: gain is 1.0, expected less than 1"),
    (lambda: LinRNNLTI(8, 0), "linrnn_lti: state_dim is 0, expected at least 1"),
    (lambda: LinRNNLTI(8, r_max=1.0), "linrnn_lti: r_max is 1.0, expected less than 1"),
    (lambda: ExpDecay(8, 3), "expdecay: num_heads is 3, expected a divisor of dim=8"),
]


@pytest.mark.parametrize(("build", "message"), WRONG)
def test_wrong_options_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
