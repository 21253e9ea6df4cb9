"""What is not finite stays where it belongs: never an earlier step, another row or another sequence, and never lost."""

import functools
import importlib
import importlib.util
import itertools

import pytest
import torch

import laws
import scanl
from scanl.layers import state as states
from tests.test_layers import LAYERS, STREAMING, inputs, make, make_like

CASES = [pytest.param(op, backend, id=f"{op.name}-{backend}") for op in laws.OPS for backend in laws.backends(op)]
INTERPRETED = not torch.cuda.is_available()
each = pytest.mark.parametrize(("op", "backend"), CASES)
# What numpy says of NaN, where it interprets the kernels of triton
pytestmark = [
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
    pytest.mark.cells_by_loop("name"),
]
numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")


@numba
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("timed", [True, False], ids=["a each step", "one a"])
def test_a_long_scan_cut_in_time_loses_nothing(value, reverse, timed):
    """A long narrow scan is cut into pieces, and what one leaves is carried into all of the next."""
    steps = 4100
    x, bad = torch.randn(1, steps, 3), steps - 10 if reverse else 10
    x[0, bad, 1] = value
    a = torch.full((1, steps, 3) if timed else (3,), 0.5)
    leaves = [x.requires_grad_(), a.requires_grad_()]
    y, last = scanl.ops.linear_scan(x, a, reverse=reverse, backend="cpu")
    finite = torch.ones(steps, dtype=torch.bool)
    finite[slice(0, bad + 1) if reverse else slice(bad, None)] = False
    assert torch.equal(y[0, :, 1].isfinite(), finite)
    assert y[0, :, ::2].isfinite().all()
    assert last.isfinite().tolist() == [[True, False, True]]
    # Backwards it is the gradient that is cut, and carried to the steps before.
    dy = torch.ones(1, steps, 3)
    dy[0, steps - 1 - bad, 2] = value
    dx, da = torch.autograd.grad(y, leaves, dy)
    assert torch.equal(dx[0, :, 2].isfinite(), finite.flip(0))
    assert dx[0, :, :2].isfinite().all()
    if not timed:
        assert da.isfinite().tolist() == [True, False, False]


@numba
@pytest.mark.parametrize("shape", [(3,), (4100, 3), (4100, 1), ()], ids=["channels", "all", "steps", "one"])
def test_a_scan_does_not_depend_on_the_number_of_cores(shape, monkeypatch):
    """Neither on how many threads there are, nor on how many cores the machine has: the same numbers to the bit."""
    from scanl.ops._cpu import linear_scan

    x, a, dy = torch.randn(1, 4100, 3), torch.rand(shape), torch.randn(1, 4100, 3)
    wide, shared = torch.randn(1, 300, 256), torch.rand(300, 1)
    threads, found = torch.get_num_threads(), []
    for cores in (1, 2, 5, 64):
        monkeypatch.setattr(linear_scan, "CORES", cores)
        linear_scan._layout.cache_clear()
        torch.set_num_threads(min(cores, 2))
        try:
            results = []
            for values, decays, grad in ((x, a, dy), (wide, shared, wide)):
                leaves = [values.clone().requires_grad_(), decays.clone().requires_grad_()]
                y, last = scanl.ops.linear_scan(*leaves, backend="cpu")
                results += [y, last, *torch.autograd.grad(y, leaves, grad)]
            found.append(results)
        finally:
            torch.set_num_threads(threads)
    linear_scan._layout.cache_clear()
    for results in found[1:]:
        for value, first in zip(results, found[0], strict=True):
            torch.testing.assert_close(value, first, rtol=0, atol=0)


def _samples(op, backend, packed=False):
    """Each kind of operands that the op takes; one where a run is long."""
    plain = [sample for sample in op.samples if "cu_seqlens" not in sample.options]
    able = [sample for sample in plain if not laws.refusal(op, sample, backend)]
    assert len(able) > len(plain) / 2
    if INTERPRETED and backend == "triton":
        return able[-1:] if packed else [max(able, key=lambda sample: len(sample.operands))]
    # Where the frame gives a backend one sequence at a time, there is little to see.
    able = able if op.backends[backend].whole or not packed else able[-1:]
    return laws.some(able, 2 if backend == "reference" else 4)


def _steps(op, backend, packed=False):
    """How many steps, and which are spoilt; few where a run is long, but more than one chunk of a matrix memory."""
    if INTERPRETED and backend == "triton":
        return (18, (10,)) if "V" in op.output else (6, (3,))
    return (70, (10, 67)) if op.backends[backend].whole or not packed else (18, (10,))


@each
@pytest.mark.parametrize(("reverse", "packed"), [(False, False), (True, True)], ids=["rows", "packed, in reverse"])
def test_it_stays_where_it_belongs(op, backend, reverse, packed):
    if INTERPRETED and backend == "triton" and not (packed or laws.ALL):
        pytest.skip("rows beside each other run with --all: packed ones are the same kernels")
    for sample in _samples(op, backend, packed):
        laws.stays(op, sample, reverse, backend, *_steps(op, backend, packed), packed=packed)


@each
def test_what_all_rows_share_is_not_lost(op, backend):
    for sample in _samples(op, backend):
        laws.is_not_lost(op, sample, backend, _steps(op, backend)[0])


STEPS, BAD = 20, 17  # more than a convolution is worth, and a step that has others before and after it
ROWS: list[tuple[str, float] | None] = [None]
ROWS += [("x", laws.NOT_FINITE[0]), ("x", laws.NOT_FINITE[1]), None, ("x", laws.NOT_FINITE[2]), ("dy", torch.nan), None]


def _of_layer(layer, values, packed):
    """Outputs, the gradient of the inputs, and what the state holds, all (rows, ...)."""
    x = values["x"].clone().requires_grad_()
    if packed:
        y, state = layer(x.flatten(0, 1)[None], cu_seqlens=torch.arange(len(x) + 1) * x.shape[1])
        y = y[0].unflatten(0, x.shape[:2])
    else:
        y, state = layer(x)
    (dx,) = torch.autograd.grad(y, x, values["dy"])
    return {"y": y.detach(), "dx": dx, **{f"state{path}": leaf.detach() for path, leaf in states.leaves(state)}}


def _spoilt(layer, inputs):
    """Inputs and the gradient of the outputs, finite, and with a number in some rows that is not."""
    finite = {"x": inputs(len(ROWS), STEPS, dtype=torch.float32), "dy": torch.ones(len(ROWS), STEPS, layer.dim)}
    spoilt = {key: value.clone() for key, value in finite.items()}
    for row, place in enumerate(ROWS):
        if place is not None:
            spoilt[place[0]][row, BAD, 5] = place[1]
    return finite, spoilt


@functools.cache
def _both(name, packed, inputs):
    """What a layer gives for finite numbers, and for those of which some are not: each law reads it.

    inputs: the function that draws the inputs, by which those of other draws are kept apart.
    """
    layer = make(name, torch.float32)
    return [_of_layer(layer, values, packed) for values in _spoilt(layer, inputs)]


@functools.cache
def _wide(name, inputs):
    """The outputs of the same layer in float64, for the finite numbers."""
    layer = make(name, torch.float32)
    with torch.no_grad():
        return make_like(layer, name)(_spoilt(layer, inputs)[0]["x"].double())[0]


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", STREAMING)
def test_earlier_outputs_are_the_same_to_the_bit(name, packed):
    """Whatever comes later, finite or not."""
    exact, actual = (found["y"] for found in _both(name, packed, inputs))
    assert torch.equal(actual[:, :BAD], exact[:, :BAD])


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", LAYERS)
def test_it_stays_where_it_belongs_in_layers(name, packed):
    """One number of a row's input, or of the gradient that comes to its output, is not finite, after some steps.

    Rows without such a number, packed beside the others or not, are exactly what they are beside finite ones, and so
    are their gradients. Earlier outputs of the others keep the precision that they have beside finite ones. What is not
    finite token by token is so in the whole.
    """
    layer, (exact, actual) = make(name, torch.float32), _both(name, packed, inputs)
    for row, place in enumerate(ROWS):
        for key in exact:
            if place is None or (place[0] == "dy" and key != "dx"):
                assert torch.equal(actual[key][row], exact[key][row]), f"{key} of row {row}, {place}"
        if place is not None:
            key = "y" if place[0] == "x" else "dx"
            if torch.tensor(place[1]).isnan():  # the tanh of inf is finite
                assert not actual[key][row, BAD].isfinite().all(), f"{place} is lost"
            if place[0] == "x" and not layer.bidirectional:
                before, same = actual["y"][row, :BAD], exact["y"][row, :BAD]
                wide = _wide(name, inputs)[row]
                own = (same - wide[:BAD]).abs().max()
                bound = 2 * (own + torch.finfo(torch.float32).eps * wide.abs().max())
                assert (before - wide[:BAD]).abs().max() <= bound, f"earlier outputs, {place}"
    if name not in STREAMING or packed:
        return
    _, spoilt = _spoilt(layer, inputs)
    with torch.no_grad():
        state, ys = layer.init_state(len(ROWS)), []
        for t in range(STEPS):
            y, state = layer.step(spoilt["x"][:, t], state)
            ys.append(y)
    tokens = {"y": torch.stack(ys, 1), **{f"state{path}": leaf for path, leaf in states.leaves(state)}}
    for key, value in tokens.items():
        assert not (actual[key].isfinite() & ~value.isfinite()).any(), f"{key} is finite, token by token it is not"


@pytest.mark.parametrize("value", laws.NOT_FINITE)
def test_a_convolution_of_any_length_keeps_it_from_the_past(value):
    """In calls of every small number of steps, and of more, behind a state and without one."""
    for length, steps in itertools.product((1, 2, 9, 40), (1, 2, 3, 4, 5, 40)):
        kernel = torch.rand(3, length) + 0.1
        _, state = scanl.ops.long_convolution(torch.randn(1, 3, 3), kernel)
        for bad, before in itertools.product(range(min(steps, 5)), (None, state)):
            x = torch.randn(1, steps, 3)
            x[0, bad, 1] = value
            y, _ = scanl.ops.long_convolution(x, kernel, before)
            assert y[0, :, ::2].isfinite().all(), (length, steps, bad)
            assert y[0, :, 1].isfinite().tolist() == [t < bad for t in range(steps)], (length, steps, bad)


def test_a_large_future_moves_the_past_no_more_than_is_said():
    """A transform rounds by what is largest in all of its range: the docstring's bound, and nothing across calls."""
    x, kernel, bad = torch.randn(2, 300, 3), torch.randn(3, 40), 200
    x[0, bad:] *= 1e6
    y, _ = scanl.ops.long_convolution(x, kernel)
    exact, _ = scanl.ops.long_convolution(x.double(), kernel.double())
    size = torch.tensor(2.0 * (300 + 40)).log2()
    bound = 10 * torch.finfo(torch.float32).eps * size * x.abs().sum(1) * kernel.abs().sum(1)
    assert ((y - exact).abs().amax(1) <= bound).all()
    earlier, _ = scanl.ops.long_convolution(x[:, :bad], kernel)
    small = bad * x[:, :bad].abs().amax(1) * kernel.abs().sum(1) * torch.finfo(torch.float32).eps
    assert ((earlier - exact[:, :bad]).abs().amax(1) <= small).all()
    assert ((y - exact)[0, :bad].abs().amax(0) > small[0]).any()  # it is not nothing


def test_attention_forgets_what_has_left_the_window():
    """Within a segment, from its memory, and in the form for packed sequences that a graph is compiled of."""
    q, k, v = torch.randn(3, 1, 150, 2, 4)
    k[0, 70, 1, 2], v[0, 20, 0, 1] = torch.nan, torch.inf
    y, memory = scanl.ops.segment_attention(q, k, v, window=10)
    expected = torch.ones(150, 2, 4, dtype=torch.bool)
    expected[70:80, 1], expected[20:30, 0, 1] = False, False
    assert torch.equal(y[0].isfinite(), expected)
    left, memory = scanl.ops.segment_attention(q[:, :75], k[:, :75], v[:, :75], window=10)
    right, _ = scanl.ops.segment_attention(q[:, 75:], k[:, 75:], v[:, 75:], memory, window=10)
    assert torch.equal(torch.cat([left, right], 1)[0].isfinite(), expected)
    start = torch.where(torch.arange(150) < 73, 0, 73)
    expected[73:80, 1] = True
    y = importlib.import_module("scanl.ops.segment_attention")._attend_finite(q, k, v, None, 10, None, start)
    assert torch.equal(y[0].isfinite(), expected)
