"""NeuralODE: its equation step by step, what only it knows, and what it refuses."""

import sys
from functools import partial

import pytest
import torch

from by_hand import DIM, shaken
from scanl.errors import ConfigError
from scanl.layers.ode.neuralode import SOLVERS, NeuralODE
from tests.layers.ode.equations import along, moved, ones

pytestmark = pytest.mark.cells_by_loop


def neuralode(layer, xs, spans=None):
    h, ys = torch.zeros(DIM), []
    for x, span in zip(xs, spans if spans is not None else ones(xs), strict=True):
        flow = partial(lambda x, h: along(layer.func, torch.cat([h, x])), x)
        h = moved(flow, h, span, layer.method, layer.substeps)
        ys.append(h)
    return ys


def nearly_linear(layer):
    """f = A h + B x to nine digits, because tanh is the identity near 0."""
    with torch.no_grad():
        for weight in (layer.func.first.weight, layer.func.last.weight):
            torch.nn.init.normal_(weight, 0, 0.3)
        layer.func.first.weight.mul_(1e-5)
        layer.func.last.weight.mul_(1e5)
    into_h, into_x = (layer.func.last.weight @ layer.func.first.weight).detach().split(DIM, 1)
    return into_h, into_x


EQUATIONS = {
    "neuralode": (lambda: NeuralODE(DIM), neuralode),
    "neuralode_euler": (lambda: NeuralODE(DIM, 5, 2, "euler", 3), neuralode),
    "neuralode_midpoint": (lambda: NeuralODE(DIM, 5, 1, "midpoint", 2), neuralode),
}

REFUSED = [
    (lambda: NeuralODE(8, method="dopri"), "neuralode: unknown method 'dopri'; did you mean 'dopri"),
    (lambda: NeuralODE(8, hidden_dim=0), "neuralode: hidden_dim is 0, expected at least 1"),
    (lambda: NeuralODE(8, rtol=0.0), "neuralode: rtol is 0.0, expected more than 0"),
    (lambda: NeuralODE(8, adjoint=True), "neuralode: adjoint is True, expected False because of method='rk4'"),
]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("midpoint", 2), ("rk4", 4)])
def test_fixed_steps_converge_with_their_order(method, order):
    """Half the length of the steps: 2 to the order times nearer to the solution."""
    layer, x = shaken(NeuralODE(DIM, method=method), 0.5), torch.randn(1, 2, DIM)
    ys = []
    for substeps in (4, 8, 16, 512):
        layer.substeps = substeps
        ys.append(layer(x)[0])
    coarse, middle, fine = ((y - ys[3]).abs().max() for y in ys[:3])
    assert 0.8 * 2**order < coarse / middle < 1.25 * 2**order
    assert 0.8 * 2**order < middle / fine < 1.25 * 2**order


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("method", ["euler", "midpoint"])
def test_fixed_steps_are_those_of_torchdiffeq(method):
    """Its "rk4" is another method of the fourth order, with thirds."""
    torchdiffeq = pytest.importorskip("torchdiffeq", reason="needs the extra `ode`")
    layer, x, h = shaken(NeuralODE(DIM, 5, 1, method, 4), 0.5), torch.randn(2, 1, DIM), torch.randn(2, DIM)
    _, last = layer(x, h)

    def flow(_, h):
        return torch.stack([along(layer.func, torch.cat(pair)) for pair in zip(h, x[:, 0], strict=True)])

    theirs = torchdiffeq.odeint(flow, h, torch.tensor([0.0, 1.0]), method=method, options={"step_size": 0.25})[1]
    torch.testing.assert_close(last, theirs, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("method", ["rk4", *SOLVERS])
def test_a_linear_ode_is_a_matrix_exponential(method):
    if method in SOLVERS:
        pytest.importorskip("torchdiffeq", reason="needs the extra `ode`")
    layer = NeuralODE(DIM, method=method, substeps=20, rtol=1e-5, atol=1e-6)
    into_h, into_x = nearly_linear(layer)
    x, h, span = torch.randn(2, 1, DIM), torch.randn(2, DIM), torch.tensor([[0.5], [1.5]])
    _, last = layer(x, h, timespans=span)
    for row in range(2):  # of the system that has x as a part of its state
        whole = torch.zeros(2 * DIM, 2 * DIM)
        whole[:DIM] = torch.cat([into_h, into_x], 1)
        expected = torch.linalg.matrix_exp(span[row] * whole) @ torch.cat([h[row], x[row, 0]])
        torch.testing.assert_close(last[row], expected[:DIM], rtol=0, atol=5e-3)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("method", ["dopri5", "dopri8", "bosh3"])
def test_an_adaptive_solver_keeps_its_tolerance_at_the_end_of_a_step(method):
    """Within ten tolerances of scipy's solution. A solution interpolated there misses by up to 900."""
    pytest.importorskip("torchdiffeq", reason="needs the extra `ode`")
    solve_ivp = pytest.importorskip("scipy.integrate", reason="needs the extra `series`").solve_ivp
    torch.manual_seed(0)
    layer, x, spans = NeuralODE(3, 8, 0, method), torch.randn(1, 3, 3), torch.tensor([[0.3, 1.0, 2.5]])
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    first, last, expected, h = layer.func.first, layer.func.last, [], torch.zeros(3)
    for now, span in zip(x[0], spans[0].tolist(), strict=True):

        def flow(_, h, now=now):
            return last(first(torch.cat([torch.from_numpy(h), now])).tanh()).detach().numpy()

        h = torch.from_numpy(solve_ivp(flow, (0, span), h.numpy(), "DOP853", rtol=1e-13, atol=1e-14).y[:, -1])
        expected.append(h)
    torch.testing.assert_close(layer(x, timespans=spans)[0][0], torch.stack(expected), rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("adjoint", [False, True])
def test_gradients_of_an_adaptive_solver(adjoint):
    """Those of the adjoint equation, and those through the solver's steps, are those of many steps of fixed length."""
    pytest.importorskip("torchdiffeq", reason="needs the extra `ode`")
    layer = shaken(NeuralODE(DIM, 5, 1), 0.5)
    other = NeuralODE(DIM, 5, 1, "dopri5", rtol=1e-8, atol=1e-9, adjoint=adjoint)
    other.load_state_dict(layer.state_dict())
    layer.substeps = 60
    given = torch.randn(2, 2, DIM), torch.randn(2, DIM), torch.rand(2, 2) + 0.5
    found = []
    for each in (layer, other):
        x, state, spans = (value.clone().requires_grad_() for value in given)
        y, last = each(x, state, timespans=spans)
        loss = y.square().sum() + last.sin().sum()
        found.append((y, *torch.autograd.grad(loss, [x, state, spans, *each.parameters()])))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("double")
def test_an_adaptive_solver_streams_and_packs():
    pytest.importorskip("torchdiffeq", reason="needs the extra `ode`")
    layer, x, spans = shaken(NeuralODE(DIM, method="bosh3", rtol=1e-6)), torch.randn(1, 9, DIM), torch.rand(1, 9)
    whole, last = layer(x[:, :4], timespans=spans[:, :4])
    left, state = layer(x[:, :2], timespans=spans[:, :2])
    right, state = layer(x[:, 2:4], state, timespans=spans[:, 2:4])
    torch.testing.assert_close(torch.cat([left, right], 1), whole)
    torch.testing.assert_close(state, last)
    y, last = layer(x, cu_seqlens=torch.tensor([0, 4, 4, 9]), timespans=spans)
    torch.testing.assert_close(y[:, :4], whole)
    torch.testing.assert_close(y[:, 4:], layer(x[:, 4:], timespans=spans[:, 4:])[0])
    assert not last[1].any()
    assert layer(x[:, :0])[0].shape == (1, 0, DIM)


def test_a_solver_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    message = (
        r"neuralode: method is 'dopri5', expected one of euler, midpoint, rk4 because torchdiffeq is not installed"
    )
    with pytest.raises(ConfigError, match=message):
        NeuralODE(4, method="dopri5")(torch.zeros(1, 2, 4))
