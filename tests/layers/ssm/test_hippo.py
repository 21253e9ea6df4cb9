"""HiPPO: its equation step by step, how it starts, and what only it knows."""

import math
import re

import pytest
import torch

from by_hand import DIM, assert_normal
from scanl import layers
from scanl.errors import ConfigError
from scanl.layers import HiPPO
from scanl.layers.parts.polynomial_memory import reconstruct
from tests.layers.ssm.equations import discrete, system

pytestmark = pytest.mark.cells_by_loop("name")


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


def antiderivatives(x, N):
    """√(2n+1) times the integral of P_n(2s - 1) from 0 to x, by (P_{n+1} - P_{n-1})/(2 (2n+1))."""
    y = 2 * x - 1
    P = [-torch.ones_like(y), torch.ones_like(y), y]  # P_{-1} such that the integral of P_0 is x
    for n in range(1, N):
        P.append(((2 * n + 1) * y * P[-1] - n * P[-2]) / (n + 1))
    return torch.stack([(P[n + 2] - P[n]) / (2 * math.sqrt(2 * n + 1)) for n in range(N)], -1)


EQUATIONS = {
    "hippo": (lambda: HiPPO(DIM, 5), hippo),
    "hippo_bilinear": (lambda: HiPPO(DIM, 5, discretization="bilinear"), hippo),
    "hippo_legt": (lambda: HiPPO(DIM, 5, "legt", 9.0), hippo),
    "hippo_legt_bilinear": (lambda: HiPPO(DIM, 1, "legt", 9.0, "bilinear"), hippo),
    "hippo_lagt": (lambda: HiPPO(DIM, 3, "lagt", 4.0), hippo),
    "hippo_fourier": (lambda: HiPPO(DIM, 6, "fourier", 12.0), hippo),
}


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
