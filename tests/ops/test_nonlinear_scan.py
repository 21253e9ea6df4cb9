"""Nonlinear scans: Newton's methods against step by step, in values and gradients; what they report and refuse."""

import copy
import doctest
import importlib

import pytest
import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, ShapeError
from scanl.ops._newton import products
from scanl.ops.fixed_point import Convergence, ConvergenceError, fixed_point
from scanl.ops.nonlinear_scan import nonlinear_scan

newton = pytest.mark.parametrize("method", ["newton", "quasi_newton"])
every = pytest.mark.parametrize("method", ["sequential", "newton", "quasi_newton"])


def _gru(inputs: int, width: int, dtype=torch.float64):
    gru = nn.GRUCell(inputs, width, dtype=dtype)
    return (lambda s, x: gru(x, s)), list(gru.parameters())


def _elementwise(inputs: int, width: int, dtype=torch.float64):
    w, b = torch.randn(width, dtype=dtype, requires_grad=True), torch.randn(width, dtype=dtype, requires_grad=True)
    return (lambda s, x: torch.tanh(w * s + x[..., :width] * b)), [w, b]


def _results(cell, parameters, x, state, **options) -> list[Tensor]:
    x, state = x.clone().requires_grad_(), state.clone().requires_grad_()
    y, last = nonlinear_scan(cell, x, state, **options)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).cos().view(y.shape)
    return [y, last, *torch.autograd.grad((y * weights).sum() + last.sin().sum(), [x, state, *parameters])]


@newton
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("make", [_gru, _elementwise], ids=["gru", "elementwise"])
@pytest.mark.parametrize(("batch", "steps", "width"), [(2, 40, 5), (3, 1, 4), (1, 90, 1)])
def test_newton_equals_step_by_step(method, make, reverse, batch, steps, width):
    cell, parameters = make(6, width)
    x, state = torch.randn(batch, steps, 6).double(), torch.randn(batch, width).double()
    options = {"reverse": reverse, "tolerance": 1e-13}
    expected = _results(cell, parameters, x, state, **options)
    actual = _results(cell, parameters, x, state, **options, method=method)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_newton_on_a_gru_over_many_steps():
    """In float32, in a few iterations, to 1e-5, and the gradients to 1e-4."""
    cell, parameters = _gru(8, 16, torch.float32)
    x, state = torch.randn(1, 4096, 8), torch.randn(1, 16)
    convergence = nonlinear_scan(cell, x, state, method="newton").convergence
    assert convergence.iterations <= 12
    assert convergence.residual <= convergence.tolerance
    expected, actual = (_results(cell, parameters, x, state, method=m) for m in ("sequential", "newton"))
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert (a - b).abs().max() <= (1e-5 if i < 2 else 1e-4) * b.abs().max()


@newton
def test_gradients_by_finite_differences(method):
    w = torch.randn(3, 3, dtype=torch.float64).requires_grad_()
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    state = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def run(w, x, state):
        return tuple(nonlinear_scan(lambda s, x: torch.tanh(s @ w.T + x), x, state, method=method, tolerance=1e-14))

    assert torch.autograd.gradcheck(run, (w, x, state))


@newton
def test_gradient_can_be_taken_twice_and_of_the_last_state_alone(method):
    cell, _ = _gru(3, 3)
    x = torch.randn(2, 9, 3, dtype=torch.float64, requires_grad=True)
    state = torch.randn(2, 3, dtype=torch.float64)
    _, last = nonlinear_scan(cell, x, state, method=method)
    (first,) = torch.autograd.grad(last.sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(last.sum(), x)
    (expected,) = torch.autograd.grad(nonlinear_scan(cell, x, state)[1].sum(), x)
    torch.testing.assert_close(first, again)
    torch.testing.assert_close(first, expected)


@newton
def test_second_derivatives_raise(method):
    x = torch.randn(1, 5, 2, dtype=torch.float64, requires_grad=True)
    y, _ = nonlinear_scan(lambda s, x: torch.tanh(s * x), x, torch.ones(1, 2, dtype=torch.float64), method=method)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(grad.sum(), x)


def test_second_derivatives_step_by_step():
    x = torch.randn(1, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: tuple(nonlinear_scan(lambda s, x: torch.tanh(s * x + x), x)), (x,))


@newton
def test_the_first_steps_are_exact_whatever_the_later_ones_do(method):
    """After k iterations k steps are exact, so that even an expanding cell is solved in as many iterations as steps."""
    x = torch.randn(2, 12, 3, dtype=torch.float64)

    def cell(s, x):
        return torch.sin(30 * s + 20 * s.flip(-1) + x)

    expected, _ = nonlinear_scan(cell, x)
    y, _ = result = nonlinear_scan(cell, x, method=method, max_iterations=13, tolerance=1e-9)
    assert 3 < result.convergence.iterations <= 13
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)


@newton
def test_overflow_of_products_of_jacobians_is_survived(method):
    """At the first guess, zero, every step multiplies by 1000, at the solution by a quarter: 1000^60 overflows once."""
    x, state = torch.full((1, 60, 2), 0.7), torch.full((1, 2), 0.75)

    def cell(s, x):
        return torch.where(s > 0.5, s / 4 + x, 1000 * s + x)

    expected, _ = nonlinear_scan(cell, x, state)
    y, _ = result = nonlinear_scan(cell, x, state, method=method)
    assert 1 < result.convergence.iterations < 10
    torch.testing.assert_close(y, expected)


@newton
def test_a_diverging_cell_raises(method):
    x, state = torch.rand(2, 1000, 3), torch.rand(2, 3)
    with pytest.raises(
        ConvergenceError, match=r"diverges, its state is not finite from step 12\d on; seen after \d+ iter"
    ):
        nonlinear_scan(lambda s, x: 2 * s + x, x, state, method=method)
    with pytest.raises(ConvergenceError, match=r"did not converge in 7 iterations .* relative residual \S+, tolerance"):
        nonlinear_scan(lambda s, x: 4 * s * (1 - s) + 0 * x, x, state, method=method, max_iterations=7)
    with pytest.raises(ConvergenceError, match="not finite from step 0"):
        nonlinear_scan(lambda s, x: x / 0, x, state, method=method)


def test_a_gradient_that_does_not_converge_raises():
    """A turn by a right angle has a zero diagonal: nothing of its adjoint is seen by the diagonal scan."""
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    x = torch.zeros(1, 50, 2, requires_grad=True)
    y, _ = nonlinear_scan(lambda s, x: s @ turn + x, x, method="quasi_newton", max_iterations=10)
    with pytest.raises(
        ConvergenceError, match=r"the gradient did not converge in 10 iterations .*method='newton' needs no"
    ):
        torch.autograd.grad(y.sum(), x)
    y, _ = nonlinear_scan(lambda s, x: s @ turn + x, x, method="quasi_newton")
    z, _ = nonlinear_scan(lambda s, x: s @ turn + x, x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(z.sum(), x))


@pytest.mark.parametrize("mixing", [False, True], ids=["channel by channel", "two channels mixed"])
def test_quasi_newton_finds_diagonals(mixing, monkeypatch):
    """Of a cell that acts channel by channel with few products, of any other one by one: and then it is exact."""
    w, count = torch.rand(17, dtype=torch.float64), []

    def cell(s, x):
        new = torch.tanh(w * s + x)
        return torch.cat([new[..., :16], torch.tanh(new[..., 16:] + s[..., 3:4])], -1) if mixing else new

    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **more: count.append(1) or grad(*args, **more))
    x = torch.randn(16, 17, dtype=torch.float64)
    blocks, _ = products(lambda s: cell(s, x), x, torch.arange(17)[None])
    made = len(count)
    exact = torch.func.vmap(torch.func.jacrev(cell))(x, x).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(blocks[..., 0, 0], exact)
    assert (made > 17) == mixing


def test_other_devices_use_the_associative_scan(monkeypatch):
    module = importlib.import_module("scanl.ops._newton")
    jacobians, b = torch.randn(2, 9, 4, 4, dtype=torch.float64), torch.randn(2, 9, 4, dtype=torch.float64)
    kernel = [module._affine(jacobians, b, adjoint) for adjoint in (False, True)]
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    torch.testing.assert_close([module._affine(jacobians, b, adjoint) for adjoint in (False, True)], kernel)
    d = torch.zeros(2, 4, dtype=torch.float64)
    for t in range(9):
        d = b[:, t] + (jacobians[:, t] @ d[..., None])[..., 0]
        torch.testing.assert_close(kernel[0][:, t], d)


@every
def test_what_comes_back(method):
    cell, _ = _gru(3, 3)
    x = torch.randn(2, 6, 3, dtype=torch.float64)
    result = nonlinear_scan(cell, x, method=method, tolerance=1e-9)
    y, last = result
    assert isinstance(result, tuple)
    assert isinstance(result.convergence, Convergence)
    assert result.convergence.tolerance == 1e-9
    assert result.convergence.residual <= 1e-9
    if method == "sequential":
        assert result.convergence == Convergence(6, 0.0, 1e-9)
    assert copy.copy(result).convergence == result.convergence
    torch.testing.assert_close(last, y[:, -1])
    with torch.no_grad():
        z, _ = nonlinear_scan(cell, x, method=method, tolerance=1e-9)
    assert y.requires_grad
    assert not z.requires_grad
    torch.testing.assert_close(z, y)


@every
def test_states_of_many_axes_no_steps_no_rows(method):
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    y, last = nonlinear_scan(lambda s, x: torch.cos(s + x), x, method=method)
    torch.testing.assert_close(y, nonlinear_scan(lambda s, x: torch.cos(s + x), x)[0])
    assert last.shape == (2, 3, 4)
    y, last = nonlinear_scan(lambda s, x: s, torch.zeros(2, 0, 3), torch.ones(2, 4), method=method)
    assert y.shape == (2, 0, 4)
    assert last.tolist() == [[1.0] * 4] * 2
    assert nonlinear_scan(lambda s, x: s, torch.zeros(0, 7, 3), method=method)[0].shape == (0, 7, 3)


@newton
def test_a_cell_that_forgets_its_state(method):
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    y, _ = nonlinear_scan(lambda s, x: x.sin(), x, method=method)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], x.cos())


@every
def test_half_precision(method):
    x = torch.randn(2, 20, 3, dtype=torch.bfloat16)
    y, _ = nonlinear_scan(lambda s, x: torch.tanh(s / 2 + x), x, method=method)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, nonlinear_scan(lambda s, x: torch.tanh(s / 2 + x), x)[0], rtol=2e-2, atol=2e-2)


def _identity(s, x):
    return s


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((torch.zeros(2, 3, 4),), {"method": "newtn"}, ConfigError, "unknown method 'newtn'; did you mean 'newton'?"),
        ((torch.zeros(2, 3, 4),), {"max_iterations": 0}, ConfigError, "max_iterations is 0, expected an integer of at"),
        ((torch.zeros(2, 3, 4),), {"tolerance": 0.0}, ConfigError, "tolerance is 0.0, expected a number above 0"),
        ((torch.zeros(2),), {}, ShapeError, "x has shape (2,), expected a tensor (B, T, *D)"),
        ((1.0,), {}, ShapeError, "x is a float, expected a tensor (B, T, *D)"),
        (
            (torch.zeros(2, 3, 4), torch.zeros(3, 4)),
            {},
            ShapeError,
            "state has shape (3, 4), expected (B, *F) with B=2",
        ),
        ((torch.zeros(2, 3, 4), torch.zeros(2, 4).long()), {}, ShapeError, "state is int64, expected a real tensor"),
        ((torch.zeros(2, 3, 4), torch.zeros(2, 4, device="meta")), {}, ShapeError, "state is on meta, expected cpu"),
    ],
)
def test_errors(arguments, options, error, message):
    with pytest.raises(error) as caught:
        nonlinear_scan(_identity, *arguments, **options)
    assert str(caught.value).startswith(f"nonlinear_scan: {message}")


@every
def test_a_state_that_does_not_fit_the_cell_is_named(method):
    cell, _ = _gru(4, 6, torch.float32)
    x = torch.zeros(2, 3, 4)
    with pytest.raises(
        ShapeError, match=r"nonlinear_scan: cell failed with .*state is None, which means zeros of x's width"
    ):
        nonlinear_scan(cell, x, method=method)
    message = r"cell gives float32 of shape \(2, 5\), expected float32 of shape \(2, 4\) like its state; state is None"
    with pytest.raises(ShapeError, match=message):
        nonlinear_scan(lambda s, x: torch.zeros(len(s), 5), x, method=method)
    with pytest.raises(ShapeError, match="cell gives float64 of shape"):
        nonlinear_scan(lambda s, x: s.double(), x, torch.zeros(2, 4), method=method)


def test_worked_example():
    module = importlib.import_module("scanl.ops.nonlinear_scan")
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.failed == 0
    assert result.attempted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["newton", "quasi_newton"])
def test_the_tolerance_when_none_is_given(dtype, method):
    """eps^(5/6) of the state's dtype: the result says so, and a residual above it goes on iterating."""
    expected = torch.finfo(dtype).eps ** (5 / 6)
    x = torch.randn(1, 5, 2, dtype=dtype)
    convergence = nonlinear_scan(lambda s, x: torch.tanh(s / 2 + x), x, method=method).convergence
    assert convergence.tolerance == pytest.approx(expected, rel=1e-12)
    assert convergence.residual <= expected
    assert fixed_point(lambda s, x: torch.tanh(s / 2 + x), x[:, 0]).convergence.tolerance == pytest.approx(
        expected, rel=1e-12
    )
