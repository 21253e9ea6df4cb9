"""Laws of `scanl.hub.accelerate` over torch's own recurrent modules: GRU, LSTM, RNN with tanh and with ReLU."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from scanl import hub, ops
from scanl.hub import patches

WIDTH, HIDDEN, BATCH, STEPS = 5, 6, 3, 7
KINDS = {
    "gru": nn.GRU,
    "lstm": nn.LSTM,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _every_call(monkeypatch):
    """Test the calls too that a patch leaves to torch because torch is as fast."""
    for patch in (patches.torch_rnn.TorchPatch, patches.torch_rnn.LSTMPatch):
        monkeypatch.setattr(patch, "pays", classmethod(lambda *args, **kwargs: True))


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def build(kind, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return KINDS[kind](WIDTH, HIDDEN, dtype=dtype, **options)


def states(module, *batch):
    """A first state in torch's form."""
    rows = module.num_layers * (2 if module.bidirectional else 1)
    h = draw(rows, *batch, module.hidden_size, dtype=module.weight_ih_l0.dtype)
    return (h, h.flip(0) / 2 + 1) if isinstance(module, nn.LSTM) else h


def tensors(value):
    """The floating tensors in a result or an argument."""
    if isinstance(value, PackedSequence):
        return [value.data]
    return [value] if isinstance(value, torch.Tensor) else [x for each in value or () for x in tensors(each)]


def run(module, x, hx=None):
    """The result, and every gradient of a fixed function of it: of parameters, input and first state."""
    x, hx = copy.deepcopy((x, hx))
    leaves = [*module.parameters(), *(leaf.requires_grad_() for leaf in tensors((x, hx)))]
    torch.manual_seed(5)
    found = module(x, hx)
    ys = tensors(found)
    return found, torch.autograd.grad(
        ys, leaves, [torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y) for y in ys]
    )


def same(found, wanted, **tolerance):
    """Results in the same form, and their gradients, are close."""
    for a, b in ((found[0], wanted[0]), (found[0][1], wanted[0][1])):
        assert type(a) is type(b)
    assert len(tensors(found)) == len(tensors(wanted))
    for a, b in zip(tensors(found), tensors(wanted), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def ops_called(monkeypatch):
    """The name of each op that a patch calls from now on."""
    called = []
    for name in ("gru", "lstm", "elman"):
        op = getattr(patches.torch_rnn, name)
        monkeypatch.setattr(patches.torch_rnn, name, lambda *a, op=op, **k: called.append(op.name) or op(*a, **k))
    return called


def whole_calls(monkeypatch):
    """Whether kernels computed the whole, for each call of a module from now on."""
    called, whole = [], patches.torch_rnn.TorchPatch.whole.__func__

    def recorded(cls, *args, **kwargs):
        result = whole(cls, *args, **kwargs)
        called.append(result is not None)
        return result

    monkeypatch.setattr(patches.torch_rnn.TorchPatch, "whole", classmethod(recorded))
    return called


def compare(monkeypatch, module, *args, **tolerance):
    """Patched, the module runs on the op, or by kernels in float32, with the same results and gradients."""
    wanted = run(module, *args)
    called, by_kernels = ops_called(monkeypatch), whole_calls(monkeypatch)
    report = hub.accelerate(module)
    same(run(module, *args), wanted, **tolerance)
    times = module.num_layers * (2 if module.bidirectional else 1)
    if module.weight_ih_l0.dtype is torch.float32 and isinstance(args[0], torch.Tensor):
        assert (called, by_kernels) == ([], [True])
    else:
        assert called == [report[0].now.split(",")[0]] * times


NEAR = {"rtol": 1e-4, "atol": 1e-5}
DTYPES = {torch.float64: {}, torch.float32: NEAR}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float64", "float32"])


@each_kind
@pytest.mark.parametrize("given", [False, True], ids=["zeros", "hx"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"batch_first": True},
        {"bidirectional": True},
        {"num_layers": 3},
        {"num_layers": 3, "bidirectional": True, "batch_first": True, "dropout": 0.5},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
class TestEqual:
    @each_dtype
    def test_batch(self, kind, options, given, dtype, monkeypatch):
        """With dropout too: the mask is torch's."""
        module = build(kind, dtype, **options)
        shape = (BATCH, STEPS) if module.batch_first else (STEPS, BATCH)
        x = draw(*shape, WIDTH, dtype=dtype)
        compare(monkeypatch, module, x, states(module, BATCH) if given else None, **DTYPES[dtype])

    @each_dtype
    def test_one_sequence(self, kind, options, given, dtype, monkeypatch):
        module = build(kind, dtype, **options).eval()
        x = draw(STEPS, WIDTH, dtype=dtype)
        compare(monkeypatch, module, x, states(module) if given else None, **DTYPES[dtype])

    @pytest.mark.parametrize("lengths", [(4, 2, 2), (2, 7, 1, 7)], ids=["sorted", "unsorted"])
    def test_packed(self, kind, options, given, lengths, monkeypatch):
        module = build(kind, **options)
        sequences = [draw(length, WIDTH) + row for row, length in enumerate(lengths)]
        x = pack_sequence(sequences, enforce_sorted=lengths == (4, 2, 2))
        compare(monkeypatch, module, x, states(module, len(lengths)) if given else None)


@each_kind
@pytest.mark.parametrize(
    ("batch", "steps", "inputs", "hidden"),
    [(1, 1, 20, 33), (17, 1, 8, 16), (3, 2, 64, 128), (33, 40, 7, 70), (1, 300, 17, 200), (5, 9, 100, 48)],
    ids=str,
)
@pytest.mark.parametrize("directions", [1, 2])
def test_sizes_past_each_block(kind, batch, steps, inputs, hidden, directions, monkeypatch):
    """Widths, batches and lengths beside those of a vector, of a tile, of a panel and of a chunk of steps."""
    torch.manual_seed(0)
    module = KINDS[kind](inputs, hidden, bidirectional=directions == 2, batch_first=batch % 2 == 0)
    x = draw(*((batch, steps) if module.batch_first else (steps, batch)), inputs, dtype=torch.float32)
    wide = copy.deepcopy(module).double()
    args, wanted = (x, states(module, batch)), []
    for each in (wide, module):
        each_args = copy.deepcopy(args) if each is module else (x.double(), states(wide, batch))
        found, gradients = run(each, *each_args)
        wanted.append([*tensors(found), *gradients])
    hub.accelerate(module)
    called = whole_calls(monkeypatch)
    found, gradients = run(module, *args)
    assert called == [True]
    for y, own, truth in zip([*tensors(found), *gradients], wanted[1], wanted[0], strict=True):
        error, most = ((each - truth).abs().max() for each in (y, own))
        rounding = torch.finfo(torch.float32).eps * (8 + (batch * steps) ** 0.5)  # sums over steps and rows grow by it
        assert error <= 2 * most + rounding * truth.abs().max()


@each_kind
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_have_rows_of_their_own(kind, threads, monkeypatch):
    """Units of work are directions and groups of rows, on as many threads as there are."""
    from scanl.ops._recurrent import layer

    torch.manual_seed(0)
    module = KINDS[kind](20, 18, bidirectional=True)
    args = draw(30, 13, 20, dtype=torch.float32), states(module, 13)
    wanted = run(module, *args)
    hub.accelerate(module)
    called = whole_calls(monkeypatch)
    monkeypatch.setattr(layer, "SHARED_WORK", 1)
    for where in (layer, patches.torch_rnn):
        monkeypatch.setattr(where, "threads", lambda: threads)
    layer.sizes_of.cache_clear()
    same(run(module, *args), wanted, **NEAR)
    layer.sizes_of.cache_clear()
    assert called == [kind != "lstm" or threads <= 6]


@each_kind
def test_gradient_of_a_gradient(kind):
    """By the op: a kernel has no second derivative."""
    module, found = build(kind, torch.float32, bidirectional=True), []
    wide = copy.deepcopy(module).double()
    hub.accelerate(module)
    for each in (wide, module):
        x = draw(STEPS, BATCH, WIDTH, dtype=each.weight_ih_l0.dtype).requires_grad_()
        (first,) = torch.autograd.grad(each(x)[0].square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [x, *each.parameters()]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a.float(), **NEAR)


@each_kind
def test_frozen_parts(kind):
    """Gradients of some tensors alone are those of all."""
    module = build(kind, torch.float32)
    hub.accelerate(module)
    x, hx = draw(STEPS, BATCH, WIDTH, dtype=torch.float32), states(module, BATCH)
    _, everything = run(module, x, hx)
    weights = list(module.parameters())
    leaves = [*weights, *(leaf.requires_grad_() for leaf in tensors((x, hx)))]
    for some in (leaves[:2], [leaves[-1]], [leaves[len(weights)]]):
        for leaf in leaves:
            leaf.requires_grad_(any(leaf is each for each in some))
        ys = tensors(module(x, hx))
        by = [torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y) for y in ys]
        for a, leaf in zip(torch.autograd.grad(ys, some, by), some, strict=True):
            at = next(n for n, each in enumerate(leaves) if each is leaf)
            torch.testing.assert_close(a, everything[at])


@each_kind
def test_restored_to_the_bit(kind):
    """The state dict keeps its names and values; the interface stays."""
    model = nn.Sequential(build(kind, num_layers=2))
    x, weights = draw(STEPS, BATCH, WIDTH), copy.deepcopy(model.state_dict())
    wanted = run(model[0], x)
    report = hub.accelerate(model)
    assert [(row.module, row.kind, bool(row.now)) for row in report] == [("0", type(model[0]).__name__, True)]
    twin = copy.deepcopy(model)
    assert list(model.state_dict()) == list(weights)
    twin.load_state_dict(model.state_dict())
    same(run(twin[0], x), wanted)
    for changed in (model, twin):
        hub.restore(changed)
        assert "forward" not in changed[0].__dict__
        assert all(map(torch.equal, tensors(run(changed[0], x)), tensors(wanted)))
        assert all(map(torch.equal, changed.state_dict().values(), weights.values()))


@each_kind
def test_dropout_of_everything(kind, monkeypatch):
    """p = 1 leaves only what the biases of the next layer give."""
    compare(monkeypatch, build(kind, num_layers=2, dropout=1.0), draw(STEPS, BATCH, WIDTH))


@each_kind
def test_output_lies_in_memory_as_torchs(kind):
    module = build(kind)
    hub.accelerate(module)
    assert module(draw(STEPS, BATCH, WIDTH))[0].is_contiguous()


@each_kind
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"bidirectional": True}, {"num_layers": 2}], ids=str)
@pytest.mark.parametrize("shape", [(STEPS, BATCH), (STEPS, 1), (1, BATCH), (STEPS,), "packed"], ids=str)
@each_dtype
def test_results_may_be_changed_in_place(kind, options, shape, dtype):
    """The outputs and the last states, as torch's own; its LSTM of oneDNN refuses, so that in float64 is the truth."""
    module = build(kind, dtype, **options)
    wide = copy.deepcopy(module).double()
    hub.accelerate(module)
    found = []
    for each in (module, wide):
        of = {"dtype": each.weight_ih_l0.dtype}
        packed = shape == "packed"
        x = pack_sequence([draw(4, WIDTH, **of), draw(2, WIDTH, **of)]) if packed else draw(*shape, WIDTH, **of)
        y, *last = tensors(each(x))
        ys = [torch.relu_(y), *(state.mul_(2) for state in last)]
        total = sum((y * torch.linspace(-1, 2, y.numel(), **of).view_as(y)).sum() for y in ys)
        found.append([total, *torch.autograd.grad(total, list(each.parameters()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b.to(dtype), **DTYPES[dtype])


def test_left_alone_with_a_reason():
    model = nn.ModuleList([nn.LSTM(WIDTH, HIDDEN, proj_size=2), nn.LSTM(WIDTH, HIDDEN)])
    report = hub.accelerate(model)
    assert [bool(row.now) for row in report] == [False, True]
    assert (report[0].module, report[0].kind) == ("0", "LSTM")
    assert report[0].note == "proj_size projects the state in each step, which no op does"
    assert "forward" not in model[0].__dict__

    class Own(nn.GRU):
        def forward(self, input, hx=None):
            return super().forward(input * 2, hx)

    report = hub.accelerate(Own(WIDTH, HIDDEN))
    assert [row.note for row in report] == ["its forward is Own's own"]


@each_kind
def test_other_calls_are_torchs(kind, monkeypatch):
    """Half precision, autocast, and what torch refuses: its own forward, with its own message."""
    module = build(kind, torch.float32)
    x = draw(STEPS, BATCH, WIDTH).float()
    calls = {
        "no steps": (module, (x[:0],)),
        "width": (module, (x[..., 1:],)),
        "axes": (module, (x[None],)),
        "state": (module, (x, states(module, BATCH + 1))),
        "dtype": (module, (x.double(),)),
        "half": (copy.deepcopy(module).bfloat16(), (x.bfloat16(),)),
        "autocast": (module, (x,)),  # which torch refuses for an LSTM where the processor lacks its instructions
    }
    called = ops_called(monkeypatch)
    for name, (made, args) in calls.items():
        found = []
        for change in (hub.restore, hub.accelerate):
            change(made)
            try:
                with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
                    found.append(tensors(made(*args)))
            except (RuntimeError, ValueError) as error:
                found.append(str(error))
        if isinstance(found[0], str):
            assert found[0] == found[1], name
        else:
            assert all(map(torch.equal, *found)), name
    assert not called
    by_kernels = whole_calls(monkeypatch)
    module(x)
    assert by_kernels == [True]


def test_lstm_only_where_torch_is_slower(monkeypatch):
    monkeypatch.undo()
    module, called = build("lstm"), ops_called(monkeypatch)
    hub.accelerate(module)
    module(draw(STEPS, BATCH, WIDTH))
    module(input=pack_sequence([draw(STEPS, WIDTH)]))
    assert not called
    module(input=pack_sequence([draw(STEPS, WIDTH)] * 2))
    assert called == ["lstm"]


@pytest.mark.parametrize(("kind", "op"), [("gru", "gru"), ("tanh", "elman"), ("lstm", "lstm")])
def test_short_calls_are_torchs_but_under_exact(monkeypatch, kind, op):
    monkeypatch.undo()
    module, own, called = build(kind, batch_first=True), build(kind, batch_first=True), ops_called(monkeypatch)
    report = hub.accelerate(module)
    short, long = draw(BATCH, 31, WIDTH), draw(BATCH, 40, WIDTH)
    for x in (short, short[0], pack_sequence([short[0]])):
        assert all(map(torch.equal, tensors(module(x)), tensors(own(x))))
    messages = []
    for each in (module, own):
        with pytest.raises((RuntimeError, ValueError)) as raised:
            each(draw(WIDTH))
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert not called
    if kind != "lstm":
        module(long)
        module(long[0])
        module(pack_sequence([long[0], short[0]]))
        assert called == 3 * [op]
        assert " steps on: packed sequences, float64" in report.explain()
    called.clear()
    with ops.exact(), torch.no_grad():
        module.float()(short.float())
    assert called == [op]
    assert "under exact" in report.explain()


def test_models_without_transformers_need_no_transformers(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0")
    assert hub.accelerate(nn.GRU(WIDTH, HIDDEN)).accelerated
