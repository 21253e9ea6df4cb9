"""Equilibria: their values, what is reported of them, and their derivatives, against a long unrolled iteration."""

import contextlib
import doctest
import gc
import importlib

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, ShapeError
from scanl.ops.fixed_point import Convergence, ConvergenceError, fixed_point

METHODS = ("anderson", "broyden", "iteration")
each = pytest.mark.parametrize("method", METHODS)


def _relative(state: Tensor, value: Tensor) -> float:
    """The residual as its definition has it, each row by itself."""
    rows = [((v - s).norm() / v.norm()).item() for s, v in zip(state, value, strict=True)]
    return max(rows)


def _contraction(size: int, dtype: torch.dtype, bound: float = 0.8) -> Tensor:
    w = torch.randn(size, size, dtype=torch.float64)
    return (w * bound / torch.linalg.matrix_norm(w, 2)).to(dtype)


def _cell(w: Tensor, u: Tensor):
    return lambda s, x: torch.tanh(s @ w.mT + x @ u.mT)


def _unrolled(f, x: Tensor, state: Tensor, steps: int = 400) -> Tensor:
    for _ in range(steps):
        state = f(state, x)
    return state


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_known_solution_of_a_linear_map(method, dtype):
    w, x = _contraction(6, torch.float64), torch.randn(3, 6, dtype=torch.float64)
    exact = torch.linalg.solve(torch.eye(6, dtype=torch.float64) - w, x.mT).mT
    s, convergence = fixed_point(lambda s, x: s @ w.to(dtype).mT + x, x.to(dtype), method=method, max_iterations=300)
    assert s.dtype == dtype
    # |s - s*| <= |f(s) - s| / (1 - 0.8)
    assert ((s - exact).norm(dim=1) / exact.norm(dim=1)).max() < 5 * convergence.tolerance
    assert not s.requires_grad


@each
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_gradient_equals_the_unrolled_one(method, dtype, bound):
    w, u, x = _contraction(5, dtype), torch.randn(5, 4, dtype=dtype), torch.randn(3, 4, dtype=dtype)
    guess, weight = torch.zeros(3, 5, dtype=dtype), torch.randn(3, 5, dtype=dtype)
    results = []
    for solve in (
        lambda f, x: fixed_point(f, x, guess, method=method, max_iterations=300).state,
        lambda f, x: _unrolled(f, x, guess),
    ):
        leaves = [leaf.clone().requires_grad_() for leaf in (w, u, x)]
        s = solve(_cell(*leaves[:2]), leaves[2])
        results.append([s, *torch.autograd.grad(s, leaves, weight)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=bound, atol=bound)


def test_gradient_of_closed_over_tensors_that_are_not_leaves():
    """Both depend on p, and so does x: each path counts once."""
    p = torch.tensor([[0.3, -0.2], [0.1, 0.4]], dtype=torch.float64, requires_grad=True)

    def loss(solve):
        w, x = p.sin(), p.exp()
        return solve(lambda s, x: torch.tanh(s @ w.mT + p * x), x).pow(2).sum()

    (actual,) = torch.autograd.grad(loss(lambda f, x: fixed_point(f, x).state), p)
    (expected,) = torch.autograd.grad(loss(lambda f, x: _unrolled(f, x, torch.zeros_like(x))), p)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


class Equilibrium(nn.Module):
    """A deep equilibrium model: one layer, applied without end."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.recurrent = nn.Linear(width, width)
        self.drive = nn.Linear(inputs, width, bias=False)
        self.readout = nn.Linear(width, 1)

    def step(self, s: Tensor, x: Tensor) -> Tensor:
        w = self.recurrent.weight  # held to a norm of 0.9, so that there is one equilibrium
        w = w * (0.9 / torch.linalg.matrix_norm(w)).clamp_max(1)
        return torch.tanh(nn.functional.linear(s, w, self.recurrent.bias) + self.drive(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(fixed_point(self.step, x, x.new_zeros(len(x), self.recurrent.in_features)).state)


def test_parameters_of_a_module():
    model = Equilibrium(3, 8).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    model(x).sum().backward()
    implicit = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(implicit) == 5
    model.zero_grad()
    model.readout(_unrolled(model.step, x, x.new_zeros(4, 8))).sum().backward()
    for actual, parameter in zip(implicit, model.parameters(), strict=True):
        torch.testing.assert_close(actual, parameter.grad, rtol=1e-9, atol=1e-9)


def test_a_deep_equilibrium_model_learns():
    model = Equilibrium(2, 16)
    x = torch.randn(64, 2)
    target = (x[:, :1] * x[:, 1:]).tanh()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    losses = []
    for _ in range(50):
        loss = (model(x) - target).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.bfloat16, torch.float16])
def test_the_report_is_honest(method, dtype):
    w, u = _contraction(7, torch.float64).to(dtype), torch.eye(7, dtype=dtype)
    f, x = _cell(w, u), torch.randn(4, 7, dtype=torch.float64).to(dtype)
    evaluations = []

    def counted(s, x):
        evaluations.append(1)
        return f(s, x)

    s, convergence = fixed_point(counted, x, method=method, max_iterations=300)
    assert s.dtype == dtype
    residual = _relative(s.to(torch.complex128), f(s, x).to(torch.complex128))
    assert convergence.residual == pytest.approx(residual, rel=1e-3, abs=1e-30)
    assert convergence.residual <= convergence.tolerance
    assert convergence.tolerance == torch.finfo(dtype).eps ** (5 / 6)
    assert 1 < convergence.iterations <= len(evaluations) <= convergence.iterations + 1


def test_a_given_tolerance_is_reached_and_no_more():
    w, x = _contraction(5, torch.float64, 0.9), torch.randn(3, 5, dtype=torch.float64)
    runs = [fixed_point(_cell(w, torch.eye(5).double()), x, tolerance=t).convergence for t in (1e-2, 1e-5, 1e-10)]
    assert [run.tolerance for run in runs] == [1e-2, 1e-5, 1e-10]
    assert all(run.residual <= run.tolerance for run in runs)
    assert runs[0].iterations < runs[1].iterations < runs[2].iterations


@each
def test_rows_are_independent(method):
    """A row that needs 3 evaluations beside one that needs many gives what it gives alone."""
    x = torch.randn(4, 3, dtype=torch.float64)
    rate = torch.tensor([0.0, 0.3, -0.7, 0.9], dtype=torch.float64)[:, None]

    def f(s, inputs):
        x, rate = inputs
        return torch.sin(rate * s) + x

    s, convergence = fixed_point(f, (x, rate), torch.zeros_like(x), method=method, max_iterations=400)
    alone = [
        fixed_point(f, (x[b : b + 1], rate[b : b + 1]), torch.zeros(1, 3).double(), method=method, max_iterations=400)
        for b in range(4)
    ]
    torch.testing.assert_close(s, torch.cat([a.state for a in alone]), rtol=1e-14, atol=1e-15)
    counts = [a.convergence.iterations for a in alone]
    assert convergence.iterations == max(counts) > min(counts)
    assert convergence.residual >= max(a.convergence.residual for a in alone) * 0.5


def test_methods_that_solve_what_iteration_cannot():
    """Eigenvalues down to -3: repeating f diverges."""
    q, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))
    w = q @ torch.diag(torch.linspace(-3, 0.5, 6, dtype=torch.float64)) @ q.mT
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    exact = torch.linalg.inv(torch.eye(6, dtype=torch.float64) - w)
    for method in ("anderson", "broyden"):
        s, _ = fixed_point(lambda s, x: s @ w.mT + x, x, method=method)
        torch.testing.assert_close(s, x @ exact.mT)
        (gradient,) = torch.autograd.grad(s.sum(), x)
        torch.testing.assert_close(gradient, exact.sum(0).expand(2, 6))
    damped, _ = fixed_point(lambda s, x: s @ w.mT + x, x, method="iteration", damping=0.4, max_iterations=200)
    torch.testing.assert_close(damped, x @ exact.mT)


def test_divergence_raises():
    x = torch.ones(2, 3)
    for f in (lambda s, x: s * s + 1 + x, lambda s, x: (s - 2).log() + x):
        with pytest.raises(ConvergenceError, match=r"the state diverged after \d+ iterations of method 'iteration'"):
            fixed_point(f, x, torch.full((2, 3), 2.0), method="iteration")
    for method in METHODS:
        with pytest.raises(ConvergenceError, match="the state"):
            fixed_point(lambda s, x: s * s + 1 + x, x, method=method)
        one_bad_row = torch.tensor([[1.0], [float("nan")]])
        with pytest.raises(ConvergenceError, match="diverged after 1 iterations"):
            fixed_point(lambda s, x: s / 2 + x, one_bad_row, method=method)


def test_not_converging_raises_and_says_what_to_do():
    x = torch.ones(2, 3)
    with pytest.raises(ConvergenceError) as caught:
        fixed_point(lambda s, x: 0.9 * s + x, x, method="iteration", max_iterations=7, tolerance=1e-3)
    message = str(caught.value)
    # After 6 steps s = 10 (1 - 0.9^6) and f(s) - s = 0.9^6 = 0.531441, f(s) = 10 (1 - 0.9^7) = 5.217031
    for part in ("did not converge in 7 iterations", "relative residual 0.102,", "tolerance 0.001", "max_iterations"):
        assert part in message
    assert isinstance(caught.value, ArithmeticError)


def test_a_gradient_that_does_not_converge_raises():
    """At s = 0 the map is found at once, but its slope there is 1: the gradient is infinite."""
    x = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    s, _ = fixed_point(lambda s, x: s - s**3 + x, x)
    with pytest.raises(ConvergenceError, match="the gradient"):
        s.sum().backward()


@each
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_a_gradient_has_the_size_of_what_arrives(method, size):
    w, x = _contraction(4, torch.float32), torch.randn(3, 4, requires_grad=True)
    s, _ = fixed_point(lambda s, x: torch.tanh(s @ w) + x, x, method=method)
    (expected,) = torch.autograd.grad(s.sum(), x, retain_graph=True)
    (found,) = torch.autograd.grad(s, x, torch.full_like(s, size))
    torch.testing.assert_close(found / size, expected, rtol=1e-5, atol=1e-5)


def test_a_state_whose_square_is_infinite_has_diverged():
    x = torch.ones(1, 2, dtype=torch.float64)
    with pytest.raises(ConvergenceError, match="the state diverged"):
        fixed_point(lambda s, x: 1.5 * s + x, x, method="iteration", max_iterations=2000)


def test_a_solution_of_zero_converges():
    for method in METHODS:
        s, convergence = fixed_point(
            lambda s, x: 0.5 * torch.tanh(s) + x, torch.zeros(2, 3), torch.ones(2, 3), method=method, max_iterations=200
        )
        assert s.abs().max() < 1e-15
        assert convergence.residual <= convergence.tolerance


def test_every_derivative_that_is_given_is_right():
    w, u, x = _contraction(2, torch.float64), torch.randn(2, 1).double(), torch.randn(2, 1).double()
    leaves = [leaf.requires_grad_() for leaf in (w, u, x)]

    def solve(w, u, x):
        return fixed_point(_cell(w, u), x, torch.zeros(2, 2).double(), tolerance=1e-14, max_iterations=200).state

    assert torch.autograd.gradcheck(solve, leaves)
    assert torch.autograd.gradgradcheck(solve, leaves)


def test_third_derivatives_raise():
    x = torch.full((1, 1), 0.5, dtype=torch.float64, requires_grad=True)
    s, _ = fixed_point(lambda s, x: 0.5 * torch.sin(s) + x, x)
    (first,) = torch.autograd.grad(s, x, create_graph=True)
    torch.testing.assert_close(first, 1 / (1 - 0.5 * s.cos()))  # s' = s' cos(s)/2 + 1
    (second,) = torch.autograd.grad(first, x, retain_graph=True)
    torch.testing.assert_close(second, -0.5 * s.sin() * first**3)
    with pytest.raises(NotImplementedError, match="fixed_point: derivatives above the second"):
        torch.autograd.grad(first, x, create_graph=True)


def test_complex_states():
    w = torch.polar(torch.rand(3, 3).double() / 4, torch.randn(3, 3).double()).requires_grad_()
    x = torch.randn(2, 3, dtype=torch.complex128, requires_grad=True)

    def solve(w, x):
        return fixed_point(lambda s, x: s @ w.mT + x + 0.1 * s.conj(), x).state

    s = solve(w, x)
    torch.testing.assert_close(s, s @ w.mT + x + 0.1 * s.conj())
    assert torch.autograd.gradcheck(solve, [w, x], fast_mode=True)
    assert torch.autograd.gradgradcheck(solve, [w, x], fast_mode=True)


def test_memory_does_not_grow_with_the_iterations():
    """What autograd keeps of a solve in 100 steps is what it keeps of one in 2."""
    kept = []
    w = _contraction(4, torch.float64, 0.95).requires_grad_()
    for tolerance in (0.9, 1e-12):
        saved = 0

        def pack(t):
            nonlocal saved
            saved += 1
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            s, convergence = fixed_point(
                lambda s, x: s @ w.mT + x, torch.ones(2, 4).double(), method="iteration", tolerance=tolerance,
                max_iterations=1000,
            )  # fmt: skip
        kept.append((saved, convergence.iterations))
        del s
        gc.collect()
    assert kept[1][1] > 10 * kept[0][1]
    assert kept[0][0] == kept[1][0]


def test_no_gradient_no_graph():
    w = _contraction(3, torch.float32).requires_grad_()
    with torch.no_grad():
        assert not fixed_point(lambda s, x: s @ w + x, torch.ones(2, 3)).state.requires_grad
    guess = torch.ones(2, 3, requires_grad=True)
    assert not fixed_point(lambda s, x: s / 2 + x, torch.ones(2, 3), guess).state.requires_grad
    s, _ = fixed_point(lambda s, x: s @ w + x, torch.ones(2, 3), guess)
    assert torch.autograd.grad(s.sum(), guess, allow_unused=True) == (None,)


def test_other_shapes():
    for shape in ((5,), (2, 3, 4), (0, 3), (2, 0)):
        x = torch.ones(shape, requires_grad=True)
        s, convergence = fixed_point(lambda s, x: 0.5 * s + x, x)
        torch.testing.assert_close(s, 2 * x)
        assert isinstance(convergence, Convergence)
        torch.testing.assert_close(torch.autograd.grad(s.sum(), x)[0], torch.full(shape, 2.0))


def _same(s, x):
    return s


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((_same, (1.0,)), {}, ShapeError, "fixed_point: x is a tuple, expected a tensor because state is None"),
        ((_same, 1.0, 2.0), {}, ShapeError, r"fixed_point: state is a float, expected a tensor \(B, \*F\)"),
        ((_same, torch.tensor(1.0)), {}, ShapeError, r"fixed_point: state is float32 of shape \(\) on cpu, expected"),
        ((_same, torch.ones(2, 2).long()), {}, ShapeError, r"fixed_point: state is int64 of shape \(2, 2\)"),
        (
            (lambda s, x: s[:1], torch.ones(2, 3)),
            {},
            ShapeError,
            r"f returns float32 of shape \(1, 3\) on cpu, expected float32 of shape \(2, 3\) on cpu because of the",
        ),
        ((lambda s, x: s.double(), torch.ones(2, 3)), {}, ShapeError, "fixed_point: f returns float64 of shape"),
        ((lambda s, x: (s,), torch.ones(2, 3)), {}, ShapeError, "fixed_point: f returns a tuple, expected a tensor"),
        (
            (_same, torch.ones(2)),
            {"method": "andersen"},
            ConfigError,
            "fixed_point: unknown method 'andersen'; did you",
        ),
        ((_same, torch.ones(2)), {"tolerance": 0.0}, ConfigError, "fixed_point: tolerance is 0.0, expected"),
        ((_same, torch.ones(2)), {"max_iterations": 0}, ConfigError, "fixed_point: max_iterations is 0, expected"),
        ((_same, torch.ones(2)), {"history": 0}, ConfigError, "fixed_point: history is 0, expected"),
        ((_same, torch.ones(2)), {"damping": 1.5}, ConfigError, "fixed_point: damping is 1.5, expected"),
    ],
)
def test_errors(arguments, options, error, message):
    with pytest.raises(error, match=message):
        fixed_point(*arguments, **options)


def test_worked_examples():
    results = doctest.testmod(importlib.import_module("scanl.ops.fixed_point"), extraglobs={"torch": torch})
    assert results.attempted > 0
    assert results.failed == 0


def test_anderson_forgets_a_past_that_misleads():
    """More steps kept than the state has numbers, and a map that is far from linear."""
    torch.manual_seed(12)
    w = _contraction(16, torch.float64, 2.5)
    x = 2 * torch.randn(64, 16, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        _, convergence = fixed_point(_cell(w.to(dtype), torch.eye(16, dtype=dtype)), x.to(dtype))
        assert convergence.iterations < 50


@pytest.mark.parametrize("damping", [1.0, 0.6, 0.3])
def test_anderson_takes_the_steps_of_its_definition(damping):
    """The points at which f is evaluated, by least squares of numpy, of a row that is too slow for plain steps.

    The other row halves its residual at every step, so it is a plain iteration; its steps do not change the first row.
    """
    slow = np.array([[0.9, 0.3, 0.0], [-0.2, 0.7, 0.1], [0.0, 0.2, -0.8]])
    offset = np.array([1.0, -2.0, 0.5])
    points, moves, changes, before, mixes = [np.zeros(3)], [], [], None, False
    for _ in range(3):
        s = points[-1]
        r = slow @ s + offset - s
        nxt = s + damping * r
        if before is not None:
            moves.append(s - before[0])
            changes.append(r - before[1])
            mixes = mixes or np.linalg.norm(r) > np.linalg.norm(before[1]) / 2
            if mixes:
                weights = np.linalg.lstsq(np.stack(changes, 1), r, rcond=None)[0]
                nxt = nxt - (np.stack(moves, 1) + damping * np.stack(changes, 1)) @ weights
        before = s, r
        points.append(nxt)
    assert mixes

    seen = []
    matrices = torch.tensor(np.stack([slow, np.eye(3) / 10]))
    x = torch.tensor(np.stack([offset, offset]))

    def f(s, x):
        seen.append(s.detach()[0].numpy().copy())
        return (matrices @ s[..., None])[..., 0] + x

    with contextlib.suppress(ConvergenceError):
        fixed_point(f, x, damping=damping, max_iterations=4)
    np.testing.assert_allclose(np.stack(seen[-4:]), np.stack(points), rtol=1e-7, atol=1e-9)


def test_anderson_takes_plain_steps_while_they_halve_the_residual():
    """s <- s/4 + x: the residual falls to a quarter, and the points are those of the plain iteration."""
    seen = []

    def f(s, x):
        seen.append(s.item())
        return s / 4 + x

    fixed_point(f, torch.ones(1, 1, dtype=torch.float64))
    plain = [0.0]
    while len(plain) < 12:
        plain.append(plain[-1] / 4 + 1)
    assert seen[1:13] == pytest.approx(plain, rel=1e-12)  # before them f is called once to see what it returns
