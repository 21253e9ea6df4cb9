"""Laws of layers, run on every registered layer, on wrappers, and on layers as a user writes them."""

import contextlib
import copy
import multiprocessing
import pickle
import threading
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import laws
from scanl import layers, ops
from scanl.errors import CheckpointError, ConfigError, ShapeError
from scanl.layers import SLSTM, Bidirectional, Hint, LinearRNN, auxiliary, padded, param_groups
from scanl.layers import state as states
from scanl.layers.linear_rnn import LinearRNNState
from scanl.layers.parts.cell_layer import CellBase
from scanl.layers.parts.short_convolution import ShortConvolution
from scanl.layers.registry import channel_mixers
from scanl.models.stack import Stack
from scanl.ops import registry

COVERS = [
    "layers/module", "layers/options", "layers/packing", "layers/parameters", "layers/registry", "layers/state",
    "layers/channel/mlp",
]  # fmt: skip

pytestmark = [pytest.mark.early(3), pytest.mark.cells_by_loop("name", "streaming", "every")]

DIM = 12


class WeightedDecay(LinearRNN):
    """A user's recurrence: a matrix on the input and a decay per channel, computed step by step."""

    def __init__(self, dim, expand=2):
        super().__init__(dim, expand)
        self.W_state = nn.Linear(self.hidden_dim, self.hidden_dim, bias=False)
        self.decay = nn.Parameter(torch.randn(self.hidden_dim))

    def recurrent_forward(self, x, state):
        if state is None:
            state = torch.zeros(x.shape[0], x.shape[2], device=x.device, dtype=x.dtype)
        outputs = []
        for t in range(x.shape[1]):
            state = torch.sigmoid(self.decay) * state + self.W_state(x[:, t])
            outputs.append(state)
        return torch.stack(outputs, 1) if outputs else x, state


class MatrixDecay(LinearRNN):
    """A user's recurrence whose state is a matrix."""

    def __init__(self, dim, expand=2, num_heads=4):
        super().__init__(dim, expand)
        self.num_heads, self.head_dim = num_heads, self.hidden_dim // num_heads
        self.decay = nn.Parameter(torch.randn(num_heads, self.head_dim))
        self.k_proj = nn.Linear(self.hidden_dim, self.hidden_dim, bias=False)
        self.v_proj = nn.Linear(self.hidden_dim, self.hidden_dim, bias=False)

    def recurrent_forward(self, x, state):
        heads = (x.shape[0], x.shape[1], self.num_heads, self.head_dim)
        if state is None:
            state = x.new_zeros(x.shape[0], self.num_heads, self.head_dim, self.head_dim)
        k, v = self.k_proj(x).view(heads), self.v_proj(x).view(heads)
        outputs = []
        for t in range(x.shape[1]):
            state = state * torch.sigmoid(self.decay)[None, :, :, None] + k[:, t, :, :, None] * v[:, t, :, None]
            outputs.append((state @ v[:, t, :, :, None])[..., 0])
        return torch.stack(outputs, 1).reshape(x.shape) if outputs else x, state


CASES = {name: (lambda name=name: layers.build(name, DIM, **layers.get(name).sample)) for name in layers.names()}
SHORT = [name for name in CASES if layers.get(name).preset_of is not None and not layers.get(name).own_path]
REGISTERED = [name for name in CASES if name not in SHORT]  # test_presets.py runs the laws of the others
CASES |= {
    "short_convolution": lambda: ShortConvolution(DIM),
    "short_convolution_1": lambda: ShortConvolution(DIM, kernel_size=1, bias=False),
    "short_convolution_centred": lambda: ShortConvolution(DIM, kernel_size=3, causal=False),
    "linear_rnn_without_conv": lambda: LinearRNN(DIM, bias=False, use_short_conv=False),
    "user_vector": lambda: WeightedDecay(DIM, 1),
    "user_matrix": lambda: MatrixDecay(DIM, 1),
    "bidirectional_concat": lambda: Bidirectional(DIM, "hgrn", combine="concat"),
    "slstm_without_conv": lambda: SLSTM(DIM, 2, None, "exp"),
    **{
        f"{name}_noncausal": lambda name=name: layers.build(name, DIM, **layers.get(name).sample, causal=False)
        for name in ("gau", "flash", "rsa")
    },
    "ran_noncausal": lambda: layers.build("ran", DIM, num_heads=3, window=1, causal=False),
    "gate_before_norm": lambda: LinearRNN(DIM, norm_before_gate=False),
}
CASES |= {f"mixer_{name}": (lambda name=name: channel_mixers.get(name)(DIM)) for name in channel_mixers.names()}
LAYERS = [name for name in CASES if name not in SHORT]
BUILT = {name: build() for name, build in CASES.items()}  # for what they declare
STREAMING = [name for name in LAYERS if not BUILT[name].bidirectional]


def make(name, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    layer = CASES[name]().to(dtype)
    with torch.no_grad():  # move parameters away from special values: zero biases, unit norms
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def inputs(*shape, dtype=torch.float64, seed=1):
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_same(actual, expected, **tolerance):
    """Assert that two tensors, or two states of the same form, are close."""
    assert [place for place, _ in states.leaves(actual)] == [place for place, _ in states.leaves(expected)]
    for (_, a), (_, b) in zip(states.leaves(actual), states.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def knows_its_state_when_it_runs(layer):
    """Whether the layer is a user's LinearRNN, whose state starts from None."""
    return isinstance(layer, LinearRNN) and layer.init_state(1).recurrent is None


def some_state(layer, rows):
    """Return a state from the middle of a sequence."""
    return states.detach(layer(inputs(rows, 5, dtype=next(layer.parameters()).dtype, seed=9))[1])


@pytest.fixture(params=LAYERS)
def name(request):
    return request.param


@pytest.fixture(params=STREAMING)
def streaming(request):
    return request.param


@pytest.fixture(params=CASES)
def every(request):
    return request.param


def test_tokens_equal_the_whole(streaming):
    layer, x = make(streaming), inputs(2, 9)
    whole, last = layer(x)
    state, ys = layer.init_state(2), []
    for t in range(x.shape[1]):
        y, state = layer.step(x[:, t], state)
        ys.append(y)
    torch.testing.assert_close(torch.stack(ys, 1), whole)
    assert_same(state, last)


@pytest.mark.parametrize("which", ["output", "state"])
def test_results_may_be_changed_in_place(every, which):
    """As `torch.relu_(layer(x)[0])`, which torch's own recurrent modules allow: gradients are those of a copy."""
    layer, x = make(every), inputs(2, 9)
    found = []
    for change in (torch.Tensor.mul_, torch.Tensor.mul):
        given = x.clone().requires_grad_()
        torch.manual_seed(3)  # of the layers that draw noise
        y, last = layer(given)
        parts = [part for _, part in states.leaves(last) if part.is_floating_point()]
        if which == "output":
            y = change(y, torch.where(y.detach() > 0, 2.0, 0.5))
        else:
            parts = [change(part, 0.5) for part in parts]
        loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
        loss = loss + sum(part.square().sum() for part in parts)
        parameters = [p for p in layer.parameters() if p.requires_grad]
        found.append([loss, *torch.autograd.grad(loss, [given, *parameters], materialize_grads=True)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_any_cut_equals_the_whole(streaming):
    layer, x, before = make(streaming), inputs(2, 7), None
    for first, before in enumerate((None, some_state(layer, 2))):
        whole, last = layer(x, before)
        # By turns: both begin at each phase of a segment of three steps, and together at each of four.
        for cut in range(8) if laws.ALL else range(first, 8, 2):
            left, state = layer(x[:, :cut], before)
            right, state = layer(x[:, cut:], state)
            torch.testing.assert_close(torch.cat([left, right], 1), whole)
            assert_same(state, last)


def test_prefill_in_pieces_then_tokens(streaming):
    layer, x = make(streaming), inputs(2, 14)
    whole, last = layer(x)
    state, ys = None, []
    for start, end in pairwise([0, 3, 4, 5, 5, 7, 12, 13, 14]):
        y, state = layer(x[:, start:end], state)
        ys.append(y)
    torch.testing.assert_close(torch.cat(ys, 1), whole)
    assert_same(state, last)


def test_the_future_changes_nothing_before_it(name):
    layer, x = make(name), inputs(2, 6)
    y, _ = layer(x)
    for t in range(6):
        other = x.clone()
        other[:, t] += torch.linspace(0.5, 1.5, DIM, dtype=x.dtype)  # a norm removes a constant up to rounding
        changed = (layer(other)[0] != y).flatten(2).any(2).all(0)
        assert changed[t]
        assert changed[:t].any().item() == (layer.bidirectional and t > 0)


def test_a_row_of_the_batch_equals_itself_alone(name):
    layer, x = make(name), inputs(3, 5)
    y, state = layer(x)
    for i in range(3):
        alone, last = layer(x[i : i + 1])
        torch.testing.assert_close(y[i : i + 1], alone)
        assert_same(states.index(state, slice(i, i + 1)), last)


@pytest.mark.parametrize("carried", [False, True])
def test_packed_sequences_equal_each_alone(name, carried):
    layer, cuts = make(name), [0, 4, 4, 5, 7, 13]
    x, before = inputs(1, 13), some_state(layer, 5) if carried else None
    y, last = layer(x, before, cu_seqlens=torch.tensor(cuts))
    for n, (start, end) in enumerate(pairwise(cuts)):
        row = slice(n, n + 1)
        alone, state = layer(x[:, start:end], states.index(before, row))
        torch.testing.assert_close(y[:, start:end], alone)
        assert_same(states.index(last, row), state)


def test_a_state_that_begins_anew_equals_the_pieces(name):
    """In one call, packed, and cut with a step between: outputs, states, and the gradients by state, input, weights."""
    layer, x = make(name), inputs(2, 6).requires_grad_()
    starts = torch.tensor([[0, 0, 1, 0, 0, 1], [1, 0, 0, 0, 1, 0]]).bool()
    before = some_state(layer, 2)
    kept = [leaf for _, leaf in states.leaves(before) if leaf.is_floating_point() or leaf.is_complex()]
    for leaf in kept:
        leaf.requires_grad_()
    ys, ends = [], []
    for row, cuts in enumerate([(0, 2, 5, 6), (0, 4, 6)]):
        at, state = slice(row, row + 1), None
        for start, end in pairwise(cuts):
            y, state = layer(x[at, start:end], states.index(before, at) if (row, start) == (0, 0) else None)
            ys.append(y)
        ends.append(state)
    expected, end = torch.cat(ys, 1).view_as(x), states.cat(ends)

    def packed():
        flat, cuts = x.flatten(0, 1)[None], torch.tensor([0, 6, 12])
        y, last = layer(flat, before, cu_seqlens=cuts, starts=starts.flatten()[None])
        return y.view_as(x), last

    def cut():
        left, state = layer(x[:, :4], before, starts=starts[:, :4])
        middle, state = layer.step(x[:, 4], state, starts=starts[:, 4])
        right, state = layer(x[:, 5:], state, starts=starts[:, 5:])
        return torch.cat([left, middle[:, None], right], 1), state

    whole = layer(x, before, starts=starts)
    for y, last in [whole, packed()] if layer.bidirectional else [whole, packed(), cut()]:
        torch.testing.assert_close(y, expected)
        assert_same(last, end)
    parts = [x, *(p for p in layer.parameters() if p.requires_grad), *kept]
    found = []
    for y, last in (whole, (expected, end)):
        loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
        loss = loss + sum(leaf.abs().square().sum() for _, leaf in states.leaves(last) if leaf.requires_grad)
        found.append(torch.autograd.grad(loss, parts, materialize_grads=True, allow_unused=True))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("entering", [False, True])
@pytest.mark.parametrize(
    "which", ["attention", "forgetting_attention", "gau", "hippo", "hyena", "lssl", "mega", "ran_noncausal", "rmt"]
)
def test_pieces_of_several_lengths_equal_each_alone(which, entering):
    """Pieces that no state enters and whose last state nobody reads may be padded; here are some of similar lengths."""
    layer, x = make(which), inputs(2, 16)
    cuts = [(0, 3, 5, 8, 15, 16), (0, 4, 6, 7, 13, 16)]
    starts = torch.tensor([[t in row for t in range(16)] for row in cuts])
    starts[0, 0] = False
    before = some_state(layer, 2) if entering else None
    y, last = layer(x, before, starts=starts)
    for row, bounds in enumerate(cuts):
        at, state = slice(row, row + 1), None
        for start, end in pairwise(bounds):
            own = states.index(before, at) if row == start == 0 else None
            alone, state = layer(x[at, start:end], own)
            torch.testing.assert_close(y[at, start:end], alone)
        assert_same(states.index(last, at), state)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_each_alone(name, side):
    layer, lengths, x = make(name), [3, 6, 1], inputs(3, 6)
    steps = torch.arange(6)
    starts = [6 - n if side == "left" else 0 for n in lengths]
    mask = torch.stack([(steps >= s) & (steps < s + n) for s, n in zip(starts, lengths, strict=True)])
    before = some_state(layer, 3)
    y, last = padded(layer, x.masked_fill(~mask[..., None], torch.nan), mask, before)
    assert not y[~mask].any()
    for i in range(3):
        alone, state = layer(x[i : i + 1, mask[i]], states.index(before, slice(i, i + 1)))
        torch.testing.assert_close(y[i, mask[i]], alone[0])
        assert_same(states.index(last, slice(i, i + 1)), state)


def test_rows_that_have_read_differently_go_on_together(streaming):
    """Rows that have read nothing, little or much continue in one batch; each equals the same row alone.

    So do their states, their gradients and their auxiliary losses, in one call and in pieces.
    """
    layer, x = make(streaming), inputs(3, 13).requires_grad_()
    before = [states.detach(layer(inputs(1, steps, seed=steps))[1]) for steps in (0, 1, 5)]

    def read(x, state, cuts):
        ys = []
        for start, end in pairwise(cuts):
            y, state = layer(x[:, start:end], state)
            ys.append(y)
        return torch.cat(ys, 1), state

    def slopes(y, losses):
        total, learned = y.square().sum() + losses.total(), [p for p in layer.parameters() if p.requires_grad]
        return torch.autograd.grad(total, [x, *learned], materialize_grads=True)

    with auxiliary.collect() as losses:
        rows = [read(x[i : i + 1], own, (0, 13)) for i, own in enumerate(before)]
    expected, last = torch.cat([y for y, _ in rows]), states.cat([state for _, state in rows])
    expected_losses, expected_slopes = losses.by_name(), slopes(expected, losses)
    for cuts in ((0, 13), (0, 1, 5, 5, 13)):
        with auxiliary.collect() as losses:
            y, state = read(x, states.cat(before), cuts)
        torch.testing.assert_close(y, expected)
        assert_same(state, last)
        torch.testing.assert_close(losses.by_name(), expected_losses)
        for slope, other in zip(slopes(y, losses), expected_slopes, strict=True):
            torch.testing.assert_close(slope, other)


def test_the_state_does_not_grow(name):
    layer = make(name)
    _, short = layer(inputs(2, 1))
    _, long = layer(inputs(2, 70))
    assert_same(states.map_leaves(torch.zeros_like, long), states.map_leaves(torch.zeros_like, short))
    form = {place: (leaf.shape, leaf.dtype) for place, leaf in states.leaves(short)}
    fresh = {place: (leaf.shape, leaf.dtype) for place, leaf in states.leaves(layer.init_state(2))}
    assert fresh.items() <= form.items()
    assert fresh.keys() == form.keys() or knows_its_state_when_it_runs(layer)


def test_no_state_is_the_initial_state(name):
    layer, x = make(name), inputs(2, 4)
    for T in (0, 4):
        y, last = layer(x[:, :T])
        z, also = layer(x[:, :T], layer.init_state(2))
        torch.testing.assert_close(y, z, rtol=0, atol=0)
        assert_same(also, last, rtol=0, atol=0)


def test_no_steps_change_nothing(name):
    layer = make(name)
    before = some_state(layer, 2)
    y, last = layer(inputs(2, 0), before)
    assert y.shape == (2, 0, DIM)
    assert_same(last, before, rtol=0, atol=0)


def test_no_rows(name):
    layer = make(name)
    y, last = layer(inputs(0, 3), layer.init_state(0))
    assert y.shape == (0, 3, DIM)
    assert all(leaf.shape[0] == 0 for _, leaf in states.leaves(last))


def test_strided_and_expanded_input(name):
    layer = make(name)
    y, _ = layer(inputs(2, 5))
    strided = inputs(2, 5).transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(layer(strided)[0], y)
    expanded = inputs(1, 1).expand(2, 5, DIM)
    torch.testing.assert_close(layer(expanded)[0], layer(expanded.contiguous())[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision(streaming, dtype):
    """The error against float64 token by token is at most twice that of the whole sequence, and nothing is NaN."""
    layer = make(streaming, dtype)
    x = inputs(3, 33, dtype=dtype)
    if _spikes(layer):  # a current that is rounded differently is another spike; sums of sixteenths are exact
        with torch.no_grad():
            for value in (x, *layer.parameters()):
                value.copy_((4 * value).round() / 4)
    whole, last = layer(x)
    state, ys = layer.init_state(3), []
    with torch.no_grad():
        for t in range(33):
            y, state = layer.step(x[:, t], state)
            ys.append(y)
    exact, _ = make_like(layer, streaming)(x.double())
    assert whole.dtype == dtype
    tokens = torch.stack(ys, 1)
    own = (whole.double() - exact).abs().max()
    bound = 2 * (own + torch.finfo(dtype).eps * exact.abs().max())
    assert own.isfinite()
    assert (tokens.double() - exact).abs().max() <= bound
    for place, leaf in states.leaves(last):
        if streaming in REGISTERED:  # dtypes of the recurrent state, and of counts
            assert leaf.dtype in (torch.float32, torch.complex64, torch.int64), place


def _spikes(layer):
    return isinstance(layer, CellBase) and "the gradients of the output" in layer.cell.excused


def make_like(layer, name):
    """Return the same layer in float64, with the rounded parameter values of the given layer."""
    copy = CASES[name]().double()
    copy.load_state_dict(layer.state_dict())
    return copy


def test_saved_and_loaded_continues_exactly(name, tmp_path):
    layer, x = make(name, torch.float32), inputs(2, 8, dtype=torch.float32)
    _, state = layer(x[:, :5])
    expected, last = layer(x[:, 5:], state)
    save_file(layer.state_dict(), tmp_path / "weights.safetensors")
    states.save(state, tmp_path / "state.safetensors")
    other = make(name, torch.float32, seed=5)
    like = other(x[:1, :1])[1] if knows_its_state_when_it_runs(other) else other.init_state(1)
    read = states.load(tmp_path / "state.safetensors", like)
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    y, also = other(x[:, 5:], read)
    assert torch.equal(y, expected)
    assert_same(also, last, rtol=0, atol=0)
    torch.save(state, tmp_path / "state.pt")
    assert_same(torch.load(tmp_path / "state.pt", weights_only=True), state, rtol=0, atol=0)


def test_beam_search_can_reorder_repeat_and_join(name):
    layer, x = make(name), inputs(3, 4)
    before = some_state(layer, 3)
    y, last = layer(x, before)
    order = [2, 0, 0, 1]
    for rows in (order, torch.tensor(order)):
        z, also = layer(x[order], states.index(before, rows))
        torch.testing.assert_close(z, y[order])
        assert_same(also, states.index(last, rows))
    z, _ = layer(x.repeat_interleave(2, 0), states.repeat(before, 2))
    torch.testing.assert_close(z, y.repeat_interleave(2, 0))
    parts = [states.index(before, slice(0, 1)), states.index(before, slice(1, 3))]
    assert_same(states.cat(parts), before, rtol=0, atol=0)


def assert_derivatives(layer, x, results):
    """Assert that the gradients of results(y, state) are the derivatives, along one direction of all numbers at once.

    The input and the parameters are parts of one vector: two evaluations do for all of them. Because they share the
    tolerance too, it is a tenth of torch's relative one, and a thousandth of its absolute one.
    """
    learned = {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}
    values = [x, *learned.values()]

    def run(together):
        parts = together.split([value.numel() for value in values])
        x, *parameters = (part.view(value.shape) for part, value in zip(parts, values, strict=True))
        return results(*torch.func.functional_call(layer, dict(zip(learned, parameters, strict=True)), (x,)))

    together = torch.cat([value.detach().flatten() for value in values]).requires_grad_()
    assert torch.autograd.gradcheck(run, (together,), fast_mode=True, rtol=1e-4, atol=1e-8)


def test_gradients_are_the_derivatives_and_reach_every_parameter(name):
    layer, x = make(name), inputs(2, 4)

    def results(y, state):
        carried = [leaf for _, leaf in states.leaves(state) if leaf.requires_grad]
        return y, *(torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in carried)

    assert_derivatives(layer, x, results)
    layer(x)[0].square().sum().backward()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.any(), parameter_name


def test_the_derivative_of_a_gradient_is_right(name):
    layer, x = make(name), inputs(1, 3).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], (x,), fast_mode=True)


def test_gradients_cross_a_carried_state(streaming):
    layer, x = make(streaming), inputs(2, 6).requires_grad_()
    (whole,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
    left, state = layer(x[:, :3])
    right, _ = layer(x[:, 3:], state)
    (parts,) = torch.autograd.grad(torch.cat([left, right], 1).square().sum(), x)
    torch.testing.assert_close(parts, whole)
    right, _ = layer(x[:, 3:], states.detach(state))
    (cut,) = torch.autograd.grad(right.square().sum(), x)
    assert not cut[:, :3].any()


OF_CELLS = {cell.name for cell in registry.cells()} - {"slstm", "lem_cell"}  # two stand for all: one code runs them


def _stand_for_all(*, by_base):
    """The smallest layer of each base class and op; layers that are excused; and what is registered as no layer.

    by_base: False for one layer of each op, and of each base class without an op. Cells count as one op: in a graph
    each is one node. With --all every layer is traced.
    """
    found, others = {}, {name for name in LAYERS if name not in REGISTERED}
    for name in sorted(REGISTERED, key=lambda name: sum(parameter.numel() for parameter in BUILT[name].parameters())):
        cls = type(BUILT[name])
        if "compiles_to_one_graph" in cls.excused:
            others.add(name)
        else:
            base = cls.__base__ if by_base or cls.op is None else None
            found.setdefault((base, "a cell" if cls.op in OF_CELLS else cls.op), name)
    return {*found.values(), *others}


COMPILED, EXPORTED = _stand_for_all(by_base=True), _stand_for_all(by_base=False)


def some(names, standing=COMPILED):
    """Cases of those names that stand for all; the others are long."""
    return [pytest.param(name, marks=[pytest.mark.long] * (name not in standing)) for name in names]


@pytest.mark.cells_by_kernel
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")  # torch itself does
@pytest.mark.parametrize("name", some(LAYERS))
def test_compiles_to_one_graph(name):
    layer, x = make(name), inputs(2, 6)
    if layer.name != name and layer.name in layers.names() and layers.get(layer.name) is type(layer):
        pytest.skip("its class is compiled under its own name")
    torch.compiler.reset()
    few = stood_for(name)
    with ops.backend("reference") if few else contextlib.nullcontext():
        before = some_state(layer, 2)
        calls = ((x, before), (x,)) if laws.ALL else ((x, before),)
        expected = [layer(*arguments) for arguments in calls]
    # Layers differ in their graph. What is traced below it is a law of ops; without a state, whole models are compiled.
    backend = shapes_only if few else "aot_eager" if laws.ALL else "eager"
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for arguments, (y, last) in zip(calls, expected, strict=True):
        z, also = compiled(*arguments)
        assert shapes((z, also)) == shapes((y, last))
        if not few:
            torch.testing.assert_close(z, y)
            assert_same(also, last)


def shapes(result):
    """The shapes of an output, and of each tensor of a state."""
    y, state = result
    return y.shape, {place: each.shape for place, each in states.leaves(state)}


def shapes_only(graph, _):
    """A backend of torch.compile that returns zeros: a cell's kernel takes seconds to compile."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    values = [node.meta["example_value"] for node in output.args[0]]
    return lambda *_: [torch.zeros(value.shape, dtype=value.dtype) for value in values]


def stood_for(name):
    """Whether the layer runs a cell for whose kernels others stand; never with --all."""
    return not laws.ALL and getattr(BUILT[name], "op", None) in OF_CELLS


WITH_KERNELS = [name for name in REGISTERED if getattr(BUILT[name], "op", None) not in OF_CELLS]


def _numbers(name):
    layer = make(name, torch.float32)
    return layer(inputs(4, 65, dtype=torch.float32))[0].detach()


def test_several_threads_give_the_same_numbers():
    expected = {name: _numbers(name) for name in WITH_KERNELS}
    layer_of = {name: make(name, torch.float32) for name in WITH_KERNELS}
    found: list[tuple[str, Tensor]] = []

    def work():
        for name in WITH_KERNELS:
            found.append((name, layer_of[name](inputs(4, 65, dtype=torch.float32))[0].detach()))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 * len(WITH_KERNELS)
    for name, y in found:
        assert torch.equal(y, expected[name]), name


def _send_numbers(pipe):
    pipe.send({name: _numbers(name).numpy() for name in WITH_KERNELS})


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this platform does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_worker_gives_the_same_numbers():
    expected = {name: _numbers(name) for name in WITH_KERNELS}  # before the fork, so that the parent's threads exist
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=_send_numbers, args=(theirs,))
    worker.start()
    assert ours.poll(60), f"the worker is silent, exit code {worker.exitcode}"
    found = ours.recv()
    worker.join()
    for name in WITH_KERNELS:
        assert torch.equal(torch.from_numpy(found[name]), expected[name]), name


WRONG = [
    (lambda layer: layer(inputs(2)), r"x has shape \(2, 12\), expected \(B, T, 12\)"),
    (lambda layer: layer(inputs(2, 3)[..., :5]), r"x has shape \(2, 3, 5\), expected \(B, T, 12\)"),
    (lambda layer: layer(inputs(2, 3).float()), r"x is torch.float32, expected torch.float64 of the parameters"),
    (lambda layer: layer(inputs(2, 3).to("meta")), r"x is on meta, expected cpu of the parameters"),
    (lambda layer: layer(inputs(2, 3), cu_seqlens=torch.tensor([0, 3])), r"x has a batch of 2, expected 1"),
    (lambda layer: layer(inputs(1, 3), cu_seqlens=torch.tensor([0, 2])), r"expected offsets that rise from 0 to T=3"),
    (
        lambda layer: layer(inputs(1, 3), cu_seqlens=torch.tensor([0, 3, 2, 3])),
        r"expected offsets that rise from 0 to T=3",
    ),
    (lambda layer: layer(inputs(1, 3), cu_seqlens=torch.tensor([0.0, 3.0])), r"cu_seqlens is float32 of shape \(2,\)"),
    (
        lambda layer: layer(inputs(2, 3), starts=torch.zeros(2, 4, dtype=torch.bool)),
        r"starts is torch.bool \(2, 4\), expected torch.bool \(2, 3\)",
    ),
    (
        lambda layer: layer(inputs(2, 3), starts=torch.zeros(2, 3)),
        r"starts is torch.float32 \(2, 3\), expected torch.bool",
    ),
]


def test_wrong_input_is_refused(name):
    layer = make(name)
    for call, message in WRONG:
        with pytest.raises(ShapeError, match=rf"\w+: .*{message}"):
            call(layer)


@pytest.mark.parametrize("name", REGISTERED)
def test_wrong_state_is_refused(name):
    layer, x = make(name), inputs(3, 2)
    with pytest.raises(ShapeError, match=rf"{name}: state has .*, expected .* because of the layer and x"):
        layer(x, layer.init_state(2))
    with pytest.raises(ShapeError, match=rf"{name}: state has .* because of the layer and cu_seqlens"):
        layer(inputs(1, 2), layer.init_state(2), cu_seqlens=torch.tensor([0, 2]))
    with pytest.raises(ShapeError, match=rf"{name}: state has .*, expected"):
        layer(x, (torch.zeros(3, 1, 2, 3, 4, dtype=torch.float64),))


def test_unknown_names_get_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown layer 'lur'; did you mean 'lru'\?"):
        layers.build("lur", 8)
    with pytest.raises(ConfigError, match=r"unknown option of lru 'rmin'; did you mean 'r_min'\?"):
        layers.build("lru", 8, rmin=0.5)
    with pytest.raises(ConfigError, match=r"unknown layer 'zzz'; `scanl list` prints all"):
        layers.get("zzz")
    with pytest.raises(ConfigError, match=r"layer 'lru' is registered twice"):
        layers.register("lru")(WeightedDecay)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: layers.build("lru", 8, r_min=0.9, r_max=0.5), "lru: r_max is 0.5, expected more than r_min=0.9"),
        (lambda: layers.build("rglru", 8, num_heads=3), "rglru: num_heads is 3, expected a divisor of dim=8"),
        (lambda: layers.build("mega_ema", 8, state_dim=0), "mega_ema: state_dim is 0, expected at least 1"),
        (lambda: layers.build("mingru", 8, expand=0.1), "mingru: expand is 0.1, expected at least 1/8"),
        (lambda: layers.build("linear_rnn", 8, expand=0), "linear_rnn: expand is 0, expected at least 1"),
        (lambda: layers.build("hawk", 8, num_heads=0), "hawk: num_heads is 0, expected at least 1"),
        (lambda: ShortConvolution(8, 0), "short_convolution: kernel_size is 0, expected at least 1"),
        (
            lambda: layers.build("bidirectional", 8, combine="mean"),
            "bidirectional: unknown combine 'mean'; known: sum, concat",
        ),
        (lambda: layers.build("multi_scale", 8, num_scales=0), "multi_scale: num_scales is 0, expected at least 1"),
        (
            lambda: Bidirectional(8, lambda dim: LinearRNN(dim), "sum", {"expand": 1}),
            "expected none because layer is a function",
        ),
    ],
)
def test_wrong_options_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize(
    ("name", "takes"),
    [("gla", set()), ("dlr", set()), ("dss_softmax", {"timespans"}), ("mega", {"residual"}), ("rwkv7", {"memo"})],
)
def test_a_layer_takes_the_arguments_of_its_run(name, takes):
    assert layers.get(name).takes == takes


def test_what_no_layer_takes_is_no_argument_of_run():
    with pytest.raises(ConfigError, match="argument of run of Misspelt 'timespan'; did you mean 'timespans'"):

        class Misspelt(LinearRNN):
            def run(self, x, state, cu_seqlens, timespan=None):
                return x, state


@pytest.mark.parametrize("name", REGISTERED)
def test_every_layer_declares_what_it_is(name):
    cls = layers.get(name)
    assert cls.equation
    assert cls.source
    assert cls.id.startswith("S-") or not cls.id
    assert cls.name == name
    assert cls.op in {None, *registry.names()}
    assert cls.__doc__
    if cls.residual_out is not None:
        assert isinstance(CASES[name]().get_submodule(cls.residual_out), nn.Linear)


@pytest.mark.parametrize("mixer", channel_mixers.names())
def test_every_channel_mixer_declares_what_it_is(mixer):
    cls = channel_mixers.get(mixer)
    assert cls.equation
    assert cls.source
    assert cls.__doc__
    assert cls.residual_out is not None
    assert isinstance(cls(DIM).get_submodule(cls.residual_out), nn.Linear)


def test_a_registered_channel_mixer_is_one_of_a_stack():
    @channel_mixers.add("test_mixer")
    class Mixer(layers.Layer):
        def __init__(self, dim, factor=1.0):
            super().__init__()
            self.dim, self.factor = dim, factor

        def init_state(self, batch_size, *, device=None, dtype=None):
            return ()

        def forward(self, x, state=None, *, cu_seqlens=None):
            return self.factor * x, ()

    try:
        stack = Stack(DIM, 1, "lru", channel_mixer="test_mixer", channel_options={"factor": 2.0})
        assert isinstance(stack.blocks[0].channel, Mixer)
        assert stack.blocks[0].channel.factor == 2
        with pytest.raises(ConfigError, match=r"unknown channel mixer 'test_mixr'; did you mean 'test_mixer'\?"):
            Stack(DIM, 1, "lru", channel_mixer="test_mixr")
    finally:
        channel_mixers.remove("test_mixer")


def trained(model):
    """Return for each parameter name the learning rate and the weight decay of its group."""
    groups = {
        id(p): (group.get("lr"), group.get("weight_decay")) for group in param_groups(model) for p in group["params"]
    }
    return {name: groups[id(parameter)] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", REGISTERED)
def test_how_parameters_are_trained_survives_copies(name):
    """A copy, a pickle, a loaded model and one built by a subclass have the same parameter groups."""
    options = layers.get(name).sample
    layer, stack = CASES[name](), Stack(DIM, 2, name, layer_options=dict(options))
    for model, build in ((layer, CASES[name]), (stack, lambda: Stack(DIM, 2, name, layer_options=dict(options)))):
        expected = trained(model)
        assert trained(copy.deepcopy(model)) == expected
        assert trained(pickle.loads(pickle.dumps(model))) == expected
        for assign in (False, True):
            other = build()
            other.load_state_dict(model.state_dict(), strict=True, assign=assign)
            assert trained(other) == expected
    user = type("User", (layers.get(name),), {"hints": {}})
    assert trained(user(DIM, **options)) == trained(layer)


def test_hints_of_a_subclass_are_added_and_those_outside_count():
    class User(layers.S4D):
        hints = {"D": Hint(lr="slow"), "kernel.log_dt": Hint(lr="slow")}  # noqa: RUF012
        slow = 1e-5

    rates = {name: lr for name, (lr, _) in trained(User(4, 4)).items() if lr}
    assert rates == {"D": 1e-5, "kernel.log_dt": 1e-5, "kernel.log_A_real": 1e-3, "kernel.A_imag": 1e-3}

    class Misspelt(layers.S4D):
        hints = {"kernel.log_d": Hint(weight_decay=False)}  # noqa: RUF012

    with pytest.raises(ConfigError, match=r"Misspelt: hints name 'kernel.log_d', expected a parameter or a module of"):
        param_groups(Misspelt(4, 4))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_states_are_moved_cast_and_read_back(tmp_path):
    layer = layers.build("lru", 4)
    state = LinearRNNState(layer.init_state(2) + 1j, torch.arange(6.0).reshape(2, 3))
    assert state.shape == (2, 4)
    assert [leaf.dtype for _, leaf in states.leaves(states.to(state, dtype=torch.float64))] == [
        torch.complex128,
        torch.float64,
    ]
    assert [leaf.dtype for _, leaf in states.leaves(states.to(state, dtype=torch.float16))] == [
        torch.complex32,
        torch.float16,
    ]
    assert states.to(torch.tensor([1]), dtype=torch.float64).dtype == torch.int64
    assert all(leaf.device.type == "meta" for _, leaf in states.leaves(states.to(state, "meta")))
    with pytest.raises(ShapeError, match=r"index: i has shape \(\), expected \(n,\)"):
        states.index(state, torch.tensor(1))
    path = tmp_path / "s.safetensors"
    states.save(state, path)
    assert_same(states.load(path, states.index(state, [0])), state, rtol=0, atol=0)
    with pytest.raises(CheckpointError, match=r"holds .*, expected \['state'\]"):
        states.load(path, torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"state.conv in .* is torch.float32 \(2, 3\), expected .*\('B', 5\)"):
        states.load(path, LinearRNNState(state.recurrent, torch.zeros(2, 5)))
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CheckpointError, match="is damaged: its bytes do not fit its digest"):
        states.load(path, state)
    with pytest.raises(CheckpointError, match="cannot be read"):
        states.load(tmp_path / "absent", state)


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ShapeError, match=r"mask is torch.bool \(2, 3\), expected torch.bool \(2, 4\) because of x"):
        padded(make("lru"), inputs(2, 4), torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"^lru: forward got 'mask', .*; scanl.layers.padded\(layer, x, mask\) runs it"):
        make("lru")(inputs(2, 4), mask=torch.ones(2, 4, dtype=torch.bool))


@pytest.mark.parametrize("name", LAYERS)
def test_a_functional_call_computes_with_the_weights_that_it_gets(name):
    """As `torch.func` and replicas call a layer: its parameters are then plain tensors."""
    layer, x = make(name).eval(), inputs(1, 3)
    other = {key: value.detach() * 1.25 for key, value in layer.named_parameters()}
    found = torch.func.functional_call(layer, other, (x,))[0]
    with torch.no_grad():
        for key, value in layer.named_parameters():
            value.copy_(other[key])
    torch.testing.assert_close(found, layer(x)[0], rtol=0, atol=0)
