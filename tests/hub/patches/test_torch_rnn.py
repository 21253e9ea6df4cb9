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


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def build(kind, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return KINDS[kind](WIDTH, HIDDEN, dtype=dtype, **options)


def states(module, *batch):
    """A first state in torch's form."""
    h = draw(module.num_layers * (2 if module.bidirectional else 1), *batch, HIDDEN)
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


def compare(monkeypatch, module, *args, **tolerance):
    """Patched, the module runs on the op, with the same results and gradients."""
    wanted = run(module, *args)
    called = ops_called(monkeypatch)
    report = hub.accelerate(module)
    same(run(module, *args), wanted, **tolerance)
    assert called == [report[0].now.split(",")[0]] * module.num_layers * (2 if module.bidirectional else 1)


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
    def test_batch(self, kind, options, given, monkeypatch):
        """With dropout too: the mask is torch's."""
        module = build(kind, **options)
        shape = (BATCH, STEPS) if module.batch_first else (STEPS, BATCH)
        compare(monkeypatch, module, draw(*shape, WIDTH), states(module, BATCH) if given else None)

    def test_one_sequence(self, kind, options, given, monkeypatch):
        module = build(kind, **options).eval()
        compare(monkeypatch, module, draw(STEPS, WIDTH), states(module) if given else None)

    @pytest.mark.parametrize("lengths", [(4, 2, 2), (2, 7, 1, 7)], ids=["sorted", "unsorted"])
    def test_packed(self, kind, options, given, lengths, monkeypatch):
        module = build(kind, **options)
        sequences = [draw(length, WIDTH) + row for row, length in enumerate(lengths)]
        x = pack_sequence(sequences, enforce_sorted=lengths == (4, 2, 2))
        compare(monkeypatch, module, x, states(module, len(lengths)) if given else None)


@each_kind
def test_float32(kind, monkeypatch):
    module = build(kind, torch.float32, num_layers=2, bidirectional=True)
    compare(monkeypatch, module, draw(STEPS, BATCH, WIDTH).float(), rtol=1e-4, atol=1e-5)


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
def test_results_may_be_changed_in_place(kind, options, shape):
    """As torch's own: the outputs and the last states."""
    module = build(kind, **options)
    x = pack_sequence([draw(4, WIDTH), draw(2, WIDTH)]) if shape == "packed" else draw(*shape, WIDTH)
    found = []
    for change in (hub.restore, hub.accelerate):
        change(module)
        y, *last = tensors(module(x))
        ys = [torch.relu_(y), *(each.mul_(2) for each in last)]
        total = sum((each * torch.linspace(-1, 2, each.numel(), dtype=each.dtype).view_as(each)).sum() for each in ys)
        found.append([total, *torch.autograd.grad(total, list(module.parameters()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


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
    module(x)
    assert called


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
        assert " steps on, and under exact" in report.explain()
    called.clear()
    with ops.exact(), torch.no_grad():
        module.float()(short.float())
    assert called == [op]
    assert "under exact" in report.explain()


def test_models_without_transformers_need_no_transformers(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0")
    assert hub.accelerate(nn.GRU(WIDTH, HIDDEN)).accelerated
