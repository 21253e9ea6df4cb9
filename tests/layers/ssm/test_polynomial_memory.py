"""Memories of polynomials: the layers against their equations, how they start, and what the memory holds."""

import math
import re

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform, follows_time, linear, sigmoid
from scanl import layers
from scanl.errors import ConfigError
from scanl.layers import LMU, HiPPO, HiPPORNN, LMUParallel
from scanl.layers.parts.polynomial_memory import reconstruct, transition

pytestmark = pytest.mark.cells_by_loop("name")


def window(layer, spans, i):
    """The memory's system of step i, from its definition where steps have durations."""
    if spans is None:
        return layer.A, layer.B[:, 0]
    n = torch.arange(layer.state_dim)
    sign = torch.where(n[:, None] < n, -1.0, -((-1.0) ** (n[:, None] - n)))
    return discrete((2 * n[:, None] + 1) * sign, (2 * n + 1) * (-1.0) ** n, spans[i] / layer.theta, "zoh")


def lmu(layer, xs, spans=None):
    h, m, ys = torch.zeros(layer.dim), torch.zeros(layer.state_dim), []
    for i, x in enumerate(xs):
        a, b = window(layer, spans, i)
        u = layer.e_x @ x + layer.e_h @ h + layer.e_m @ m
        m = a @ m + b * u
        h = torch.tanh(layer.W_x @ x + layer.W_h @ h + layer.W_m @ m)
        ys.append(h)
    return ys


def lmu_parallel(layer, xs, spans=None):
    m, ys = torch.zeros(layer.state_dim), []
    for i, x in enumerate(xs):
        a, b = window(layer, spans, i)
        m = a @ m + b * linear(layer.W_u, x).clamp(min=0)
        ys.append(linear(layer.W_h, torch.cat([m, x])).clamp(min=0))
    return ys


def discrete(A, B, dt, method):
    """By the definitions: sums of powers of A, or the trapezoidal rule."""
    eye = torch.eye(len(A))
    if method == "bilinear":
        back = torch.linalg.inv(eye - dt / 2 * A)
        return back @ (eye + dt / 2 * A), back @ (dt * B)
    squarings = 12
    small = dt * A / 2**squarings
    power, integral = eye, torch.zeros_like(A)
    for k in range(12):
        integral = integral + power / float(math.factorial(k + 1))
        power = power @ small
    exponential = small @ integral + eye  # over a small step; then the step is doubled
    for _ in range(squarings):
        integral = integral + exponential @ integral
        exponential = exponential @ exponential
    return exponential, integral @ (dt / 2**squarings * B)


def system(measure, N):
    """The matrices by their entries, as the paper has them."""
    if measure == "lagt":
        A = [[-0.5 if n == k else -1.0 * (n > k) for k in range(N)] for n in range(N)]
        return torch.tensor(A), torch.ones(N)
    if measure == "fourier":
        b = [1.0 if n == 0 else math.sqrt(2) * (n % 2 == 0) for n in range(N)]
        A = [[-2 * b[n] * b[k] for k in range(N)] for n in range(N)]
        for f in range(N // 2):
            A[2 * f + 1][2 * f] += 2 * math.pi * f
            A[2 * f][2 * f + 1] -= 2 * math.pi * f
        return torch.tensor(A), 2 * torch.tensor(b)
    sign = 1 if measure == "legt" else 0
    A = [
        [
            -math.sqrt((2 * n + 1) * (2 * k + 1)) * (1 if n > k else sign * (-1) ** (n - k))
            if n != k
            else -(2 * n + 1 if sign else n + 1)
            for k in range(N)
        ]
        for n in range(N)
    ]
    return torch.tensor(A, dtype=torch.float64), torch.tensor([math.sqrt(2 * n + 1) for n in range(N)])


def hippo(layer, xs, spans=None):
    A, B = system(layer.measure, layer.state_dim)
    c, ys = torch.zeros(layer.dim, layer.state_dim), []
    time = 0.0
    for i, x in enumerate(xs):
        span = 1.0 if spans is None else spans[i].item()
        time += span
        if layer.measure != "legs":
            a, b = discrete(A, B, span / layer.theta, layer.discretization)
        elif layer.discretization == "bilinear":
            a, b = discrete(A, B, span / time, "bilinear")
        elif i == 0:  # the first number is all of the past
            a, b = torch.zeros_like(A), torch.eye(layer.state_dim)[0]
        else:  # e^{A s} with s = ln(t'/t), since t moves to t' in dc/dt = (A c + B u)/t
            a, b = discrete(A, B, math.log(time / (time - span)), "zoh")
        c = c @ a.T + x[:, None] * b
        ys.append((c * layer.C).sum(1))
    return ys


def hippo_rnn(layer, xs, spans=None):
    A, B = system(layer.measure, layer.state_dim)
    s, c, ys = torch.zeros(layer.dim), torch.zeros(layer.state_dim), []
    time = 0.0
    for i, x in enumerate(xs):
        span = 1.0 if spans is None else spans[i].item()
        f = linear(layer.W_uxh, torch.cat([x, s]))
        if layer.measure != "legs":
            a, b = discrete(A, B, 0.01 * span, "zoh")
        elif i == 0:
            a, b = torch.zeros_like(A), torch.eye(layer.state_dim)[0]
        else:
            a, b = discrete(A, B, span / min(time, layer.max_length), "bilinear")
        time += span
        c = a @ c + b * f
        g = sigmoid(linear(layer.W_g, torch.cat([x, c])))
        s = (1 - g) * s + g * torch.tanh(linear(layer.W_hxm, torch.cat([x, c])))
        ys.append(s)
    return ys


EQUATIONS = {
    "hippo_rnn": (lambda: HiPPORNN(DIM, 5), hippo_rnn),
    "hippo_rnn_wide": (lambda: HiPPORNN(DIM, 37), hippo_rnn),
    "hippo_rnn_held": (lambda: HiPPORNN(DIM, 3, max_length=3), hippo_rnn),
    "hippo_rnn_legt": (lambda: HiPPORNN(DIM, measure="legt"), hippo_rnn),
    "hippo_rnn_lagt": (lambda: HiPPORNN(DIM, 4, "lagt"), hippo_rnn),
    "hippo": (lambda: HiPPO(DIM, 5), hippo),
    "hippo_bilinear": (lambda: HiPPO(DIM, 5, discretization="bilinear"), hippo),
    "hippo_legt": (lambda: HiPPO(DIM, 5, "legt", 9.0), hippo),
    "hippo_legt_bilinear": (lambda: HiPPO(DIM, 1, "legt", 9.0, "bilinear"), hippo),
    "hippo_lagt": (lambda: HiPPO(DIM, 3, "lagt", 4.0), hippo),
    "hippo_fourier": (lambda: HiPPO(DIM, 6, "fourier", 12.0), hippo),
    "lmu": (lambda: LMU(DIM, 5, 7.0), lmu),
    "lmu_of_one_polynomial": (lambda: LMU(DIM, 1, 3.5), lmu),
    "lmu_parallel": (lambda: LMUParallel(DIM, 5, 7.0), lmu_parallel),
}


TIMED = ["hippo", "hippo_bilinear", "hippo_legt", "hippo_fourier", "hippo_rnn", "hippo_rnn_lagt", "lmu_parallel", "lmu"]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", TIMED)
def test_a_memory_follows_the_time_between_its_steps(name):
    make, equation = EQUATIONS[name]
    follows_time(make, equation)


@pytest.mark.usefixtures("double")
def test_legs_of_a_signal_that_is_sampled_irregularly_is_its_projection():
    """Four steps of 2, 1, 1 and 4 units hold what eight steps of one unit hold."""
    layer, x = HiPPO(2, 8), torch.randn(1, 4, 2)
    spans = torch.tensor([[2.0, 1.0, 1.0, 4.0]])
    c, state = layer.memory(x, timespans=spans)
    held, also = layer.memory(x.repeat_interleave(spans[0].long(), 1))
    torch.testing.assert_close(c[:, -1], held[:, -1])
    torch.testing.assert_close(state, also)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
@pytest.mark.parametrize("measure", ["legs", "legt"])
def test_a_step_of_no_duration_leaves_the_memory_as_it_is(measure, discretization):
    """In the middle, and before any time."""
    layer, x = HiPPO(2, 4, measure, discretization=discretization), torch.randn(1, 6, 2)
    spans = torch.tensor([[0.0, 0.0, 1.0, 2.0, 0.0, 3.0]])
    c, state = layer.memory(x, timespans=spans)
    torch.testing.assert_close(c[:, :2], torch.zeros(1, 2, 2, 4))
    kept = spans[0] > 0
    expected, last = layer.memory(x[:, kept], timespans=spans[:, kept])
    torch.testing.assert_close(c[:, kept], expected)
    torch.testing.assert_close(c[:, 4], c[:, 3])
    torch.testing.assert_close(state, last)


def antiderivatives(x, N):
    """√(2n+1) times the integral of P_n(2s - 1) from 0 to x, by (P_{n+1} - P_{n-1})/(2 (2n+1))."""
    y = 2 * x - 1
    P = [-torch.ones_like(y), torch.ones_like(y), y]  # P_{-1} such that the integral of P_0 is x
    for n in range(1, N):
        P.append(((2 * n + 1) * y * P[-1] - n * P[-2]) / (n + 1))
    return torch.stack([(P[n + 2] - P[n]) / (2 * math.sqrt(2 * n + 1)) for n in range(N)], -1)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("size", [1, 2, 64])
def test_online_legs_is_the_projection_of_all_of_the_past(size):
    """Step by step and in pieces, to 1e-10: the integrals of the input, held over its steps, with each polynomial."""
    x, T = torch.randn(2, 150, 2), 150
    layer = HiPPO(2, size)
    edges = antiderivatives(torch.arange(T + 1.0) / T, size)
    expected = torch.einsum("btd,tn->bdn", x, edges.diff(dim=0))
    state, found = None, []
    for piece in x.split(47, 1):
        c, state = layer.memory(piece, state)
        found.append(c)
    torch.testing.assert_close(state.c, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.cat(found, 1)[:, -1], expected, rtol=0, atol=1e-10)
    assert state.elapsed.steps.tolist() == [T, T]
    early = torch.einsum("btd,tn->bdn", x[:, :60], antiderivatives(torch.arange(61.0) / 60, size).diff(dim=0))
    torch.testing.assert_close(torch.cat(found, 1)[:, 59], early, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("double")
def test_legs_does_not_see_the_scale_of_time():
    """A signal at half the speed, each number twice, has the same memory."""
    layer, x = HiPPO(1, 16), torch.randn(1, 40, 1)
    slow, fast = layer.memory(x.repeat_interleave(2, 1))[0], layer.memory(x)[0]
    torch.testing.assert_close(slow[:, 1::2], fast, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("measure", "bounds"), [("legs", (0.4, 2e-4)), ("legt", (1.0, 0.04)), ("fourier", (0.4, 0.1))])
def test_the_past_comes_back_with_more_numbers(measure, bounds):
    """The largest error over the inner nine tenths of the past, of two waves, with 6 and with 24 numbers a channel."""
    T = 600
    x = torch.sin(torch.arange(T) * (4 * math.pi / T)) + 0.5 * torch.cos(torch.arange(T) * (2 * math.pi / T))
    age = torch.linspace(0.05, 0.95, 91)
    at = (1 - age) * T - 0.5  # an input that is held over its step lags by half a step
    exact = torch.sin(at * (4 * math.pi / T)) + 0.5 * torch.cos(at * (2 * math.pi / T))
    errors = []
    for size in (6, 24):
        _, state = HiPPO(1, size, measure, float(T)).memory(x[None, :, None])
        errors.append((reconstruct(state.c[0, 0], age, measure) - exact).abs().max().item())
    assert errors[0] > errors[1]
    assert errors[0] < bounds[0]
    assert errors[1] < bounds[1]


@pytest.mark.long
@pytest.mark.usefixtures("double")
def test_legs_holds_ten_thousand_steps_within_a_hundredth():
    """Sixty-four numbers, five waves of random phase of up to eight periods; the error by the largest value."""
    T = 10_000
    phases = 2 * math.pi * torch.rand(5)

    def signal(t):
        return sum(torch.sin(2 * math.pi * (k + 4) * t / T + phases[k]) for k in range(5))

    state = None
    for piece in signal(torch.arange(float(T)))[None, :, None].split(500, 1):
        _, state = HiPPO(1, 64).memory(piece, state)
    age = torch.linspace(0, 1, 2001)
    exact = signal((1 - age) * T - 0.5)
    error = (reconstruct(state.c[0, 0], age, "legs") - exact).abs().max()
    assert error < 0.01 * exact.abs().max()


@pytest.mark.usefixtures("double")
def test_lagt_remembers_the_recent_past():
    x = torch.cos(torch.arange(400.0) / 60)
    _, state = HiPPO(1, 20, "lagt", 30.0).memory(x[None, :, None])
    age = torch.tensor([0.1, 0.5, 1.0, 2.0])
    exact = torch.cos((399.5 - 30 * age) / 60)
    torch.testing.assert_close(reconstruct(state.c[0, 0], age, "lagt"), exact, rtol=0, atol=0.06)


@pytest.mark.usefixtures("double")
def test_init_of_hippo():
    assert_normal(HiPPO(500, 100).C, 0.1)
    assert [name for name, _ in HiPPO(3, 4).named_buffers()] == []
    assert [name for name, _ in HiPPO(3, 4, "lagt").named_buffers()] == ["A", "B"]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("rows", [None, "alike", "apart"])
def test_legs_in_blocks_is_legs_token_by_token(rows):
    """Blocks and a rest, after a state, with steps of one duration, of several, and of other durations in each row."""
    torch.manual_seed(3)
    layer = HiPPO(3, 8).double()
    x, spans = torch.randn(2, 45, 3, dtype=torch.float64), torch.rand(2, 45, dtype=torch.float64) + 0.1
    spans = {None: torch.ones_like(spans), "alike": spans[:1].expand(2, -1), "apart": spans}[rows]
    with torch.no_grad():
        _, before = layer(x[:, :5].flip(1))
        y, last = layer(x, before, timespans=None if rows is None else spans)
        state, ys = before, []
        for t in range(45):
            token, state = layer(x[:, t : t + 1], state, timespans=spans[:, t : t + 1])
            ys.append(token)
    torch.testing.assert_close(y, torch.cat(ys, 1))
    torch.testing.assert_close(last, state)


def test_legs_in_blocks_projects_the_past():
    """The first coefficient is the mean of all numbers; a memory of one number is nothing else."""
    layer, x = HiPPO(2, 1).double(), torch.randn(1, 64, 2, dtype=torch.float64)
    with torch.no_grad():
        y, _ = layer(x)
    means = x.cumsum(1) / torch.arange(1, 65, dtype=torch.float64)[:, None]
    torch.testing.assert_close(y, means * layer.C[:, 0])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_legs_in_blocks_keeps_what_is_not_finite_from_the_past(value):
    layer, x = HiPPO(3, 4), torch.randn(2, 48, 3)
    spoilt = x.clone()
    spoilt[0, 20, 1] = value
    with torch.no_grad():
        (exact, _), (y, last) = layer(x), layer(spoilt)
    assert torch.equal(y[0, :20], exact[0, :20])
    assert torch.equal(y[1], exact[1])
    assert not y[0, 20:, 1].isfinite().any()
    assert not last.c[0, 1].isfinite().any()
    assert torch.equal(y[0, :, 0], exact[0, :, 0])


def test_init_of_hippo_rnn():
    layer = HiPPORNN(300, 500)
    assert_uniform(layer.W_uxh.weight, -math.sqrt(3 / 600), math.sqrt(3 / 600))
    assert_normal(layer.W_hxm.weight[:, :300], math.sqrt(2 / 600))
    assert_normal(layer.W_hxm.weight[:, 300:], math.sqrt(2 / 800))
    assert_normal(layer.W_g.weight, math.sqrt(1 / 800))
    assert_uniform(layer.W_g.bias, -1 / math.sqrt(800), 1 / math.sqrt(800))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure": "fourier"}, "hippo_rnn: unknown measure 'fourier'"),
        ({"state_dim": 0}, "hippo_rnn: state_dim is 0, expected at least 1"),
        ({"max_length": 0}, "hippo_rnn: max_length is 0, expected at least 1"),
    ],
)
def test_wrong_options_of_hippo_rnn_are_refused(options, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        layers.build("hippo_rnn", DIM, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure": "legz"}, "hippo: unknown measure 'legz'; did you mean 'leg"),
        ({"discretization": "zho"}, "hippo: unknown discretization 'zho'; did you mean 'zoh'?"),
        ({"theta": -1.0}, "hippo: theta is -1.0, expected more than 0"),
        ({"state_dim": 0}, "hippo: state_dim is 0, expected at least 1"),
        ({"state_dim": 5, "measure": "fourier"}, "hippo: state_dim is 5, expected an even number"),
    ],
)
def test_wrong_options_of_hippo_are_refused(options, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        layers.build("hippo", DIM, **options)


def test_wrong_measures_are_refused():
    for call in (lambda: transition("legz", 4), lambda: reconstruct(torch.ones(4), torch.ones(1), "legz")):
        with pytest.raises(ConfigError, match="unknown measure 'legz'"):
            call()


@pytest.mark.usefixtures("double")
def test_the_memory_of_lmu_is_its_system_held_over_a_step():
    """By its entries in the paper, with the exponential as a sum of powers."""
    size, theta = 4, 9.0
    layer = LMU(DIM, size, theta)
    A = torch.tensor([
        [(2 * n + 1) / theta * (-1 if n < k else (-1) ** (n - k + 1)) for k in range(size)] for n in range(size)
    ])  # fmt: skip
    B = torch.tensor([[(2 * n + 1) / theta * (-1) ** n] for n in range(size)])
    power, exponential, integral = torch.eye(size), torch.zeros(size, size), torch.zeros(size, size)
    for k in range(40):
        exponential = exponential + power / float(math.factorial(k))
        integral = integral + power / float(math.factorial(k + 1))
        power = power @ A
    torch.testing.assert_close(layer.A, exponential)
    torch.testing.assert_close(layer.B, integral @ B)


@pytest.mark.usefixtures("double")
def test_the_memory_of_lmu_is_its_window():
    """Σ m_n P_n(2a - 1) is the input a·θ steps ago, of a slow wave to 1 %."""
    theta, size = 100.0, 12
    layer = LMU(1, size, theta)
    wave = torch.sin(torch.arange(300.0) / 20)
    m = torch.zeros(size)
    for u in wave:
        m = layer.A @ m + layer.B[:, 0] * u
    for steps in (0, 25, 60, 90):
        y = 2 * steps / theta - 1
        values = [1.0, y]
        for n in range(1, size - 1):
            values.append(((2 * n + 1) * y * values[n] - n * values[n - 1]) / (n + 1))
        # The input is held over a step, so it lags by half a step.
        expected = math.sin((299.5 - steps) / 20)
        assert abs((m * torch.tensor(values)).sum() - expected) < 1e-2


@pytest.mark.usefixtures("double")
def test_init_of_lmu():
    layer = LMU(600, 100)
    for vector in (layer.e_x, layer.e_h):
        assert_uniform(vector, -math.sqrt(3 / 600), math.sqrt(3 / 600))
    assert not layer.e_m.any()
    for weight, width in ((layer.W_x, 600), (layer.W_h, 600), (layer.W_m, 100)):
        assert_normal(weight, math.sqrt(2 / (600 + width)))


@pytest.mark.parametrize("name", ["lmu", "lmu_parallel"])
@pytest.mark.parametrize(
    ("options", "message"),
    [({"state_dim": 0}, "state_dim is 0, expected at least 1"), ({"theta": 0.0}, "theta is 0.0, expected more")],
)
def test_wrong_options_of_lmu_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=f"^{name}: {message}"):
        layers.build(name, DIM, **options)
