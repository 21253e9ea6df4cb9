"""Long convolution: the double sum, in one call and in any pieces, forwards and backwards."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scanl.errors import ShapeError
from scanl.layers import state as states
from scanl.ops.long_convolution import LongConvolutionState, long_convolution


def double_sum(x, kernel, bias=None):
    """y_t = b x_t + Σ_j κ_j x_{t-j}, one j after the other."""
    y = (0 * kernel[:, 0] if bias is None else bias) * x
    for j in range(min(x.shape[1], kernel.shape[1])):
        y = y + F.pad(kernel[:, j] * x[:, : x.shape[1] - j], (0, 0, j, 0))
    return y


def in_pieces(pieces, kernel, state=None, **options):
    ys = []
    for piece in pieces:
        y, state = long_convolution(piece, kernel, state, **options)
        ys.append(y)
    return torch.cat(ys, 1), state


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype)


def assert_near(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 17, 64, 129])
@pytest.mark.parametrize("steps", [1, 7, 33, 128, 150])
def test_equals_the_double_sum_in_any_pieces(steps, length):
    x, kernel, bias = draw(2, steps, 3), draw(3, length), draw(3)
    expected = double_sum(x, kernel, bias)
    assert_near(long_convolution(x, kernel, bias=bias)[0], expected)
    for size in (1, 3, 32):
        assert_near(in_pieces(x.split(size, 1), kernel, bias=bias)[0], expected)
    cuts = random.Random(length * 1000 + steps)
    for _ in range(3):
        sizes = []
        while sum(sizes) < steps:
            sizes.append(min(cuts.randint(0, cuts.choice([2, 9, 40, steps])), steps - sum(sizes)))
        assert_near(in_pieces(x.split(sizes, 1), kernel, bias=bias)[0], expected)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 70), st.lists(st.integers(0, 50), min_size=1, max_size=12), st.booleans(), st.booleans())
def test_any_length_cut_kind_and_direction(length, sizes, complex_kernel, reverse):
    x = draw(2, sum(sizes), 2)
    kernel = draw(2, length, dtype=torch.complex128 if complex_kernel else torch.float64)
    if x.shape[1] == 0:
        return
    pieces = x.split(sizes, 1)
    if reverse:
        expected = double_sum(x.flip(1), kernel).flip(1)
        y = torch.cat(list(_backwards(pieces, kernel))[::-1], 1)
    else:
        expected, y = double_sum(x, kernel), in_pieces(pieces, kernel)[0]
    assert_near(y, expected)


def _backwards(pieces, kernel):
    state = None
    for piece in pieces[::-1]:
        y, state = long_convolution(piece, kernel, state, reverse=True)
        yield y


def test_many_steps_alone_past_many_blocks():
    """Token by token over five blocks of the tiling, at lengths about a power of two, stays exact."""
    for length in (15, 16, 17, 18):
        x, kernel = draw(1, 90, 2), draw(2, length)
        assert_near(in_pieces(x.split(1, 1), kernel)[0], double_sum(x, kernel))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("how", ["whole", "steps", "pieces"])
def test_error_is_that_of_the_dtype(dtype, how):
    x, kernel = draw(2, 256, 4), draw(4, 256) * torch.linspace(0, -4, 256, dtype=torch.float64).exp()
    if dtype.is_complex:
        kernel = torch.complex(kernel, draw(4, 256))
    exact = double_sum(x, kernel)
    x, kernel = x.to(torch.float32), kernel.to(dtype)
    y = in_pieces(x.split({"whole": 256, "steps": 1, "pieces": 37}[how], 1), kernel)[0]
    assert y.dtype == dtype
    own, largest = (double_sum(x, kernel) - exact).abs().max(), exact.abs().max()
    assert (y - exact).abs().max() <= 2 * (own + torch.finfo(dtype).eps * largest)


def test_two_to_the_fourteen_steps_to_float32():
    x, kernel = draw(1, 2**14, 2), draw(2, 2**14)
    exact = long_convolution(x, kernel)[0]
    y = long_convolution(x.float(), kernel.float())[0]
    assert (y - exact).abs().max() / exact.abs().max() < 1e-6
    # Whether the double transform itself is right, at a few steps by hand.
    for t in (0, 1, 5000, 2**14 - 1):
        assert_near(exact[:, t], (kernel[:, : t + 1].flip(1).T * x[0, : t + 1]).sum(0)[None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    x, kernel, bias = draw(2, 40, 3).to(dtype), draw(3, 24).to(dtype), draw(3).to(dtype)
    whole, state = long_convolution(x, kernel, bias=bias)
    assert whole.dtype == dtype
    assert {leaf.dtype for _, leaf in states.leaves(state)} == {torch.int64, torch.float32}
    expected = double_sum(x.double(), kernel.double(), bias.double())
    # One rounding of what float32 gives: half a unit in the last place, and float32's own error near the middle.
    error = (whole.double() - expected).abs() / expected.abs().clamp(min=1e-2)
    assert error.max() <= 0.51 * torch.finfo(dtype).eps
    steps = in_pieces(x.split(1, 1), kernel, bias=bias)[0]
    assert steps.dtype == dtype
    assert ((steps.double() - expected).abs() / expected.abs().clamp(min=1e-2)).max() <= 0.51 * torch.finfo(dtype).eps


def test_dtypes_of_results():
    x, kernel = torch.ones(1, 9, 2), torch.ones(2, 5)
    for x_type, kernel_type, y_type, state_type in [
        (torch.float32, torch.float64, torch.float32, torch.float64),
        (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32),
        (torch.float16, torch.complex64, torch.complex64, torch.complex64),
        (torch.complex64, torch.float64, torch.complex128, torch.complex128),
    ]:
        y, state = long_convolution(x.to(x_type), kernel.to(kernel_type))
        assert (y.dtype, state.due.dtype) == (y_type, state_type)
        y, after = long_convolution(x.to(x_type)[:, :1], kernel.to(kernel_type), state)
        assert (y.dtype, after.due.dtype) == (y_type, state_type)
        assert y[0, 0].real.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("cuts", [[7], [1] * 7, [4, 1, 2]], ids=str)
@pytest.mark.parametrize("length", [1, 6, 10])
def test_gradients_of_every_order(cuts, length):
    """By finite differences, to x, kernel, bias and the state, twice."""
    x, kernel, bias = draw(1, 7, 2), draw(2, length), draw(2)
    _, state = in_pieces(draw(1, 3, 2).split(1, 1), kernel)
    sums = [state.due, *state.levels]
    arguments = [v.detach().requires_grad_() for v in (x, kernel, bias, *sums)]

    def f(x, kernel, bias, due, *levels):
        y, after = in_pieces(x.split(cuts, 1), kernel, LongConvolutionState(state.position, due, levels), bias=bias)
        # What comes next depends on all of the state behind.
        return y, long_convolution(x.new_ones(1, length, 2), kernel, after)[0]

    assert torch.autograd.gradcheck(f, arguments, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, arguments, fast_mode=True)


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_one_operand_alone(which):
    given = [draw(2, 20, 3), draw(3, 9)]
    given[which].requires_grad_()
    found, expected = (torch.autograd.grad(y.square().sum(), given[which])[0]
                       for y in (long_convolution(*given)[0], double_sum(*given)))  # fmt: skip
    assert_near(found, expected)


def test_gradient_in_pieces_is_that_of_the_double_sum():
    x, kernel, bias = (v.requires_grad_() for v in (draw(2, 50, 3), draw(3, 40), draw(3)))
    weights = draw(2, 50, 3)
    expected = torch.autograd.grad((double_sum(x, kernel, bias) * weights).sum(), (x, kernel, bias))
    for size in (50, 7, 1):
        y = in_pieces(x.split(size, 1), kernel, bias=bias)[0]
        for got, want in zip(torch.autograd.grad((y * weights).sum(), (x, kernel, bias)), expected, strict=True):
            assert_near(got, want)


def test_no_output_depends_on_a_later_input():
    x, kernel = draw(1, 64, 2), draw(2, 64)
    before = in_pieces(x.split(20, 1), kernel)[0]
    for t in (1, 20, 63):
        changed = x.clone()
        changed[:, t] += 1
        after = in_pieces(changed.split(20, 1), kernel)[0]
        assert_near(after[:, :t], before[:, :t])
        assert (after[:, t] - before[:, t]).abs().min() > 1e-3
    # No wrap-around: the last input reaches no output but its own.
    spike = torch.zeros(1, 64, 2, dtype=torch.float64)
    spike[:, -1] = 1
    assert long_convolution(spike, kernel)[0][:, :-1].abs().max() < 1e-14


def test_the_state_has_the_size_of_the_kernel_alone():
    kernel = draw(3, 100)
    sizes = set()
    state = None
    for steps in (0, 1, 5, 40, 1000, 31, 1, 64):
        _, state = long_convolution(draw(2, steps, 3), kernel, state)
        sizes.add(tuple(tuple(leaf.shape) for _, leaf in states.leaves(state)))
        held = sum(leaf.untyped_storage().nbytes() for leaf in {id(v): v for _, v in states.leaves(state)}.values())
        assert held <= 8 * 128 * 2 * 3 * 9  # views share storages: at most one block for each level
    assert len(sizes) == 1
    assert sum(shape[1] for shape in sizes.pop()[1:]) == 128


@pytest.mark.parametrize("past", [20, 21, 31])
def test_a_state_is_not_touched_by_what_follows(past):
    """Neither a later call nor writing over an input that was read changes a state."""
    kernel, x = draw(2, 32), draw(1, 40, 2)
    _, state = in_pieces(x[:, :past].split(1, 1), kernel)
    kept = states.map_leaves(torch.clone, state)
    buffer = x[:, past : past + 1].clone()
    _, after = long_convolution(buffer, kernel, state)
    kept_after = states.map_leaves(torch.clone, after)
    buffer.zero_()
    for old, new in ((kept, state), (kept_after, after)):
        for (_, a), (_, b) in zip(states.leaves(old), states.leaves(new), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_state_of_another_dtype_is_cast(dtype):
    x, kernel = torch.randn(1, 80, 2), torch.randn(2, 32)
    _, state = in_pieces(x[:, :21].split(1, 1), kernel)
    moved = states.to(state, dtype=dtype)
    back = states.to(moved, dtype=torch.float32)
    for steps in (1, 40):
        y, after = long_convolution(x[:, 21 : 21 + steps], kernel, moved)
        expected, same = long_convolution(x[:, 21 : 21 + steps], kernel, back)
        assert torch.equal(y, expected)
        for (_, a), (_, b) in zip(states.leaves(after), states.leaves(same), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


def test_rows_of_states_from_different_places():
    x, kernel = draw(3, 60, 2), draw(2, 40)
    expected = double_sum(x, kernel)
    after = [in_pieces(x[i : i + 1, :n].split(1, 1), kernel)[1] for i, n in enumerate((5, 19, 32))]
    assert len({int(state.position) for state in after}) == 3
    rest = torch.stack([x[i, n : n + 28] for i, n in enumerate((5, 19, 32))])
    want = torch.stack([expected[i, n : n + 28] for i, n in enumerate((5, 19, 32))])
    for size in (28, 1):
        assert_near(in_pieces(rest.split(size, 1), kernel, states.cat(after))[0], want)
    order = torch.tensor([2, 0, 0])
    chosen = states.index(states.cat(after), order)
    assert_near(in_pieces(rest[order].split(5, 1), kernel, chosen)[0], want[order])


def test_a_state_is_saved_and_loaded(tmp_path):
    x, kernel = draw(1, 30, 2), draw(2, 24)
    _, state = in_pieces(x[:, :13].split(1, 1), kernel)
    states.save(state, tmp_path / "state")
    like = long_convolution(x[:, :0], kernel)[1]
    loaded = states.load(tmp_path / "state", like)
    assert_near(long_convolution(x[:, 13:], kernel, loaded)[0], double_sum(x, kernel)[:, 13:])


@pytest.mark.parametrize("reverse", [False, True])
def test_packed_sequences_are_each_alone(reverse):
    bounds = [0, 7, 7, 8, 30]
    past, x, kernel, bias = draw(4, 11, 2), draw(1, 30, 2), draw(2, 20), draw(2)
    _, state = long_convolution(past, kernel, bias=bias, reverse=reverse)
    y, last = long_convolution(
        x, kernel, state, bias=bias, reverse=reverse, cu_seqlens=torch.tensor(bounds, dtype=torch.int32)
    )
    future = draw(4, 3, 2)
    later = long_convolution(future, kernel, last, bias=bias, reverse=reverse)[0]
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        parts = [past[n : n + 1], x[:, start:end], future[n : n + 1]]
        whole = torch.cat(parts[::-1] if reverse else parts, 1)
        expected = double_sum(whole.flip(1), kernel, bias).flip(1) if reverse else double_sum(whole, kernel, bias)
        at = 3 if reverse else 11
        assert_near(y[:, start:end], expected[:, at : at + end - start])
        assert_near(later[n : n + 1], expected[:, :3] if reverse else expected[:, -3:])
    y, last = long_convolution(x[:, :0], kernel, cu_seqlens=torch.tensor([0]))
    assert y.shape == (1, 0, 2)
    assert last.due.shape == (0, 1, 2)


@pytest.mark.parametrize("shape", [(0, 5, 3), (0, 300, 3), (2, 0, 3), (2, 5, 0), (2, 300, 0)], ids=str)
def test_empty_axes(shape):
    x, kernel = draw(*shape).requires_grad_(), draw(shape[2], 100).requires_grad_()
    y, state = long_convolution(x, kernel)
    y, state = long_convolution(x, kernel, state)
    assert y.shape == shape
    # Without a step nothing depends on the kernel.
    grads = torch.autograd.grad(y.sum(), (x, kernel), materialize_grads=shape[1] == 0)
    assert [g.shape for g in grads] == [x.shape, kernel.shape]


def test_strided_and_expanded_inputs():
    x, kernel = draw(40, 2, 6).transpose(0, 1)[..., ::2], draw(30, 3).T
    assert_near(long_convolution(x, kernel)[0], double_sum(x, kernel))
    x, kernel = draw(1, 1, 3).expand(2, 40, 3), draw(1, 30).expand(3, 30)
    assert_near(long_convolution(x, kernel)[0], double_sum(x, kernel))


def test_both_directions_are_a_sum():
    x, left, right = draw(1, 20, 2), draw(2, 20), draw(2, 20)
    y = long_convolution(x, left)[0] + long_convolution(x, right, reverse=True)[0]
    for t in (0, 8, 19):
        expected = sum((left[:, t - s] if s <= t else 0) * x[:, s] for s in range(20))
        expected = expected + sum((right[:, s - t] if s >= t else 0) * x[:, s] for s in range(20))
        assert_near(y[:, t], expected)


class Work(TorchDispatchMode):
    """Counts the elements that operators produce, a transform of n as n log2(n); views are free."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        factor = 1
        if "fft" in str(func):
            factor = max(leaf.shape[-1] for leaf in tree_leaves(out)).bit_length()
        if not func.is_view:
            self.elements += sum(factor * leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        return out


def test_a_stream_does_not_compute_its_past_again():
    """Steps alone cost about log² of the length each: a direct sum over the past would cost 4096, a transform more."""
    length = 4096
    x, kernel = torch.randn(1, length, 1), torch.randn(1, length)
    with torch.no_grad():
        expected = long_convolution(x, kernel)[0]
        state, ys, most = None, [], 0
        with Work() as work:
            for t in range(length):
                before = work.elements
                y, state = long_convolution(x[:, t : t + 1], kernel, state)
                ys.append(y)
                most = max(most, work.elements - before)
    assert (torch.cat(ys, 1) - expected).abs().max() / expected.abs().max() < 1e-6
    assert work.elements / length < 4 * 12**2
    assert work.elements < length * length / 8
    with Work() as whole:
        long_convolution(x, kernel)
    assert most < 4 * whole.elements  # no step is dearer than a few calls over the whole


def test_runs_where_its_tensors_live():
    """On a device without numbers: whatever were made on another would be refused."""
    x, kernel, bias = (v.to("meta") for v in (draw(2, 300, 3), draw(3, 100), draw(3)))
    for steps in (1, 20, 300):
        y, state = long_convolution(x[:, :steps], kernel, bias=bias)
        assert y.shape == (2, steps, 3)
        assert {leaf.device.type for _, leaf in states.leaves(state)} == {"meta"}


def test_compiles_without_a_graph_break():
    x, kernel = torch.randn(2, 32, 3), torch.randn(3, 32)
    compiled = torch.compile(lambda x, kernel: long_convolution(x, kernel)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, kernel), long_convolution(x, kernel)[0])


def _errors():
    x, kernel = torch.zeros(2, 6, 3), torch.zeros(3, 5)
    state = long_convolution(x, kernel)[1]
    yield (x[0], kernel), {}, "x has shape (6, 3), expected (B, T, D)"
    yield (x.long(), kernel), {}, "x is int64, expected bfloat16, float16, float32"
    yield (x, 0.5), {}, "kernel is a float, expected a tensor (D, L)"
    yield (x, kernel.T), {}, "kernel has shape (5, 3), expected (D, L) with D=3 from x"
    yield (x, kernel[:, :0]), {}, "kernel has L=0, expected at least one lag"
    yield (x, kernel.to("meta")), {}, "kernel is on meta, expected cpu because of x"
    yield (x, kernel), {"bias": torch.zeros(2)}, "bias has shape (2,), expected (D,) with D=3 from x"
    yield (x, kernel), {"bias": torch.zeros(3, 1)}, "bias has shape (3, 1), expected (D,)"
    yield (x, kernel, state.due), {}, "state is a Tensor, expected a LongConvolutionState"
    yield (x, torch.zeros(3, 50), state), {}, "state.levels holds 2 tensors, expected 6 because of x, kernel"
    yield (x[:1], kernel, state), {}, "state.position has shape (2,), expected (1,) because of x, kernel"
    wrong = state._replace(levels=(state.levels[0], state.levels[1][:, :1]))
    yield (x, kernel, wrong), {}, "state.levels[1] has shape (2, 1, 3), expected (2, 2, 3) because of x, kernel"
    wrong = state._replace(due=state.due.to("meta"))
    yield (x, kernel, wrong), {}, "state.due is on meta, expected cpu because of x"
    wrong = state._replace(due=state.due.to(torch.complex64))
    yield (x, kernel, wrong), {}, "state.due is complex64, expected real numbers because of x, kernel"
    wrong = state._replace(position=state.position[:1])
    yield (x, kernel, wrong), {}, "state.position has shape (1,), expected (2,) because of x"
    yield (x, kernel), {"cu_seqlens": torch.tensor([0, 6])}, "x has a batch of 2, expected 1 because of cu_seqlens"
    yield (x[:1], kernel), {"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens is [0, 5], expected offsets that rise"
    yield (x[:1], kernel), {"cu_seqlens": torch.tensor([0.0])}, "cu_seqlens is float32 of shape (1,), expected a tensor"


def test_errors_name_the_argument():
    for arguments, options, message in _errors():
        with pytest.raises(ShapeError) as caught:
            long_convolution(*arguments, **options)
        assert str(caught.value).startswith("long_convolution: " + message)
