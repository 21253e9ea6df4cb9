"""Newton's methods on cells: their Jacobians, values and gradients against the loop, and the option of layers."""

import doctest
import math
import sys

import pytest
import torch
from torch import Tensor

import scanl.layers
from scanl import ops
from scanl.errors import ConfigError, ShapeError
from scanl.layers import LEM, build
from scanl.layers.ode._timed import TimedCell
from scanl.layers.parts.cell_layer import SolvedLayer
from scanl.ops import ConvergenceError, _newton, registry
from scanl.ops._compiler.cells import jacobian as structured
from scanl.ops.registry import Cell, OpSample

pytestmark = pytest.mark.cells_by_loop("name")

scanl.layers.names()  # imports all layers, which registers their cells
CELLS = [pytest.param(cell, id=cell.name) for cell in registry.cells()]
LAYERS = [name for name in scanl.layers.names() if scanl.layers.get(name).added]
newton = pytest.mark.parametrize("method", ["newton", "quasi_newton"])


def _cell(name: str) -> Cell:
    found = registry.get(name)
    assert isinstance(found, Cell)
    return found


def _loss(y: Tensor, last: Tensor) -> Tensor:
    return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).cos().view(y.shape)).sum() + last.sin().sum()


def _results(cell: Cell, sample: OpSample, method: str | None = None, **more) -> list[Tensor]:
    """Return the outputs, the last state and all gradients, of the loop or of a method."""
    given = {name: value.clone().requires_grad_() for name, value in sample.operands.items() if value is not None}
    options = {**sample.options, **more}
    if method is None:
        y, last = cell(**given, **{k: v for k, v in options.items() if k != "tolerance"}, backend="reference")
    else:
        y, last = cell.solve(method, *[given.get(name) for name in cell.names], **options)
    return [y, last, *torch.autograd.grad(_loss(y, last), list(given.values()), materialize_grads=True)]


def _linearised(cell: Cell, sample: OpSample, method: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return J of every row at some states by autograd, and as `solve` takes it, whole or in blocks with places."""
    caught: list[tuple[Tensor, Tensor, Tensor | None]] = []
    solve = _newton.Newton.solve

    def catch(self, f, state, steps, linearise, starts=None):
        batch = state.shape[0] if starts is None else 1
        before = torch.randn(batch * steps, *state.shape[1:], generator=torch.Generator().manual_seed(1)).to(state)
        size = before[0].numel()
        exact = torch.autograd.functional.jacobian(lambda s: f(s).flatten(1).sum(0), before)
        caught.append((exact.reshape(size, len(before), size).transpose(0, 1), *linearise(before)))
        return solve(self, f, state, steps, linearise, starts)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(_newton.Newton, "solve", catch)
        cell.solve(method, *[sample.operands.get(name) for name in cell.names], **sample.options)
    (found,) = caught
    return found


def _blocks(exact: Tensor, places: Tensor) -> Tensor:
    return torch.stack([exact[:, own[:, None], own[None]] for own in places.T], 1)


def _dense(blocks: Tensor, places: Tensor) -> Tensor:
    out = blocks.new_zeros(len(blocks), places.numel(), places.numel())
    for channel, own in enumerate(places.T):
        out[:, own[:, None], own[None]] = blocks[:, channel]
    return out


def _check_jacobian(cell: Cell, sample: OpSample) -> bool:
    """Compare J with autograd; return whether `newton` takes blocks."""
    exact, found, places = _linearised(cell, sample, "newton")
    torch.testing.assert_close(found if places is None else _dense(found, places), exact, rtol=1e-9, atol=1e-11)
    exact, found, own = _linearised(cell, sample, "quasi_newton")
    assert own is not None
    torch.testing.assert_close(found, _blocks(exact, own), rtol=1e-9, atol=1e-11)
    return places is not None


APART = (  # the cells whose channels do not act on each other
    "columnar_cell",
    "elstm_cell",
    "gated_outer_product_cell",
    "indrnn",
    "linoss_cell",
    "sru",
    "unicornn_cell",
)


# The Newton methods refuse cells whose gradient is another function's. Random states are no weights of ntm's heads.
SOLVED = [case for case in CELLS if not case.values[0].excused.get("the gradients of the output")]
OF_ANY_STATE = [case for case in SOLVED if case.values[0].name != "ntm"]


@pytest.mark.parametrize("cell", OF_ANY_STATE)
def test_jacobians_come_from_the_operations_of_the_step(cell, monkeypatch):
    """Of every registered cell, equal to autograd's; none of them needs vector-Jacobian products."""
    monkeypatch.setattr(sys.modules[Cell.__module__], "products", None)
    samples = {tuple(sorted(sample.operands)): sample for sample in reversed(list(cell.samples))}
    for sample in samples.values():
        blocks = _check_jacobian(cell, sample)
        assert blocks == (cell.name in APART)


def test_a_cell_with_a_pseudo_derivative_is_refused():
    cell = next(case.values[0] for case in CELLS if case.values[0].name == "lif_cell")
    (sample, *_) = cell.samples
    with pytest.raises(ConfigError, match=r"method is 'newton', expected 'sequential' because a pseudo-derivative"):
        cell.solve("newton", *[sample.operands.get(name) for name in cell.names], **sample.options)


@pytest.mark.parametrize("cell", SOLVED)
def test_newton_equals_the_loop(cell):
    """Values and all gradients, of a batch and of packed sequences in reverse."""
    for packed in (False, True):
        sample = next((each for each in cell.samples if ("cu_seqlens" in each.options) == packed), None)
        if sample is not None:
            expected = _results(cell, sample, reverse=packed)
            actual = _results(cell, sample, "newton", reverse=packed, tolerance=1e-13)
            for a, b in zip(actual, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


QUASI = ["gru", "lstm", "slstm", "cornn_cell", "lem_cell", "unicornn_cell", "layernorm_lstm_cell", "indrnn"]


@pytest.mark.parametrize("name", QUASI)
@pytest.mark.parametrize("packed", [False, True], ids=["batch, reversed", "packed"])
def test_quasi_newton_equals_the_loop(name, packed):
    cell = _cell(name)
    sample = next(each for each in cell.samples if ("cu_seqlens" in each.options) == packed)
    expected = _results(cell, sample, reverse=not packed)
    actual = _results(cell, sample, "quasi_newton", reverse=not packed, tolerance=1e-13)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


# --- the forms of a derivative


@pytest.fixture
def declare():
    """Declare cells for one test."""
    made = []

    def declare(declaration, step, **more):
        made.append(ops.cell(declaration, equation="", source="", **more)(step))
        return made[-1]

    yield declare
    for cell in made:
        registry.REGISTRY.pop(cell.name, None)


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


BY_CHANNEL = {
    "sums over variables": lambda x, s: torch.tanh(s * x + s.mean(1, keepdim=True) - s.amax(1, keepdim=True)),
    "copies of parts": lambda x, s: torch.stack([s[:, 2] * x[:, 0], s[:, 0].sin(), s[:, 1] + x[:, 1]], 1),
    "turned and turned back": lambda x, s: torch.tanh(s.flip(-1) + x.flip(-1)).flip(-1).roll(2, -1).roll(-2, -1),
    "views that merge axes": lambda x, s: (s.flatten(1) * x.flatten(1)).cos().unflatten(1, (3, 4)),
    "written in place": lambda x, s: (s * x).add_(s).mul_(0.5).clamp_(-1, 1),
    "no state": lambda x, s: x.exp(),
    "conditions": lambda x, s: torch.where(s > x, s.sigmoid(), x.masked_fill(x > 0.2, 0.3) * s.abs()),
}
MIXED = {
    "other channels": lambda x, s: s.roll(1, -1) * x,
    "sums over channels": lambda x, s: torch.softmax(s, -1) + torch.layer_norm(s, (4,)) + x,
    "running sums": lambda x, s: torch.tanh(s.cumsum(-1) + x).cumsum(1) / 4,
    "joined with other channels": lambda x, s: torch.cat([s[:, :1], s[:, 1:].flip(-1) * x[:, 1:]], 1),
    "joined with sums": lambda x, s: torch.stack([s[:, 0], s[:, 1].sum(-1, keepdim=True) + x[:, 1], x[:, 2]], 1),
    "two reductions": lambda x, s: (
        s * s.amax((1, 2), keepdim=True) - s.amin(-1, keepdim=True) * x.std(-1, keepdim=True)
    ),
}


@pytest.mark.parametrize("name", [*BY_CHANNEL, *MIXED])
def test_forms_of_a_derivative(name, declare):
    f = {**BY_CHANNEL, **MIXED}[name]

    def one(x, state):
        s = f(x, state)
        return s[:, 0], s

    cell = declare("x: B T 3 D, state: B 3 D -> B T D", one)
    sample = OpSample({"x": _draw(2, 3, 3, 4), "state": _draw(2, 3, 4)})
    assert _check_jacobian(cell, sample) == (name in BY_CHANNEL)
    for a, b in zip(_results(cell, sample, "newton"), _results(cell, sample), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


PRODUCTS = {
    "of the state": lambda x, w, s: torch.tanh(s @ w[0]),
    "of a function": lambda x, w, s: (s * x).sin() @ w[0] + s,
    "of groups": lambda x, w, s: torch.einsum("bhk,hkm->bhm", torch.tanh(s + x), w),
    "of a product": lambda x, w, s: torch.tanh(s @ w[1] + x) @ w[0].T,
    "on the left": lambda x, w, s: (w[0] @ (s * x).mT).mT,
    "of a part": lambda x, w, s: torch.cat([s[:, :1] @ w[0] * x[:, :1], s[:, 1:]], 1),
    "of a channel twice": lambda x, w, s: (torch.cat([s[:, 0], s[:, 0].sin()], 1) @ w.flatten(0, 1))[:, None] + x,
    "of an input": lambda x, w, s: s * (x @ w[0]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, declare, monkeypatch):
    """In parts of few rows too: a state of many numbers is linearised part by part."""
    monkeypatch.setattr(structured, "BUDGET", 1)

    def one(x, w, state):
        s = PRODUCTS[name](x, w, state)
        return s, s

    cell = declare("x: B T H K, w: H K K, state: B H K -> B T H K", one)
    sample = OpSample({"x": _draw(10, 13, 2, 3), "w": _draw(2, 3, 3) / 2, "state": _draw(10, 2, 3)})
    _check_jacobian(cell, sample)


def test_variables_after_the_channels(declare):
    """A number among the axes of the state counts variables wherever it stands."""

    def one(x, w, state):
        s = torch.stack([state[..., 1] * w + x, (state[..., 0] * state[..., 1]).tanh()], -1)
        return s[..., 0], s

    cell = declare("x: B T D, w: D, state: B D 2 -> B T D", one)
    sample = OpSample({"x": _draw(2, 5, 3), "w": _draw(3), "state": _draw(2, 3, 2)})
    assert _check_jacobian(cell, sample)
    for a, b in zip(_results(cell, sample, "quasi_newton"), _results(cell, sample), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@newton
def test_an_affine_cell_is_solved_in_one_iteration(method, declare):
    """Packed sequences too, because J is cut where they begin."""

    def one(x, w, state):
        s = w * state + x
        return s, s

    cell = declare("x: B T D, w: D, state: B D -> B T D", one)
    x, w, state = _draw(1, 9, 3), _draw(3), _draw(3, 3)
    result = cell.solve(method, x, w, state, cu_seqlens=torch.tensor([0, 4, 4, 9]), tolerance=1e-13)
    assert result.convergence.iterations <= 2  # the second one rounds


@newton
def test_a_step_that_cannot_be_traced_takes_vector_jacobian_products(method, declare):
    def one(x, w, state):
        y = torch.sort(x + state[:, 0], -1)[0]
        return y, torch.stack([torch.tanh(y + w), state[:, 0] * state[:, 1]], 1)

    cell = declare("x: B T D, w: D, state: B 2 D -> B T D", one)
    sample = OpSample({"x": _draw(2, 6, 3), "w": _draw(3), "state": _draw(2, 2, 3)})
    assert "aten.sort" in cell.explain(sample.operands["x"], sample.operands["w"])
    assert not _check_jacobian(cell, sample)
    for a, b in zip(_results(cell, sample, method), _results(cell, sample), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@newton
def test_a_gradient_that_the_step_stops_is_stopped(method, declare):
    """The Jacobian of the trace sees through `detach`; the gradient is that of the loop all the same."""

    def one(x, state):
        s = torch.tanh(x + state / 2 + (state / 3).detach())
        return s, s

    cell = declare("x: B T D, state: B D -> B T D", one)
    sample = OpSample({"x": _draw(2, 6, 3), "state": _draw(2, 3)})
    for a, b in zip(_results(cell, sample, method), _results(cell, sample), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


# --- long sequences


def _long(name: str, steps: int, width: int) -> tuple[Cell, OpSample]:
    torch.manual_seed(0)
    x, spans = torch.randn(1, steps, width), torch.ones(1, steps, 1)
    cell = _cell(name.split()[0])
    if name == "gru":
        given = {"x": torch.randn(1, steps, 3, width), "u": torch.randn(3, width, width) / math.sqrt(width)}
    elif name.startswith("indrnn"):
        return cell, OpSample({"x": x, "w": torch.rand(width)}, {"activation": name.split()[1]})
    else:
        layer = build(name.removesuffix("_cell"), width)
        assert isinstance(layer, TimedCell)
        with torch.no_grad():
            operands = zip(cell.names, layer.operands(x, spans), strict=False)
        return cell, OpSample({key: value for key, value in operands if value is not None}, layer.options())
    return cell, OpSample(given)


@pytest.mark.parametrize(
    ("name", "method", "most"),
    [
        ("gru", "newton", 15),
        pytest.param("cornn_cell", "newton", 15, marks=pytest.mark.long),
        pytest.param("lem_cell", "newton", 15, marks=pytest.mark.long),
        ("unicornn_cell", "quasi_newton", 15),
        pytest.param("indrnn tanh", "quasi_newton", 15, marks=pytest.mark.long),
        ("indrnn relu", "quasi_newton", 30),  # weights are near 1, and each iteration finds more of the steps at 0
    ],
)
def test_thousands_of_steps_in_few_iterations(name, method, most):
    """4,096 steps in float32 to 1e-5, and the gradient of backpropagation through time."""
    cell, sample = _long(name, 4096, 8)
    given = {key: value.requires_grad_() for key, value in sample.operands.items()}
    y, last = result = cell.solve(method, *[given.get(key) for key in cell.names], **sample.options)
    assert result.convergence.iterations <= most
    assert result.convergence.residual <= result.convergence.tolerance
    z, end = cell(**given, **sample.options, backend="reference")
    assert (y - z).abs().max() <= 1e-5 * z.abs().max()
    found, expected = (torch.autograd.grad(_loss(*each), list(given.values())) for each in ((y, last), (z, end)))
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


# --- calls


@pytest.mark.parametrize("method", _newton.METHODS)
def test_what_comes_back(method):
    x, u = _draw(2, 6, 3, 4), _draw(3, 4, 4)
    y, last = result = ops.gru.solve(method, x, u, tolerance=1e-9)
    expected, end = ops.gru(x, u)
    torch.testing.assert_close((y, last), (expected, end))
    assert result.convergence.tolerance == 1e-9
    if method == "sequential":
        assert result.convergence == ops.Convergence(6, 0.0, 1e-9)
    assert not y.requires_grad


@newton
def test_empty_and_short_sequences(method):
    u = _draw(3, 4, 4).requires_grad_()
    for shape in ((2, 0, 3, 4), (0, 5, 3, 4), (2, 1, 3, 4)):
        x, state = _draw(*shape), _draw(shape[0], 4)
        found = ops.gru.solve(method, x, u, None, state)
        torch.testing.assert_close(tuple(found), ops.gru(x, u, None, state))
    x, state, offsets = _draw(1, 0, 3, 4), _draw(2, 4), torch.tensor([0, 0, 0])
    y, last = ops.gru.solve(method, x, u, None, state, cu_seqlens=offsets)
    torch.testing.assert_close(last, state)
    assert y.shape == (1, 0, 4)


@pytest.mark.parametrize("method", _newton.METHODS)
@pytest.mark.parametrize("reverse", [False, True])
def test_states_that_begin_anew(method, reverse):
    x, u, state = _draw(2, 6, 3, 4), _draw(3, 4, 4), _draw(2, 4)
    starts = torch.tensor([[0, 1, 0, 0, 1, 0], [1, 0, 0, 0, 1, 1]]).bool()
    found = ops.gru.solve(method, x, u, None, state, starts=starts, reverse=reverse, tolerance=1e-13)
    torch.testing.assert_close(tuple(found), ops.gru(x, u, None, state, starts=starts, reverse=reverse))


@newton
def test_half_precision(method):
    x, u = torch.randn(2, 20, 3, 4), torch.randn(3, 4, 4) / 2
    y, last = ops.gru.solve(method, x.bfloat16(), u.bfloat16())
    expected, end = ops.gru(x.bfloat16(), u.bfloat16())
    assert (y.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close((y, last), (expected, end))


@newton
def test_other_devices(method, monkeypatch):
    """Without the compiled kernel the linear recurrences are associative scans."""
    monkeypatch.setattr(_newton.importlib.util, "find_spec", lambda name: None)
    for cell in (_cell("gru"), _cell("unicornn_cell")):
        sample = next(iter(cell.samples))
        for a, b in zip(_results(cell, sample, method), _results(cell, sample), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@newton
def test_second_derivatives_raise(method):
    x, u = _draw(2, 4, 3, 2).requires_grad_(), _draw(3, 2, 2)
    (grad,) = torch.autograd.grad(ops.gru.solve(method, x, u)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"gru\.solve: Newton's methods give first derivatives only"):
        torch.autograd.grad(grad.sum(), x)


@pytest.mark.parametrize(
    ("method", "options", "error", "message"),
    [
        ("newtn", {}, ConfigError, "gru.solve: unknown method 'newtn'; did you mean 'newton'?"),
        ("newton", {"max_iterations": 0}, ConfigError, "gru.solve: max_iterations is 0, expected an integer of at"),
        ("newton", {"tolerance": -1.0}, ConfigError, "gru.solve: tolerance is -1.0, expected a number above 0"),
        ("newton", {"state": torch.zeros(2, 5)}, ShapeError, "gru: state has shape (2, 5), expected (B, D)"),
        ("newton", {"cu_seqlens": torch.tensor([0, 6])}, ShapeError, "gru: x has a batch of 2, expected 1"),
        ("newton", {"max_iterations": 1}, ConvergenceError, "gru.solve: did not converge in 1 iterations"),
    ],
)
def test_errors(method, options, error, message):
    with pytest.raises(error) as caught:
        ops.gru.solve(method, _draw(2, 6, 3, 4), _draw(3, 4, 4), **options)
    assert str(caught.value).startswith(message)


def test_worked_example():
    result = doctest.testmod(sys.modules[Cell.__module__], extraglobs={"torch": torch})
    assert result.failed == 0
    assert result.attempted


def test_a_transformation_of_torch_func_is_refused():
    u = _draw(3, 4, 4)
    with pytest.raises(NotImplementedError, match=r"gru\.solve: method is 'newton', which cannot run under a transf"):
        torch.func.vmap(lambda x: ops.gru.solve("newton", x, u)[0])(_draw(2, 2, 6, 3, 4))


# --- layers


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_solved(name):
    """By the method of its option, with gradients; one token at a time is sequential."""
    torch.manual_seed(0)
    dim = 12
    layer = build(name, dim, **scanl.layers.get(name).sample).double().eval()
    solved = build(name, dim, **scanl.layers.get(name).sample, solver="newton").double().eval()
    solved.load_state_dict(layer.state_dict())
    assert "solver='newton'" in repr(solved)
    x, w = (torch.randn(2, 5, dim, dtype=torch.float64, requires_grad=True) for _ in range(2))
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        run = _newton.Newton.solve
        patch.setattr(_newton.Newton, "solve", lambda *args, **more: calls.append(1) or run(*args, **more))
        (y, _), (z, _) = solved(x), layer(x)
        assert len(calls) == 1
        torch.testing.assert_close(solved(x[:, :1])[0], layer(x[:, :1])[0])
        assert len(calls) == 1
    torch.testing.assert_close(y, z, rtol=1e-8, atol=1e-9)
    found, expected = (
        torch.autograd.grad((each * w).sum(), [x, *own.parameters()], allow_unused=True)
        for each, own in ((y, solved), (z, layer))
    )
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)


def test_the_option_of_layers():
    with pytest.raises(ConfigError, match="lem: unknown solver 'newtn'; did you mean 'newton'"):
        build("lem", 4, solver="newtn")

    class Mine(LEM):
        solver = "newton"

    assert Mine(4).solver == "newton"
    assert Mine(4, solver="quasi_newton").solver == "quasi_newton"  # pyright: ignore[reportCallIssue]
    assert build("lem", 4).config["solver"] == "sequential"
    with pytest.raises(ConfigError, match="unknown option of neuralode 'solver'"):  # its equation has its own
        build("neuralode", 4, solver="newton")
    solved = {name for name in scanl.layers.names() if issubclass(scanl.layers.get(name), SolvedLayer)}
    assert solved - set(LAYERS) == {"alif", "lif", "neuralode", "odefwp", "odernn"}
