"""Attention through a window that streams: against a loop over positions, in any pieces, padded and packed."""

import doctest
import importlib
import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import laws
from scanl import layers
from scanl.errors import ConfigError, ShapeError
from scanl.layers.parts.masked_attention import attend
from scanl.ops.segment_attention import SegmentMemory, init_memory, segment_attention

BLOCK = 64


def _draw(batch: int, steps: int, heads: int = 2, key_heads: int = 1, size: int = 3, values: int | None = None):
    shapes = ((heads, size), (key_heads, size), (key_heads, size if values is None else values))
    return [torch.randn(batch, steps, *shape, dtype=torch.float64) for shape in shapes]


def _loop(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None = None) -> Tensor:
    """The definition, one query at a time, in float32 or wider."""
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    shared = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(shared, 2), v.repeat_interleave(shared, 2)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    ys = []
    for t in range(q.shape[1]):
        seen = slice(max(0, t - window + 1), t + 1)
        weights = (scale * torch.einsum("bhk,bjhk->bhj", q[:, t], k[:, seen])).softmax(-1)
        ys.append(torch.einsum("bhj,bjhv->bhv", weights, v[:, seen]))
    return torch.stack(ys, 1).to(dtype) if ys else q.new_zeros(*q.shape[:3], v.shape[3]).to(dtype)


def _ring(k: Tensor, v: Tensor, window: int) -> SegmentMemory:
    """The memory by its definition: the token at position p in slot p mod W."""
    batch, steps = k.shape[:2]
    keys, values = (torch.zeros(batch, window, *x.shape[2:], dtype=x.dtype) for x in (k, v))
    for p in range(steps):
        keys[:, p % window], values[:, p % window] = k[:, p], v[:, p]
    return SegmentMemory(keys, values, torch.full((batch,), steps))


def _pieces(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], memory: SegmentMemory | None = None, **options):
    ys = []
    for a, b in itertools.pairwise([0, *itertools.accumulate(lengths)]):
        y, memory = segment_attention(q[:, a:b], k[:, a:b], v[:, a:b], memory, **options)
        ys.append(y)
    return torch.cat(ys, 1), memory


def _same(actual: SegmentMemory, expected: SegmentMemory) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0)


def _weights(y: Tensor) -> Tensor:
    return torch.linspace(-2, 2, y.numel(), dtype=torch.float64).sin().view(y.shape).to(y.dtype)


@settings(max_examples=100 if laws.ALL else 12, deadline=None)
@given(
    steps=st.one_of(st.integers(0, 12), st.integers(0, 12), st.integers(2 * BLOCK - 1, 3 * BLOCK + 3)),
    window=st.one_of(st.integers(1, 8), st.integers(1, BLOCK + 20)),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (6, 2)]),
    cuts=st.lists(st.integers(0, 3 * BLOCK), max_size=4),
    values=st.integers(1, 4),
    scale=st.sampled_from([None, 0.7]),
    seed=st.integers(0, 10**6),
)
def test_equals_the_loop_in_any_pieces(steps, window, heads, cuts, values, scale, seed):
    """Values, every gradient through the memory, and the memory itself."""
    torch.manual_seed(seed)
    operands = _draw(2, steps, *heads, values=values)
    cuts = sorted(min(cut, steps) for cut in cuts)
    lengths = [b - a for a, b in itertools.pairwise([0, *cuts, steps])]
    results = []
    for run in (
        lambda q, k, v: _pieces(q, k, v, lengths, window=window, scale=scale),
        lambda q, k, v: (_loop(q, k, v, window, scale), _ring(k.detach(), v.detach(), window)),
    ):
        leaves = [x.clone().requires_grad_() for x in operands]
        y, memory = run(*leaves)
        grads = torch.autograd.grad(y, leaves, _weights(y)) if steps else []
        results.append((y, memory, grads))
    (y, memory, grads), (expected, ring, expected_grads) = results
    torch.testing.assert_close(y, expected)
    _same(SegmentMemory(*(part.detach() for part in memory)), ring)
    for actual, grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(actual, grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("steps", "window"), [(20, 7), (131, 20), (2, 5)])
def test_truth_in_every_dtype(dtype, steps, window):
    """At most twice what the definition errs in single precision, and one rounding more; half is rounded once."""
    operands = [x.to(dtype) for x in _draw(2, steps, 4, 2)]
    results = []
    for kind in (torch.float64, torch.float32, dtype):
        leaves = [x.to(kind, copy=True).requires_grad_() for x in operands]
        y = _loop(*leaves, window) if len(results) < 2 else segment_attention(*leaves, window=window)[0]
        stepped = y if len(results) < 2 else _pieces(*leaves, [1] * steps, window=window)[0]
        results.append([y, *torch.autograd.grad(y, leaves, _weights(y)), stepped.detach()])
    for name, exact, single, actual in zip(("y", "dq", "dk", "dv", "y of steps"), *results, strict=True):
        assert actual.dtype == dtype
        largest = exact.abs().max().item()
        error, own = ((x.double() - exact).abs().max().item() / largest for x in (actual, single))
        eps = torch.finfo(dtype).eps
        bound = 2 * (own / torch.finfo(torch.float32).eps + 1) * eps if dtype.itemsize > 2 else 2 * own + eps / 2
        assert error <= bound, f"{name} of {dtype}: error {error:.3g}, at most {bound:.3g} allowed"
    _, memory = segment_attention(*operands, window=window)
    assert memory.keys.dtype == memory.values.dtype == dtype


@pytest.mark.parametrize(("steps", "window"), [(11, 1), (11, 4), (11, 11), (11, 30), (200, 5), (200, 70)])
def test_duality_splitting_and_chunked_prefill(steps, window):
    operands = _draw(2, steps)
    y, memory = segment_attention(*operands, window=window)
    for lengths in ([1] * steps, [3, 1, 1, 0, steps - 5], [steps - 2, 2], [2, steps - 2]):
        z, after = _pieces(*operands, lengths, window=window)
        torch.testing.assert_close(z, y)
        _same(after, memory)


def test_a_given_memory_of_rows_at_different_positions():
    """Rows that have read 0, 2 and 9 tokens go on together."""
    window, read = 4, [0, 2, 9]
    past, operands = _draw(3, 9), _draw(3, 6)
    states = [segment_attention(*(x[b : b + 1, :n] for x in past), window=window)[1] for b, n in enumerate(read)]
    memory = SegmentMemory(*(torch.cat(parts) for parts in zip(*states, strict=True)))
    assert memory.position.tolist() == read
    for steps in (1, 2, 6):
        y, after = segment_attention(*(x[:, :steps] for x in operands), memory, window=window)
        for b, n in enumerate(read):
            whole = [
                torch.cat([p[b : b + 1, :n], x[b : b + 1, :steps]], 1) for p, x in zip(past, operands, strict=True)
            ]
            torch.testing.assert_close(y[b : b + 1], _loop(*whole, window)[:, n:])
            _same(SegmentMemory(*(part[b : b + 1] for part in after)), _ring(*whole[1:], window))


@pytest.mark.parametrize(("steps", "window"), [(9, 3), (150, 6)])
def test_causality_and_the_edge_of_the_window(steps, window):
    operands = _draw(1, steps)
    y, _ = segment_attention(*operands, window=window)
    for t in range(0, steps, 1 if steps < 20 else 13):
        changed = [x.clone() for x in operands]
        for x in changed[1:]:
            x[:, t] += 1
        z, _ = segment_attention(*changed, window=window)
        differs = (z != y).flatten(2).any(2)[0].nonzero().flatten().tolist()
        assert differs == list(range(t, min(steps, t + window)))


@pytest.mark.parametrize("window", [1, 3, 8, 70])
@pytest.mark.parametrize("lengths", [[3, 0, 5, 1], [90, 2, 75, 0]])
@pytest.mark.parametrize("given", [False, True])
def test_packed_sequences_equal_each_alone(window, lengths, given):
    total = sum(lengths)
    operands = [x.requires_grad_() for x in _draw(1, total)]
    memory = segment_attention(*_draw(len(lengths), 5), window=window)[1] if given else None
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])
    y, after = segment_attention(*operands, memory, window=window, cu_seqlens=cu_seqlens)
    ys = []
    for n, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        state = None if memory is None else SegmentMemory(*(part[n : n + 1] for part in memory))
        z, alone = segment_attention(*(x[:, a:b] for x in operands), state, window=window)
        ys.append(z)
        _same(SegmentMemory(*(part[n : n + 1] for part in after)), alone)
    expected = torch.cat(ys, 1)
    torch.testing.assert_close(y, expected)
    for got, grad in zip(*(torch.autograd.grad(r, operands, _weights(r)) for r in (y, expected)), strict=True):
        torch.testing.assert_close(got, grad)
    _same(segment_attention(*operands, memory, window=window, cu_seqlens=cu_seqlens.int())[1], after)


@pytest.mark.parametrize("side", ["left", "right", "both", "inside"])
@pytest.mark.parametrize(("steps", "window"), [(1, 3), (7, 3), (7, 20), (150, 9)])
@pytest.mark.parametrize("given", [False, True])
def test_a_padded_batch_equals_each_sequence_alone(side, steps, window, given):
    """NaN in the padding reaches nothing, no gradient either."""
    batch = 4
    lengths = [steps, 0, steps // 2, max(1, steps - 1)]
    mask = torch.zeros(batch, steps, dtype=torch.bool)
    for b, n in enumerate(lengths):
        start = {"left": steps - n, "right": 0, "both": (steps - n) // 2, "inside": 0}[side]
        mask[b, start : start + n] = True
        if side == "inside":
            mask[b] = mask[b, torch.randperm(steps)]
    memory = segment_attention(*_draw(batch, 4), window=window)[1] if given else None
    if memory is not None:
        memory = memory._replace(keys=memory.keys.requires_grad_(), values=memory.values.requires_grad_())
    operands = [x.masked_fill(~mask[:, :, None, None], float("nan")).requires_grad_() for x in _draw(batch, steps)]
    y, after = segment_attention(*operands, memory, window=window, mask=mask)
    expected = torch.zeros_like(y)
    for b in range(batch):
        state = None if memory is None else SegmentMemory(*(part[b : b + 1] for part in memory))
        z, alone = segment_attention(*(x[b : b + 1, mask[b]] for x in operands), state, window=window)
        expected = expected.index_put((torch.full((lengths[b],), b), mask[b].nonzero().flatten()), z[0])
        _same(SegmentMemory(*(part[b : b + 1] for part in after)), alone)
    torch.testing.assert_close(y, expected)
    leaves = operands + ([] if memory is None else [memory.keys, memory.values])
    grads = [torch.autograd.grad(r, leaves, _weights(r)) for r in (y, expected)]
    for actual, grad in zip(*grads, strict=True):
        torch.testing.assert_close(actual, grad.nan_to_num())


def test_gradients_through_the_memory():
    operands = [x.requires_grad_() for x in _draw(2, 10, values=5)]

    def run(q, k, v):
        y, memory = _pieces(q, k, v, [4, 1, 5], window=4)
        return y, memory.keys, memory.values

    assert torch.autograd.gradcheck(run, operands, fast_mode=True)
    _, memory = segment_attention(*(x[:, :5] for x in operands), window=4)
    detached = SegmentMemory(*(part.detach() for part in memory))
    y, _ = segment_attention(*(x[:, 5:] for x in operands), detached, window=4)
    grad = torch.autograd.grad(y.sum(), operands[2])[0]
    assert not grad[:, :5].any()
    assert grad[:, 5:].all()


def test_second_derivatives_are_right_or_raise():
    operands = [x.requires_grad_() for x in _draw(1, 6)]

    def run(q, k, v):
        return _pieces(q, k, v, [3, 1, 2], window=3)[0]

    assert torch.autograd.gradgradcheck(run, operands, fast_mode=True)
    operands = [x.detach().float().requires_grad_() for x in operands]
    (first,) = torch.autograd.grad(run(*operands).square().sum(), operands[0], create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(first.sum(), operands)


def test_float64_leaves_torchs_choice_of_a_kernel_alone():
    """In all threads: the choice is the process's, so one that is made for a while may stay for good."""
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(torch.backends.cuda.flash_sdp_enabled())
            return function(*args, **(kwargs or {}))

    layer = layers.build("attention", 8, num_heads=2).double()
    with Watch():
        layer(torch.randn(1, 5, 8, dtype=torch.float64))
        attend(*(torch.randn(1, 5, 2, 4, dtype=torch.float64) for _ in range(3)), torch.ones(1, 5, 5, dtype=torch.bool))
    assert seen
    assert all(seen)


def test_the_size_of_the_memory_is_constant():
    sizes = {
        tuple(part.shape for part in segment_attention(*_draw(2, steps), window=6)[1]) for steps in (0, 1, 5, 6, 7, 200)
    }
    assert sizes == {((2, 6, 1, 3), (2, 6, 1, 3), (2,))}


def test_cost_grows_with_the_window_not_with_the_square_of_the_length():
    """Scores that are computed: at most two blocks of keys for each query."""
    counted = []

    class Count(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.nn.functional.scaled_dot_product_attention:
                q, k = args[:2]
                counted.append(q.shape[0] * q.shape[2] * k.shape[2])
            return function(*args, **(kwargs or {}))

    for window in (1, 16, 200):
        for steps in (1000, 4000):
            counted.clear()
            with Count():
                segment_attention(*(x.float() for x in _draw(1, steps, heads=1)), window=window)
            assert sum(counted) <= (steps + window + BLOCK) * 2 * max(window, BLOCK)
    counted.clear()
    with Count():
        segment_attention(*(x.float() for x in _draw(1, 1, heads=1)), init_memory(1, 16, 1, 3, 3), window=16)
    assert counted == [16]


@pytest.mark.parametrize("steps", [1, 5, 150])
def test_every_query_sees_something(steps):
    """Padded ones too: what the softmax of nothing is differs from kernel to kernel."""
    masks = []

    class Record(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.nn.functional.scaled_dot_product_attention:
                masks.append((kwargs or {})["attn_mask"])
            return function(*args, **(kwargs or {}))

    with Record():
        segment_attention(*(x.float() for x in _draw(2, steps)), window=4, mask=torch.zeros(2, steps, dtype=torch.bool))
    assert masks
    assert all(mask.any(-1).all() for mask in masks)


def test_beams():
    operands = _draw(3, 12)
    _, memory = segment_attention(*(x[:, :5] for x in operands), window=4)
    chosen = torch.tensor([2, 0, 2, 1])
    memory = SegmentMemory(*(part[chosen] for part in memory))
    y, after = segment_attention(*(x[chosen, 5:] for x in operands), memory, window=4)
    z, end = segment_attention(*operands, window=4)
    torch.testing.assert_close(y, z[chosen, 5:])
    _same(after, SegmentMemory(*(part[chosen] for part in end)))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_memory_can_be_used_twice(steps):
    _, memory = segment_attention(*_draw(2, 5), window=3)
    kept = SegmentMemory(*(part.clone() for part in memory))
    operands = _draw(2, steps)
    y, _ = segment_attention(*operands, memory, window=3)
    _same(memory, kept)
    assert torch.equal(segment_attention(*operands, memory, window=3)[0], y)


def test_overwrite_writes_one_slot_of_the_memory_given():
    operands, mask = _draw(2, 10), torch.rand(2, 10) < 0.7
    expected, end = segment_attention(*operands, window=4, mask=mask)
    memory = init_memory(2, 4, 1, 3, 3, dtype=torch.float64)
    for t in range(10):
        step = [x[:, t : t + 1] for x in operands]
        y, after = segment_attention(*step, memory, window=4, mask=mask[:, t : t + 1], overwrite=True)
        torch.testing.assert_close(y, expected[:, t : t + 1])
        assert after.keys is memory.keys
        memory = after
    _same(memory, end)


@pytest.mark.parametrize("steps", [0, 1, 5, 200])
@pytest.mark.parametrize("batch", [0, 2])
def test_edges(batch, steps):
    operands = [x.requires_grad_() for x in _draw(batch, steps, 4, 2, values=5)]
    y, memory = segment_attention(*operands, window=3)
    assert y.shape == (batch, steps, 4, 5)
    assert memory.keys.shape == (batch, 3, 2, 3)
    z, _ = segment_attention(*operands, memory, window=3)
    assert z.shape == y.shape
    for grad, x in zip(torch.autograd.grad((y + z).sum(), operands, materialize_grads=True), operands, strict=True):
        assert grad.shape == x.shape
    masked, _ = segment_attention(*operands, memory, window=3, mask=torch.ones(batch, steps, dtype=torch.bool))
    torch.testing.assert_close(masked, z)
    packed = torch.zeros(1, dtype=torch.int64)
    none = segment_attention(*(x[:1, :0] for x in _draw(1, 1)), window=3, cu_seqlens=packed)
    assert none[0].shape == (1, 0, 2, 3)
    assert none[1].position.shape == (0,)


def test_strided_and_expanded_inputs():
    q, k, v = _draw(2, 20)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(segment_attention(*strided, window=5)[0], segment_attention(q, k, v, window=5)[0])
    one = k[:1].expand(2, -1, -1, -1)
    torch.testing.assert_close(segment_attention(q, one, v, window=5)[0], _loop(q, one, v, 5))


def test_a_long_stream_does_not_drift():
    """The ring has turned a million times: what is read is the last window, to the bit."""
    memory = init_memory(1, 3, 1, 3, 3, dtype=torch.float64)
    memory = memory._replace(position=torch.tensor([3 * 2**40]))
    q, k, v = _draw(1, 8)
    y, after = segment_attention(q, k, v, memory, window=3)
    torch.testing.assert_close(y[:, 2:], _loop(q, k, v, 3)[:, 2:])
    assert after.position.item() == 3 * 2**40 + 8
    torch.testing.assert_close(after.keys[:, [0, 1, 2]], k[:, [6, 7, 5]], rtol=0, atol=0)


WHOLE = pytest.param("whole", marks=pytest.mark.long)  # a shorter "long"


@pytest.mark.parametrize("case", [WHOLE, "long", "memory", "step", "mask", "packed"])
def test_compiled_gives_the_same_numbers(case):
    torch.compiler.reset()
    steps = {"long": 150, "step": 1}.get(case, 9)
    operands = [x.float() for x in _draw(1, steps)]
    memory = segment_attention(*(x.float() for x in _draw(1, 2)), window=4)[1] if case in ("memory", "step") else None
    options: dict = {
        "mask": {"mask": torch.arange(9)[None] > 3},
        "packed": {"cu_seqlens": torch.tensor([0, 2, 9])},
    }.get(case, {})

    def run(q, k, v, memory):
        return segment_attention(q, k, v, memory, window=4, **options)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    results = []
    for function in (run, compiled):
        leaves = [x.clone().requires_grad_() for x in operands]
        y, after = function(*leaves, memory)
        results.append([y, *after, *torch.autograd.grad(y, leaves, _weights(y), materialize_grads=True)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


Q, K, V = (x.float() for x in _draw(2, 4, heads=4, key_heads=2))
MEMORY = init_memory(2, 3, 2, 3, 3)
ONE = (Q[:1], K[:1], V[:1])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((Q, K, V), {"window": 0}, ConfigError, "window is 0, expected an integer of at least 1"),
        ((Q, K, V), {"window": None}, ConfigError, "window is None, expected an integer"),
        ((Q[0], K, V), {}, ShapeError, r"q has shape \(4, 4, 3\), expected \(B, T, H, K\)"),
        ((Q, K[:, :3], V), {}, ShapeError, r"k has shape \(2, 3, 2, 3\), expected \(B, T, G, K\) with B=2"),
        ((Q, K[..., :2], V), {}, ShapeError, r"k has shape \(2, 4, 2, 2\), expected"),
        ((Q[:, :, :3], K, V), {}, ShapeError, "k has G=2, expected a divisor of H=3 from q"),
        ((Q, K, V[:, :, :1]), {}, ShapeError, r"v has shape \(2, 4, 1, 3\), expected \(B, T, G, V\) .*G=2 from k"),
        ((Q, K, V.to("meta")), {}, ShapeError, "v is on meta, expected cpu because of q"),
        ((Q.long(), K, V), {}, ShapeError, "q is int64, expected bfloat16, float16"),
        ((Q, 1.0, V), {}, ShapeError, "k is a float, expected a tensor"),
        ((Q, K, V), {"mask": torch.ones(2, 4)}, ShapeError, r"mask is float32, expected bool"),
        ((Q, K, V), {"mask": torch.ones(2, 3) > 0}, ShapeError, r"mask has shape \(2, 3\), expected \(B, T\)"),
        ((Q, K, V, MEMORY), {"window": 4}, ShapeError, r"memory.keys .* \(2, 3, 2, 3\), .* \(2, 4, 2, 3\) because"),
        ((*ONE, MEMORY), {}, ShapeError, r"memory.keys .* expected \(1, 3, 2, 3\) because of q"),
        ((Q, K, V, MEMORY._replace(position=torch.zeros(2))), {}, ShapeError, "memory.position is float32"),
        ((Q, K, V), {"cu_seqlens": torch.tensor([0, 4])}, ShapeError, "q has a batch of 2, expected 1 because of cu"),
        (ONE, {"cu_seqlens": torch.tensor([0, 3])}, ShapeError, r"cu_seqlens is \[0, 3\], expected offsets that rise"),
        (ONE, {"cu_seqlens": torch.tensor([0.0, 4.0])}, ShapeError, "cu_seqlens is float32 of shape"),
        ((*ONE, MEMORY), {"cu_seqlens": torch.tensor([0, 4])}, ShapeError, "because of q, k, v, window, cu_seqlens"),
        (ONE, {"cu_seqlens": torch.tensor([0, 4]), "mask": torch.ones(1, 4) > 0}, ConfigError, "mask is given with"),
        ((Q.clone().requires_grad_(), K, V, MEMORY), {"overwrite": True}, ConfigError, "overwrite is True, expected"),
    ],
)  # fmt: skip
def test_errors(arguments, options, error, message):
    with pytest.raises(error, match=f"segment_attention: .*{message}"):
        segment_attention(*arguments, **{"window": 3, **options})


def test_worked_examples():
    results = doctest.testmod(importlib.import_module("scanl.ops.segment_attention"), extraglobs={"torch": torch})
    assert results.attempted > 0
    assert results.failed == 0
