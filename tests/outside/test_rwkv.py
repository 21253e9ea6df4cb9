"""RWKV, AFT, sLSTM and the gated cells against programs that others wrote: outputs and every gradient."""

import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn

from scanl.layers import AFT, GRU, LSTM, RWKV4, RWKV6, RWKV7, SLSTM, Elman
from scanl.layers.rwkv_channel_mix import RWKV4ChannelMix

pytestmark = pytest.mark.filterwarnings("ignore")
B, T, DIM = 2, 17, 12


def shaken(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def agree(ours, theirs, x, tolerance, names=lambda name: name):
    """Outputs of two functions of x, and the gradients of x and of every parameter; modules carry the same weights.

    ours, theirs: (module, function of x).   names: of a parameter of ours, in theirs.
    """
    results = []
    for module, function in (ours, theirs):
        given = x.clone().requires_grad_()
        y = function(given)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).cos().view(y.shape)
        parameters = dict(module.named_parameters())
        grads = torch.autograd.grad(y, [given, *parameters.values()], weights)
        results.append({"y": y, "x": grads[0], **dict(zip(parameters, grads[1:], strict=True))})
    mine, other = results
    assert {name if name in ("x", "y") else names(name) for name in mine} == other.keys()
    for name, value in mine.items():
        reference = other[name if name in ("x", "y") else names(name)]
        error = (value - reference).abs().max() / reference.abs().max().clamp(min=1e-3)
        assert error <= tolerance, f"{name}: {error}"


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def rwkv():
    pytest.importorskip("transformers", reason="needs the extra `outside`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import RwkvConfig
        from transformers.models.rwkv import modeling_rwkv
    return modeling_rwkv, RwkvConfig(
        hidden_size=DIM, attention_hidden_size=10, intermediate_size=20, num_hidden_layers=2, vocab_size=5
    )


@pytest.mark.parametrize("part", ["time", "channel"])
def test_rwkv4_is_that_of_transformers(rwkv, part):
    modeling, config = rwkv
    theirs = (modeling.RwkvSelfAttention if part == "time" else modeling.RwkvFeedForward)(config)
    ours = shaken(RWKV4(DIM, 10) if part == "time" else RWKV4ChannelMix(DIM, 20))
    theirs.load_state_dict(ours.state_dict(), strict=True)
    agree((ours, lambda x: ours(x)[0]), (theirs, lambda x: theirs(x)[0]), torch.randn(B, T, DIM), 1e-5)


@pytest.fixture
def fla():
    pytest.importorskip("fla", reason="needs the extra `outside`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of a missing GPU
        from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
        from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6
    return {"rwkv6": naive_recurrent_rwkv6, "rwkv7": dplr_recurrence}


def swapped(layer, monkeypatch, place, op):
    """The layer as a function of x, with the op it calls replaced by one of another library."""

    def run(x):
        with monkeypatch.context() as patch:
            patch.setattr(place, op)
            return layer(x)[0]

    return run


def test_rwkv6_over_the_recurrence_of_fla(fla, monkeypatch):
    def theirs(q, k, v, g, gv, u, state, *, scale, cu_seqlens):
        assert gv is state is cu_seqlens is None
        q, k, v, g = (part.transpose(1, 2) for part in (q, k, v, g))
        o, S = fla["rwkv6"](q, k, v, g, u, scale=scale, output_final_state=True)
        return o.transpose(1, 2), S

    layer = shaken(RWKV6(DIM, 4, 3, 5))
    over = swapped(layer, monkeypatch, "scanl.layers.rwkv6.linear_attention", theirs)
    agree((layer, lambda x: layer(x)[0]), (layer, over), torch.randn(B, T, DIM), 1e-5)


def test_rwkv7_over_the_recurrence_of_fla(fla, monkeypatch):
    def theirs(q, k, v, a, b, g, state, *, scale, cu_seqlens):
        assert state is cu_seqlens is None
        q, k, v, reads, writes, g = (part.transpose(1, 2) for part in (q * q.shape[3] ** 0.5, k, v, b, a, g))
        o, S = fla["rwkv7"](q, k, v, reads, writes, g)
        return o.transpose(1, 2), S

    layer = shaken(RWKV7(DIM, 4, 3, 4, 5, 6))
    over = swapped(layer, monkeypatch, "scanl.layers.rwkv7.dplr_scan", theirs)
    agree((layer, lambda x: layer(x)[0]), (layer, over), torch.randn(B, T, DIM), 1e-5)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("variant", ["simple", "full", "local"])
def test_aft_is_that_of_aft_pytorch(variant):
    """Theirs sees the future: for ours, w is -inf there, and the simple form is compared at the last step."""
    outside = pytest.importorskip("aft_pytorch", reason="needs aft-pytorch from PyPI")
    layer = shaken(AFT(DIM, variant, 8, 20, 4))
    theirs = (outside.AFTSimple if variant == "simple" else outside.AFTFull)(20, DIM, 8)
    theirs.load_state_dict(layer.state_dict(), strict=True)

    def causal(x):
        if variant == "simple":
            return theirs(x)[:, -1]
        w = theirs.wbias if variant == "full" else theirs.wbias - theirs.wbias.tril(-4)
        past = torch.ones(20, 20, dtype=torch.bool).tril()
        return torch.func.functional_call(theirs, {"wbias": torch.where(past, w, -torch.inf)}, (x,))

    last = -1 if variant == "simple" else slice(None)
    agree((layer, lambda x: layer(x)[0][:, last]), (theirs, causal), torch.randn(B, T, DIM), 1e-9)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("window", [4, 0])
def test_slstm_is_that_of_xlstm(window):
    outside = pytest.importorskip("xlstm", reason="needs xlstm from PyPI")
    options = {"embedding_dim": DIM, "num_heads": 3, "conv1d_kernel_size": window, "backend": "vanilla"}
    theirs = outside.sLSTMLayer(outside.sLSTMLayerConfig(**options))
    layer = shaken(SLSTM(DIM, 3, window))
    theirs.load_state_dict(layer.state_dict(), strict=True)
    agree((layer, lambda x: layer(x)[0]), (theirs, theirs), torch.randn(B, T, DIM), 1e-9)


CELLS = {
    "elman": (lambda: Elman(DIM), lambda: nn.RNN(DIM, DIM, batch_first=True)),
    "elman_relu": (lambda: Elman(DIM, "relu"), lambda: nn.RNN(DIM, DIM, nonlinearity="relu", batch_first=True)),
    "lstm": (lambda: LSTM(DIM), lambda: nn.LSTM(DIM, DIM, batch_first=True)),
    "gru": (lambda: GRU(DIM), lambda: nn.GRU(DIM, DIM, batch_first=True)),
    "gru_without_bias": (lambda: GRU(DIM, bias=False), lambda: nn.GRU(DIM, DIM, bias=False, batch_first=True)),
}


def cells(name):
    ours, theirs = (make() for make in CELLS[name])
    theirs.load_state_dict(shaken(ours).state_dict(), strict=True)
    return ours, theirs


def last_of(state):
    return torch.cat(list(state), -1) if isinstance(state, tuple) else state


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", CELLS)
def test_cells_are_those_of_torch(name):
    ours, theirs = cells(name)
    x = torch.randn(B, T, DIM)
    agree((ours, lambda x: ours(x)[0]), (theirs, lambda x: theirs(x)[0]), x, 1e-9)
    agree((ours, lambda x: last_of(ours(x)[1])), (theirs, lambda x: last_of(theirs(x)[1])[0]), x, 1e-9)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", CELLS)
def test_packed_cells_are_those_of_torch(name):
    """Lengths 4, 9, 1 and 3, not sorted."""
    ours, theirs = cells(name)
    cuts = [0, 4, 13, 14, 17]

    def outputs(x):
        return ours(x, cu_seqlens=torch.tensor(cuts))[0]

    def packed(x):
        pieces = [x[0, start:end] for start, end in pairwise(cuts)]
        unpacked = nn.utils.rnn.unpack_sequence(theirs(nn.utils.rnn.pack_sequence(pieces, enforce_sorted=False))[0])
        return torch.cat(unpacked)[None]

    agree((ours, outputs), (theirs, packed), torch.randn(1, T, DIM), 1e-9)
