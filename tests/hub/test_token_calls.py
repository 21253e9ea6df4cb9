"""Calls of accelerated models for one token: kernels give the numbers of the patched forwards, and notice changes."""

import copy
import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'scanl[hub]'")

from transformers import DynamicCache

from hub_models import CASES, VOCAB
from scanl import hub
from scanl.hub import key_buffers, token_calls

COVERS = ["hub/cached_tensors", "hub/key_buffers"]

PROMPT, STEPS = 6, 10
KERNELS = {  # what is one kernel
    "mamba": ["MambaForCausalLM"],
    "mamba2": ["Mamba2ForCausalLM"],
    "xlstm": ["xLSTMForCausalLM"],
    "rwkv": ["RwkvForCausalLM"],
    "recurrent_gemma": ["RecurrentGemmaForCausalLM"],
    "qwen3_next": ["Qwen3NextForCausalLM"],
    "jamba": ["JambaMambaDecoderLayer"],
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(token_calls, "MIN_TOKENS", 0)


@pytest.fixture
def ordinary(monkeypatch):
    """Numbers without kernels."""

    def run(function, *args, **kwargs):
        with monkeypatch.context() as context:
            context.setattr(token_calls.TokenCalls, "_pays", lambda *_: False)
            return function(*args, **kwargs)

    return run


def tokens(batch=1, steps=STEPS):
    return torch.randint(1, VOCAB, (batch, steps), generator=torch.Generator().manual_seed(1))


class Reader:
    """A text that a model reads in pieces."""

    def __init__(self, model):
        names = inspect.signature(type(model).forward).parameters
        self.model, self.places, self.read = model, "position_ids" in names, 0
        self.name = next(name for name in ("cache_params", "past_key_values", "state") if name in names)
        self.cache = DynamicCache(config=model.config) if self.name == "past_key_values" else None

    @torch.no_grad()
    def __call__(self, ids, **options):
        begin, self.read = self.read, self.read + ids.shape[1]
        if self.places:
            options["position_ids"] = torch.arange(begin, self.read)[None]
        out = self.model(ids, **{self.name: self.cache}, use_cache=True, **options)
        self.cache = getattr(out, self.name, self.cache)
        return out.logits

    def token_by_token(self, ids):
        pieces = [self(ids[:, :PROMPT]), *(self(ids[:, at : at + 1]) for at in range(PROMPT, ids.shape[1]))]
        return torch.cat(pieces, 1)


def logits(model, ids):
    return Reader(model).token_by_token(ids)


def kernels(model):
    """The classes that run as kernels."""
    calls = vars(model)["_scanl_forward"].args[2]
    return [line.removeprefix("one kernel runs a ") for line in calls.explain() if line.startswith("one kernel runs")]


def close(found, wanted):
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.fixture
def mamba():
    model = CASES["mamba"].build()
    hub.accelerate(model)
    return model


@pytest.mark.parametrize("name", KERNELS)
def test_numbers(name, ordinary):
    """A kernel has two rows; the third one needs a second run of it, which begins early."""
    model = CASES[name].build()
    report = hub.accelerate(model)
    for batch in (1, 3):
        close(logits(model, tokens(batch)), ordinary(logits, model, tokens(batch)))
    assert kernels(model) == KERNELS[name]
    assert f"one kernel runs a {KERNELS[name][0]}" in report.explain()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mamba", {"do_sample": True}),
        ("mamba", {"num_beams": 2}),
        ("qwen3_next", {"num_beams": 2}),
        ("recurrent_gemma", {"do_sample": False}),
    ],
)
def test_generate(name, options, ordinary):
    """Left padding, beams, sampling."""
    model, mask = CASES[name].build(), torch.ones(2, PROMPT, dtype=torch.long)
    mask[0, :2] = 0
    hub.accelerate(model)

    def text():
        torch.manual_seed(0)
        return model.generate(
            tokens(2, PROMPT), attention_mask=mask, max_new_tokens=8, min_new_tokens=8, pad_token_id=0, **options
        )

    assert torch.equal(text(), ordinary(text))
    assert kernels(model) == KERNELS[name]


def test_long_texts(monkeypatch, ordinary):
    """Keys outgrow their buffers, leave the window of attention, and go on in the patched forward."""
    monkeypatch.setattr(key_buffers, "SPARE_SLOTS", 2)
    wide = CASES["recurrent_gemma"].build()
    wide.config.attention_window_size = 11
    torch.manual_seed(0)
    model = type(wide)(wide.config).eval()
    assert any(getattr(layer, "sliding_window", 0) == 11 for layer in DynamicCache(config=model.config).layers)
    hub.accelerate(model)
    whole = ordinary(logits, model, tokens(1, 24))
    close(logits(model, tokens(1, 24)), whole)

    def text():
        reader = Reader(model)
        pieces = [reader(piece) for piece in tokens(1, 24).split([PROMPT, 1, 1, 3, 1, 1, 11], 1)]
        return torch.cat(pieces, 1)

    close(text(), whole)


class Added(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.more = inner, nn.Linear(inner.in_features, inner.out_features)

    def forward(self, x):
        return self.inner(x) + self.more(x)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def _in_place(model):
    model.backbone.layers[0].mixer.in_proj.weight.data.mul_(0.5)


def _replaced(model):
    mixer = model.backbone.layers[1].mixer
    mixer.out_proj.weight = nn.Parameter(2 * mixer.out_proj.weight)


def _adapter(model):
    torch.manual_seed(2)
    model.backbone.layers[0].mixer.x_proj = Added(model.backbone.layers[0].mixer.x_proj)


def _parametrized(model):
    parametrize.register_parametrization(model.backbone.layers[0].mixer.in_proj, "weight", Doubled())


def _hook(model):
    model.backbone.layers[0].mixer.in_proj.register_forward_hook(lambda module, args, y: y + 1)


def _number(model):
    model.backbone.norm_f.variance_epsilon = 0.5


def _data(model):
    model.lm_head.weight.data = torch.randn_like(model.lm_head.weight)


CHANGES = [_in_place, _replaced, _adapter, _parametrized, _hook, _number, _data]


@pytest.mark.parametrize("change", CHANGES)
def test_changes(change, mamba, ordinary):
    before = logits(mamba, tokens())
    with torch.no_grad():
        change(mamba)
    after = logits(mamba, tokens())
    assert not torch.allclose(after, before, rtol=1e-3)
    close(after, ordinary(logits, mamba, tokens()))


def test_restored(mamba):
    logits(mamba, tokens())
    hub.restore(mamba)
    wanted = logits(CASES["mamba"].build(), tokens())
    assert torch.equal(logits(mamba, tokens()), wanted)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(copied, mamba, ordinary):
    """A copy computes with its own weights."""
    logits(mamba, tokens())
    other = copied(mamba)
    other.lm_head = nn.Linear(32, VOCAB, bias=False)
    close(logits(other, tokens()), ordinary(logits, other, tokens()))
    close(logits(mamba, tokens()), ordinary(logits, mamba, tokens()))


def test_exact(ordinary):
    """Bits are kept: no kernel runs."""
    model = CASES["mamba"].build()
    hub.accelerate(model, exact=True)
    ids = tokens()
    with torch.no_grad():
        assert torch.equal(logits(model, ids), model(ids).logits)


def test_gradients(mamba):
    """Where gradients are wanted, the patched forward runs."""
    reader = Reader(mamba)
    reader(tokens())
    mamba(tokens(1, 1), cache_params=reader.cache).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in mamba.parameters())


def test_padding(mamba, ordinary):
    """A token that is padding leaves the state as it is."""
    mask = torch.tensor([[1] * PROMPT + [0], [1] * (PROMPT + 1)])

    def text():
        reader = Reader(mamba)
        reader(tokens(2)[:, :PROMPT])
        reader(tokens(2)[:, PROMPT : PROMPT + 1], attention_mask=mask)
        return reader(tokens(2)[:, -1:])

    close(text(), ordinary(text))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype, mamba, ordinary):
    """Another dtype gets another kernel, or none."""
    logits(mamba, tokens())
    mamba.to(dtype)
    close(logits(mamba, tokens()), ordinary(logits, mamba, tokens()))  # norms compute in float32
    assert kernels(mamba) == (["MambaForCausalLM"] if dtype == torch.float64 else [])


def test_threads(mamba):
    ids = [torch.randint(1, VOCAB, (1, STEPS)) for _ in range(8)]
    wanted = [logits(mamba, each) for each in ids]
    with ThreadPoolExecutor(4) as pool:
        for found, each in zip(pool.map(lambda each: logits(mamba, each), ids), wanted, strict=True):
            assert torch.equal(found, each)


def test_outputs(mamba, ordinary):
    """Hidden states and tuples are as the model returns them."""
    reader = Reader(mamba)
    reader(tokens())

    @torch.no_grad()
    def out(**options):
        cache = copy.deepcopy(reader.cache)
        return mamba(tokens(1, 1), cache_params=cache, use_cache=True, **options), cache

    (found, cache), (wanted, _) = out(output_hidden_states=True), ordinary(out, output_hidden_states=True)
    assert type(found) is type(wanted)
    assert found.keys() == wanted.keys()
    assert found.cache_params is cache
    close(torch.stack(found.hidden_states), torch.stack(wanted.hidden_states))
    (found, cache), (wanted, _) = out(return_dict=False), ordinary(out, return_dict=False)
    close(found[0], wanted[0])
    assert found[1] is cache
    assert len(found) == len(wanted)


def test_quantized(ordinary):
    """Weights of whole numbers are read as they are."""
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=VOCAB)).eval()
    hub.accelerate(model)
    hub.quantize(model)
    close(logits(model, tokens()), ordinary(logits, model, tokens()))
    assert kernels(model) == ["MambaForCausalLM"]
