"""Cells and the kernels generated from them: every kind of operation that a step may use, and what is refused."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from numba import config
from numba.core.ccallback import CFunc
from torch import Tensor
from torch.nn import functional as F

import laws
from scanl import ops
from scanl.errors import BackendError, ConfigError, ShapeError
from scanl.ops._compiler import files
from scanl.ops._compiler.cells import kernels
from scanl.ops._cpu._cells import CORES, in_panels
from scanl.ops._cpu._kernel import kernel
from scanl.ops.registry import REGISTRY, Cell, OpSample

pytestmark = pytest.mark.early(2)


def _cell(declaration: str, **options):
    """Declare a cell that is not registered, so that it is no part of the library."""

    def make(step) -> Cell:
        return Cell(step, declaration, equation="", source="", **options)

    return make


@_cell("x: B T D, u: D D, state: B D -> B T D")
def dense(x, u, state):
    h = torch.tanh(x + state @ u.T)
    return h, h


@_cell("x: B T 4 D, r: 4 D D, b: 4 D, state: B 2 D -> B T D")
def lstm(x, r, b, state):
    h, c = state.unbind(1)
    i, f, g, o = (x + torch.einsum("goi,bi->bgo", r, h) + b).unbind(1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, torch.stack([h, c], 1)


@_cell("x: B T E, r: E D, b: E, state: B 2 D -> B T D")
def chunked(x, r, b, state):
    """E must be 4 D, which the declaration does not say."""
    h, c = state.unbind(1)
    i, f, g, o = (x + F.linear(h, r, b)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, torch.stack([h, c], 1)


@_cell("x: B T 4 D, w: 3 D D, v: D D, state: B 2 D -> B T D")
def two_products(x, w, v, state):
    """The second product needs the first one's result."""
    y, z = state.unbind(1)
    a = x[:, :3] + torch.einsum("goi,bi->bgo", w, y)
    z = z + torch.sigmoid(a[:, 0]) * (torch.tanh(a[:, 2]) - z)
    y = y + torch.sigmoid(a[:, 1]) * (torch.tanh(x[:, 3] + z @ v.T) - y)
    return y, torch.stack([y, z], 1)


@_cell("x: B T D, w: D D, g: D, c: D, state: B D -> B T D")
def normed(x, w, g, c, state):
    h = torch.tanh(F.layer_norm(x + state @ w.T, (x.shape[-1],), g, c))
    return h, h


@_cell("x: B T C N, w: C C 3, b: C 1, state: B C N -> B T C N")
def wave(x, w, b, state):
    taps = (torch.einsum("oi,bin->bon", w[:, :, k], torch.roll(state, 1 - k, -1)) for k in range(3))
    h = torch.relu(sum(taps) + x + b)
    return h, h


@_cell("x: B T H K, r: H K K, state: B H K -> B T H K")
def heads(x, r, state):
    h = torch.tanh(x + torch.einsum("bhk,hok->bho", state, r)) * (1 + state.mean(-1, keepdim=True))
    return h, h


@_cell("x: B T D, f: B T G, w: D D, state: B D -> B T D")
def ordered(x, f, w, state):
    """D must be 2 G. Softmax, running sums, parts that are read again, several elementary functions."""
    m = torch.cumsum(torch.softmax(f + state.unflatten(-1, (-1, 2)).sum(-1), -1), -1)
    m = m[..., None].expand(-1, -1, 2).flatten(1)
    h = m * state + (1 - m) * torch.tanh(x + state @ w.T) + F.softplus(state) * torch.sin(state) ** 2 / 9
    return h * 2, h


@_cell("x: B T D, w: D, state: B D -> B T D")
def scaled_by_its_size(x, w, state):
    """A number that depends on a size."""
    h = torch.tanh(state * w / x.shape[-1] ** 0.5 + x)
    return h, h


@_cell("x: B T D, w: D, state: B D -> B T D")
def elementary(x, w, state):
    low, high = torch.minimum(x, state), torch.clamp(x * state, -0.5, 0.7)
    h = torch.where(x > state, torch.exp(-(state**2)), F.silu(low)) + high * torch.log1p(torch.abs(w))
    h = h + torch.sqrt(1 + x * x) * torch.cos(state) - F.leaky_relu(x) / (2 + torch.erf(state))
    return torch.flip(h, (-1,)) / 3, h / 3


@_cell("x: B T D, f: B T D, v: D, state: B D -> B T D")
def gated(x, f, v, state):
    f = torch.sigmoid(f + v * state)
    c = f * state + (1 - f) * x
    return torch.tanh(c), c


@_cell("x: B T D, u: D D, state: B D -> B T D")
def skew(x, u, state):
    """Work on the parameters alone is done once, before the loop."""
    h = state + 0.1 * torch.tanh(state @ (u - u.T - 0.1 * torch.eye(u.shape[0], dtype=u.dtype)).T + x)
    return h, h


@_cell("x: B T D, state: B D -> B T D")
def plain(x, state, *, power: float = 2.0, name: str = "tanh"):
    h = torch.tanh(x + state) if name == "tanh" else torch.sigmoid(x + state) * power
    return h, h


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64) / (2 if len(shape) > 1 and shape[-1] == shape[-2] else 1)


def _operands(op: Cell, batch: int, steps: int, d: int, sequences: int | None = None) -> dict[str, Tensor]:
    """Draw operands. Every axis but D has a size that no other axis has."""
    sizes = {"B": batch, "T": steps, "D": d, "E": 4 * d, "G": d // 2, "C": 2, "N": 5, "H": 3, "K": 4}
    found = {}
    for operand in op.operands:
        own = {**sizes, "B": sequences or batch} if operand.name == "state" else sizes
        found[operand.name] = _draw(*[int(axis) if axis.isdigit() else own[axis] for axis in operand.choices[0]])
    return found


CELLS = [value for value in list(globals().values()) if isinstance(value, Cell)]


@pytest.mark.parametrize("op", CELLS, ids=lambda op: op.name)
def test_kernels_equal_the_loop(op):
    """Forward and in reverse, packed and not, with a batch above a group of rows and a width off the vectors."""
    for batch, steps, d, more in (
        (3, 5, 6, {}),
        (19, 3, 6, {"reverse": True}),
        (1, 9, 6, {"cu_seqlens": torch.tensor([0, 2, 2, 7, 9])}),
    ):
        packed = len(more["cu_seqlens"]) - 1 if "cu_seqlens" in more else None
        laws.truth(op, OpSample(_operands(op, batch, steps, d, packed)), more, "cpu", torch.float64)


@pytest.mark.parametrize("op", [gated, lstm, elementary], ids=lambda op: op.name)
@pytest.mark.parametrize("reverse", [False, True])
def test_float32_and_wide_channels(op, reverse):
    """Channels are divided over the cores if there are few sequences; parts of 32 leave a rest."""
    laws.truth(op, OpSample(_operands(op, 1, 4, 134)), {"reverse": reverse}, "cpu", torch.float32)
    laws.truth(op, OpSample(_operands(op, 2, 300, 4)), {"reverse": reverse}, "cpu", torch.float32)


def test_the_level_of_optimisation_of_others_is_left_alone(monkeypatch):
    """Kernels are compiled at the second level; numba then has the one that it had, also after an error."""
    level, seen = config.OPT, []

    def fails(self):
        seen.append(config.OPT)
        raise MemoryError

    monkeypatch.setattr(CFunc, "compile", fails)
    with pytest.raises(MemoryError):
        kernel("x")(lambda slots: None)._compile(torch.float32)
    assert seen == [2]
    assert config.OPT is level


def test_many_rows_and_several_vectors():
    """Groups of eight sequences and a rest of four; four gates of 37 channels are nine vectors and 4 columns."""
    laws.truth(lstm, OpSample(_operands(lstm, 8 * CORES + 4, 3, 37)), {}, "cpu", torch.float32)


@pytest.mark.parametrize("op", [lstm, heads], ids=lambda op: op.name)
@pytest.mark.parametrize("members", range(1, 10))
def test_products_of_any_number_of_rows(op, members, monkeypatch):
    """Tiles of eight, four, two rows and of one, with a rest of columns; over many steps a matrix is in panels.

    The order of the numbers of a matrix in memory changes no sum: the results are equal bit by bit.
    """
    operands = {name: each.float() for name, each in _operands(op, members * CORES, 3, 38).items()}
    with_matrix = op(**operands, backend="cpu")
    monkeypatch.setattr(kernels, "MIN_PANEL_STEPS", 3)
    assert all(map(torch.equal, op(**operands, backend="cpu"), with_matrix))
    laws.truth(op, OpSample(operands), {}, "cpu", torch.float32)


def test_panels_hold_every_number_once():
    """Two groups of 3 rows and 19 columns: a panel of 16, then 3 columns; in float64 two panels of 8."""
    matrix = torch.arange(2 * 3 * 19.0).view(2, 3, 19)
    for dtype, lanes in ((torch.float32, 16), (torch.float64, 8)):
        found = in_panels(matrix.to(dtype))
        for group, numbers in zip(matrix.to(dtype), found, strict=True):
            panels = [group[:, at : at + lanes].flatten() for at in range(0, 19, lanes)]
            assert torch.equal(numbers, torch.cat(panels))
    assert torch.equal(in_panels(matrix.mT[..., :2]).view(2, 19, 2), matrix.mT[..., :2])  # fewer columns than lanes


def test_scratch_memory_lives_as_long_as_the_kernel_runs():
    """Of a wide state it is over 32 MiB: malloc gives as much back to the system when it is freed."""
    operands = _operands(gated, 1, 2, 5_000_000)
    operands = {name: value.float() for name, value in operands.items()}
    for ours, loops in zip(gated(**operands, backend="cpu"), gated(**operands, backend="reference"), strict=True):
        torch.testing.assert_close(ours, loops)


def test_channels_are_divided_only_where_none_needs_another():
    divided = set()
    for op in CELLS:
        operands = _operands(op, 2, 2, 6)
        op(**operands, backend="cpu")
        (found,) = (each for each in next(iter(op._compiled.values())) if each.axes.fits(_sizes(op, operands)))
        if found._forward_plan.lanes:
            divided.add(op.name)
    assert divided == {"gated", "plain", "scaled_by_its_size"}


def _sizes(op: Cell, operands):
    sizes = {}
    for operand in op.operands:
        sizes.update(zip(operand.choices[0], operands[operand.name].shape, strict=True))
    return sizes


def test_one_source_serves_all_sizes():
    for d in (4, 6, 10):
        dense(**_operands(dense, 2, 3, d), backend="cpu")
        chunked(**_operands(chunked, 2, 3, d), backend="cpu")
    assert [len(each) for each in dense._compiled.values()] == [1]
    assert [len(each) for each in chunked._compiled.values()] == [1]


def test_a_number_from_a_size_makes_kernels_for_that_size():
    for d in (4, 9):
        laws.truth(scaled_by_its_size, OpSample(_operands(scaled_by_its_size, 2, 3, d)), {}, "cpu", torch.float64)
    (found,) = scaled_by_its_size._compiled.values()
    assert len(found) >= 2


def test_options_make_kernels_of_their_own():
    x = _draw(2, 4, 3)
    for options in ({}, {"name": "sigmoid"}, {"name": "sigmoid", "power": 0.5}):
        expected = plain(x, **options, backend="reference")
        torch.testing.assert_close(plain(x, **options, backend="cpu"), expected)


def test_an_operation_that_no_kernel_has_is_refused_by_name():
    @_cell("x: B T D, state: B D -> B T D")
    def sorted_cell(x, state):
        h = torch.sort(x + state)[0]
        return h, h

    x = _draw(2, 3, 4)
    *_, line, last = sorted_cell.explain(x).splitlines()
    assert (line, last) == ("cpu: its step uses operation aten.sort.default", "reference: can run")
    with pytest.raises(BackendError, match=r"backend 'cpu' cannot run these arguments: its step uses .*aten.sort"):
        sorted_cell(x, backend="cpu")
    torch.testing.assert_close(sorted_cell(x), sorted_cell(x, backend="reference"))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda x, state: (x + state.mean(0), x), "mean over the batch"),
        (lambda x, state: (x + state[0], x), "mixes the rows of the batch"),
        (lambda x, state: (x + state.flip(0), x), "flip over the batch"),
        (lambda x, state: (x + state @ x.mT @ x, x), "has the batch on two axes"),
    ],
)
def test_rows_of_the_batch_stay_apart(step, message):
    mixing = _cell("x: B T D, state: B D -> B T D")(_named(step))
    assert message in mixing.explain(_draw(2, 3, 2)).splitlines()[-2]


TAU = torch.tensor(0.5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda x, state: (x + TAU * state, x), "uses a tensor that is neither an operand nor made in the step"),
        (lambda x, state: (x if x.sum() > 0 else state, x), "cannot be traced: RuntimeError"),
        (lambda x, state: (x.float().double() + state, x), "a cast to torch.float32"),
        (lambda x, state: (x + state / x.shape[0], x), "numbers that depend on the sizes"),
        (lambda x, state: (x + state / x.shape[1], x), None),
        (lambda x, state: (x + sum(state[:, i, None] for i in range(x.shape[1])), x), None),
    ],
)
def test_what_cannot_be_compiled_runs_by_the_loop(step, message):
    """`auto` takes the loop then; a number from an axis, or a loop over one, gives kernels for that size."""
    op, x = _cell("x: B T D, state: B D -> B T D")(_named(step)), _draw(2, 3, 2)
    _, line, _ = op.explain(x).splitlines()
    assert line == "cpu: can run" if message is None else message in line
    torch.testing.assert_close(op(x), op(x, backend="reference"))


FUNCTIONS = [
    lambda h: h.var(-1, keepdim=True),
    lambda h: h.std(-1, unbiased=False, keepdim=True),
    lambda h: F.hardtanh(h),
    lambda h: F.relu6(h * 3),
    lambda h: F.hardsigmoid(h * 3),
    lambda h: F.gelu(h),
    lambda h: F.elu(h),
    lambda h: h * torch.tensor(2.0),
]


def test_functions_of_torch():
    """All in one cell, which compiles as fast as one of them alone; each has a factor of its own."""

    def step(x, state):
        total = sum((i + 1) * torch.tanh(function(x + state)).expand_as(x) for i, function in enumerate(FUNCTIONS))
        return total, total / len(FUNCTIONS) ** 2

    op = _cell("x: B T D, state: B D -> B T D")(_named(step))
    operands = {"x": _draw(2, 3, 4).requires_grad_(), "state": _draw(2, 4).requires_grad_()}
    exact, found = (laws.evaluate(op, operands, {}, backend) for backend in ("reference", "cpu"))
    torch.testing.assert_close(found, exact)


def _named(step):
    def mixing(x, state):
        return step(x, state)

    return mixing


def test_second_derivatives_and_half_precision():
    operands = {name: value.requires_grad_() for name, value in _operands(two_products, 2, 3, 3).items()}
    assert torch.autograd.gradgradcheck(
        lambda *values: two_products(*values, backend="cpu"), tuple(operands.values()), atol=1e-6
    )
    half = {name: value.to(torch.bfloat16) for name, value in operands.items()}
    y, last = dense(half["x"][:, :, 0], half["v"], backend="cpu")
    assert (y.dtype, last.dtype) == (torch.bfloat16, torch.float32)


def test_under_transformations_and_without_gradients():
    operands = _operands(dense, 2, 4, 3)
    with torch.inference_mode():
        torch.testing.assert_close(dense(**operands), dense(**operands, backend="reference"))

    def loss(u, backend):
        return dense(operands["x"], u, backend=backend)[0].sum()

    found, expected = (torch.func.grad(loss)(operands["u"], backend) for backend in ("cpu", "reference"))
    torch.testing.assert_close(found, expected)
    compiled = torch.compile(lambda x, u: dense(x, u)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(operands["x"], operands["u"]), dense(operands["x"], operands["u"])[0])


def test_the_backward_pass_may_be_asked_for_twice():
    operands = {name: value.requires_grad_() for name, value in _operands(lstm, 2, 3, 3).items()}
    y, _ = lstm(**operands, backend="cpu")
    first = torch.autograd.grad(y.sum(), list(operands.values()), retain_graph=True)
    second = torch.autograd.grad(y.sum(), list(operands.values()))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_memory_of_a_step():
    """What a step keeps: the state and the products, unless the output is the state."""
    for op, numbers in ((dense, 1), (gated, 1), (lstm, 2 + 4), (two_products, 2 + 3 + 1)):
        operands = _operands(op, 2, 3, 6)
        op(**operands, backend="cpu")
        found = next(iter(op._compiled.values()))[0]
        assert found.kept_numbers(found.sizes(_sizes(op, operands))) == numbers * 6, op.name


@pytest.mark.parametrize("long", [4, 100])
@pytest.mark.parametrize("op", [wave, two_products, heads], ids=lambda op: op.name)
def test_the_backward_pass_in_windows(op, long, monkeypatch):
    """Windows and chunks that end anywhere, with more sequences than a chunk has rows. A sequence that is not long may
    have several windows too.
    """
    for name, value in (("WINDOW", 4), ("MIN_PRODUCT_STEPS", long), ("HEAD", 2), ("CHUNK", 5)):
        monkeypatch.setattr(kernels, name, value)
    for batch, steps, more in (
        (3, 9, {}),
        (3, 8, {"reverse": True}),
        (7, 2, {}),
        (7, 3, {"reverse": True}),
        (1, 13, {"cu_seqlens": torch.tensor([0, 2, 2, 11, 13, 13])}),
        (1, 13, {"reverse": True, "cu_seqlens": torch.tensor([0, 0, 6, 12, 13])}),
    ):
        packed = len(more["cu_seqlens"]) - 1 if "cu_seqlens" in more else None
        laws.truth(op, OpSample(_operands(op, batch, steps, 6, packed)), more, "cpu", torch.float64)


SCRIPT = """
import torch
from scanl.ops import cell
@cell("x: B T D, u: D D, state: B D -> B T D", equation="", source="")
def mine(x, u, state):
    h = torch.tanh(x + state @ u.T)
    return h, h
x, u = torch.ones(1, 2, 3), torch.eye(3)
torch.testing.assert_close(mine(x, u, backend="cpu"), mine(x, u, backend="reference"))
"""


def test_it_runs_where_nothing_can_be_kept(tmp_path):
    """A file in place of the cache folder: nothing can be written there or in the home folder."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(blocked / "cache"), "HOME": str(blocked)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "set the environment variable NUMBA_CACHE_DIR" in done.stderr


def test_a_source_is_kept_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    first = files.load("one", "VALUE = 1\n")
    (path,) = tmp_path.rglob("one_*.py")
    before = path.stat().st_ino  # a file that is written again is another one; the time says when it was used last
    assert files.load("one", "VALUE = 1\n").VALUE == first.VALUE == 1
    assert path.stat().st_ino == before
    path.write_text("VALUE = 2\n")  # damaged: written again
    assert files.load("one", "VALUE = 1\n").VALUE == 1


def test_a_cell_of_a_user_is_an_op_like_the_others():
    before = set(REGISTRY)

    @ops.cell("x: B T D, u: D D, state: B D -> B T D", equation="h_t = tanh(x_t + U h_{t-1})", source="Elman 1990")
    def my_elman(x, u, state):
        h = torch.tanh(x + state @ u.T)
        return h, h

    try:
        assert set(REGISTRY) - before == {"my_elman"}
        layer = torch.nn.RNN(3, 3, batch_first=True, bias=False, dtype=torch.float64)
        x = _draw(2, 5, 3)
        y, last = my_elman(x @ layer.weight_ih_l0.T, layer.weight_hh_l0)
        torch.testing.assert_close((y, last[None]), layer(x))
        with pytest.raises(ShapeError, match="u has shape"):
            my_elman(x, x)
    finally:
        del REGISTRY["my_elman"]


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="plain: unknown argument 'powr'; did you mean 'power'"):
        plain(_draw(1, 2, 3), powr=1.0)
    with pytest.raises(ConfigError, match="unknown activation"):
        ops.indrnn(_draw(1, 2, 3), _draw(3), activation="none")


LEAVES = ["s", "x0", "x1", "v0 * s", "v1 * x0", "s @ w0.T", "torch.tanh(s) @ w1.T"]
UNARY = ["torch.tanh({})",
         "torch.sigmoid({})", "torch.relu({})", "torch.sin({})", "-({})", "({}) ** 2", "F.softplus({})",
         "torch.exp(-({}) ** 2)", "torch.roll({}, 1, -1)", "torch.flip({}, (-1,))", "F.logsigmoid({})",
         "torch.cat(({}).chunk(2, -1)[::-1], -1)", "({}).mean(-1, keepdim=True) + s", "torch.abs({})",
         "torch.tanh({}) @ w1.T", "torch.cumsum({}, -1) / 4", "F.silu({})"]  # fmt: skip
BINARY = ["({}) + ({})", "({}) - ({})", "({}) * ({})", "torch.maximum({}, {})", "torch.where(({0}) > ({1}), {0}, x1)",
          "({}) / (1 + ({}) ** 2)", "torch.minimum({}, {})"]  # fmt: skip
EXPRESSIONS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.builds(lambda form, a: form.format(a), st.sampled_from(UNARY), inner),
        st.builds(lambda form, a, b: form.format(a, b), st.sampled_from(BINARY), inner, inner),
    ),
    max_leaves=8,
)


def _random_cell(state: str, output: str) -> Cell:
    source = (
        "def drawn(x, v, w, state):\n"
        "    s, (x0, x1), (v0, v1), (w0, w1) = state, x.unbind(1), v.unbind(0), w.unbind(0)\n"
        f"    after = torch.tanh({state})\n"
        f"    return {output} + x0 * v0 + x1 * v1 + s @ (w0 - w1).T, after\n"  # every operand has a gradient
    )
    scope = {"torch": torch, "F": F}
    exec(source, scope)
    return _cell("x: B T 2 D, v: 2 D, w: 2 D D, state: B D -> B T D")(scope["drawn"])


def _check_random(state: str, output: str) -> None:
    op = _random_cell(state, output)
    generator = torch.Generator().manual_seed(1)
    sizes = {"x": (2, 3, 2, 6), "v": (2, 6), "w": (2, 6, 6), "state": (2, 6)}
    draws = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in sizes.items()}
    exact = laws.evaluate(op, draws, {}, "reference")
    largest = max(float(value.detach().abs().max()) for value in exact.values())
    # A comparison such as (a + b) - b > a is decided by rounding, so such a cell has no numbers to be held to.
    moved = {name: value * (1 + 1e-13 * torch.randn_like(value)) for name, value in draws.items()}
    again = laws.evaluate(op, moved, {}, "reference")
    assume(all(float((again[name] - value).detach().abs().max()) <= 1e-6 * largest for name, value in exact.items()))
    for name, value in laws.evaluate(op, draws, {}, "cpu").items():
        error = float((value - exact[name]).detach().abs().max())
        assert error <= torch.finfo(torch.float64).eps ** 0.75 * largest, f"{state}; {output}: {name} is {error} off"


@settings(max_examples=2, deadline=None, phases=[Phase.generate])
@given(EXPRESSIONS, EXPRESSIONS)
def test_random_cells(state, output):
    _check_random(state, output)


@pytest.mark.long
@settings(max_examples=500, deadline=None, phases=[Phase.generate])
@given(EXPRESSIONS, EXPRESSIONS)
def test_many_random_cells(state, output):
    _check_random(state, output)
