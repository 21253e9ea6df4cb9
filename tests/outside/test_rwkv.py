"""RWKV, AFT, sLSTM and the gated cells against programs that others wrote: outputs and every gradient."""

import importlib.util
import warnings
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scanl.layers import AFT, GRU, LSTM, RWKV4, RWKV6, RWKV7, SLSTM, Elman
from scanl.layers.channel.rwkv_channel_mix import RWKV4ChannelMix, RWKV6ChannelMix, RWKV7ChannelMix

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.cells_by_loop("name")]
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
    over = swapped(layer, monkeypatch, "scanl.layers.rwkv.rwkv6.linear_attention", theirs)
    agree((layer, lambda x: layer(x)[0]), (layer, over), torch.randn(B, T, DIM), 1e-5)


def test_rwkv7_over_the_recurrence_of_fla(fla, monkeypatch):
    def theirs(q, k, v, a, b, g, state, *, scale, cu_seqlens):
        assert state is cu_seqlens is None
        q, k, v, reads, writes, g = (part.transpose(1, 2) for part in (q * q.shape[3] ** 0.5, k, v, b, a, g))
        o, S = fla["rwkv7"](q, k, v, reads, writes, g)
        return o.transpose(1, 2), S

    layer = shaken(RWKV7(DIM, 4, 3, 4, 5, 6))
    over = swapped(layer, monkeypatch, "scanl.layers.rwkv.rwkv7.dplr_scan", theirs)
    agree((layer, lambda x: layer(x)[0]), (layer, over), torch.randn(B, T, DIM), 1e-5)


@pytest.mark.usefixtures("fla", "double")
@pytest.mark.parametrize("hidden", [9, 20])
@pytest.mark.parametrize("version", [6, 7])
def test_channel_mixes_are_those_of_fla(monkeypatch, version, hidden):
    """With their shift and their square said in torch: those they call are Triton kernels."""
    from fla.models.rwkv6 import modeling_rwkv6
    from fla.models.rwkv7 import modeling_rwkv7
    from fla.modules.token_shift import token_shift_ref

    renamed = {}
    if version == 6:
        monkeypatch.setattr(modeling_rwkv6, "token_shift", token_shift_ref)
        layer, theirs = RWKV6ChannelMix(DIM, hidden), modeling_rwkv6.RWKV6FeedForward(DIM, intermediate_size=hidden)
        renamed = {"time_maa_k": "key.mu", "time_maa_r": "receptance.mu"}
        renamed |= {f"{name}.weight": f"{name}.linear.weight" for name in ("key", "receptance")}
    else:
        monkeypatch.setattr(modeling_rwkv7, "token_shift", lambda x, *_, **__: (token_shift_ref(x), None))
        layer = RWKV7ChannelMix(DIM, hidden)
        theirs = modeling_rwkv7.RWKV7FeedForward(DIM, intermediate_size=hidden, layer_idx=0, num_hidden_layers=2)
    theirs.act_fn = lambda x: x.relu().square()
    layer = flat(shaken(layer))
    parameters = {renamed.get(name, name): part for name, part in layer.state_dict().items()}
    theirs.load_state_dict(parameters, strict=True)
    x = torch.randn(B, T, DIM)
    agree(
        (layer, lambda x: layer(x)[0]), (theirs, lambda x: theirs(x)[0]), x, 1e-9, lambda name: renamed.get(name, name)
    )


def flat(layer):
    """Vectors (1, 1, D) as (D), as fla has them."""
    for name, part in list(layer.named_parameters(recurse=False)):
        setattr(layer, name, nn.Parameter(part.detach().flatten()))
    return layer


@pytest.fixture
def program(monkeypatch):
    """The authors' own program, PyPI's rwkv; the environment decides which versions its module has."""
    pytest.importorskip("rwkv", reason="needs the extra `outside`")
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32  # it sets them for the whole process

    def load(version: int) -> ModuleType:
        for name, value in {"V7_ON": int(version == 7), "JIT_ON": int(version == 7), "CUDA_ON": 0}.items():
            monkeypatch.setenv(f"RWKV_{name}", str(value))
        spec = importlib.util.find_spec("rwkv.model")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before


def stored(layer):
    """The parameters as that program stores them: matrices turned, vectors (D)."""
    matrices = ("receptance", "key", "value", "gate", "output")
    return {
        name: part.t() if name.split(".")[0] in matrices else part.view(-1) if part.shape[:2] == (1, 1) else part
        for name, part in layer.named_parameters()
    }


def agree_with_authors(layer, ours, theirs):
    """theirs: a function of the parameters as stored and of one sequence (T, D), in float32."""
    agree(
        (layer, ours),
        (layer, lambda x: torch.stack([theirs(stored(layer), row) for row in x])),
        torch.randn(B, T, DIM),
        1e-5,
    )


@pytest.mark.parametrize("head_size", [4, 6])
def test_rwkv6_is_that_of_its_authors(program, head_size):
    """Their parts have the norm before and the residual in them."""
    model, heads = program(6).RWKV, DIM // head_size
    ones, zeros, unscaled = torch.ones(DIM), torch.zeros(DIM), [None] * 4

    def time_mix(p, x):
        return model.att_seq_v6_0(
            None, x, zeros, torch.zeros(heads, head_size, head_size), ones, zeros, p["ln_x.weight"], p["ln_x.bias"],
            *(p[f"time_maa_{name}"] for name in "xwkvrg"), p["time_maa_w1"], p["time_maa_w2"],
            p["time_decay_w1"], p["time_decay_w2"], p["time_decay"].view(heads, -1, 1), p["time_faaaa"][..., None],
            *(p[f"{name}.weight"] for name in ("key", "value", "receptance", "gate", "output")), *(5 * unscaled),
        )[0]  # fmt: skip

    def channel_mix(p, x):
        weights = (p[f"{name}.weight"] for name in ("key", "value", "receptance"))
        return model.ffn_seq_v6(
            None, x, zeros, ones, zeros, p["time_maa_k"], p["time_maa_r"], *weights, *(3 * unscaled)
        )[0]

    for layer, theirs in ((RWKV6(DIM, head_size, 3, 5), time_mix), (RWKV6ChannelMix(DIM, 20), channel_mix)):
        shaken(layer)
        agree_with_authors(layer, lambda x, layer=layer: x + layer(F.layer_norm(x, (DIM,)))[0], theirs)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("head_size", [4, 6])
def test_rwkv7_is_that_of_its_authors(program, depth, head_size):
    """Step by step: over a sequence their program writes where autograd reads."""
    theirs, heads = program(7), DIM // head_size
    layer = RWKV7(DIM, head_size, 3, 4, 5, 6)
    layer.enter_stack(depth, [layer, layer])
    shaken(layer)
    firsts = torch.randn(B, T, DIM)

    def ours(x):
        return layer(x, memo={"v_first": firsts} if depth else None)[0]

    def steps(p, x, first):
        before, state, ys = torch.zeros(DIM), torch.zeros(heads, head_size, head_size), []
        adapters = [p.get(f"{name}{i}", p["w0"]) for name in "wav" for i in range(3)]  # no v in the lowest layer
        for t in range(T):
            y, before, state, _ = theirs.RWKV_x070_TMix_one(
                depth, heads, head_size, x[t], before, first[t], state, *(p[f"x_{name}"] for name in "rwkvag"),
                *adapters, p["g1"], p["g2"], p["k_k"], p["k_a"], p["r_k"].view(-1),
                *(p[f"{name}.weight"] for name in ("receptance", "key", "value", "output")),
                p["ln_x.weight"], p["ln_x.bias"],
            )  # fmt: skip
            ys.append(y)
        return torch.stack(ys)

    def both(x):
        return torch.stack([steps(stored(layer), *rows) for rows in zip(x, firsts, strict=True)])

    agree((layer, ours), (layer, both), torch.randn(B, T, DIM), 1e-5)


@pytest.mark.parametrize("hidden", [9, 48])
def test_rwkv7_channel_mix_is_that_of_its_authors(program, hidden):
    mix = program(7).RWKV_x070_CMix_seq
    layer = shaken(RWKV7ChannelMix(DIM, hidden))

    def theirs(p, x):
        return mix(x, torch.zeros(DIM), p["x_k"], p["key.weight"], p["value.weight"])[0]

    agree_with_authors(layer, lambda x: layer(x)[0], theirs)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("hidden", [8, DIM])
@pytest.mark.parametrize("variant", ["simple", "full", "local"])
def test_aft_is_that_of_aft_pytorch(variant, hidden):
    """Theirs sees the future: for ours, w is -inf there, and the simple form is given what came before each step."""
    outside = pytest.importorskip("aft_pytorch", reason="needs the extra `outside`")
    layer = shaken(AFT(DIM, variant, hidden, 20, 4))
    theirs = (outside.AFTSimple if variant == "simple" else outside.AFTFull)(20, DIM, hidden)
    theirs.load_state_dict(layer.state_dict(), strict=True)

    def causal(x):
        if variant == "simple":
            return torch.cat([theirs(x[:, : t + 1])[:, -1:] for t in range(T)], 1)
        w = theirs.wbias if variant == "full" else theirs.wbias - theirs.wbias.tril(-4)
        past = torch.ones(20, 20, dtype=torch.bool).tril()
        return torch.func.functional_call(theirs, {"wbias": torch.where(past, w, -torch.inf)}, (x,))

    agree((layer, lambda x: layer(x)[0]), (theirs, causal), torch.randn(B, T, DIM), 1e-9)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("heads", "window"), [(3, 4), (3, 0), (1, 2), (12, 3)])
def test_slstm_is_that_of_xlstm(heads, window):
    outside = pytest.importorskip("xlstm", reason="needs xlstm, which is not in the extra `outside`")
    options = {"embedding_dim": DIM, "num_heads": heads, "conv1d_kernel_size": window, "backend": "vanilla"}
    theirs = outside.sLSTMLayer(outside.sLSTMLayerConfig(**options))
    layer = shaken(SLSTM(DIM, heads, window or None))
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
