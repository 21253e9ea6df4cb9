"""Copies of accelerated modules, deep, shallow, pickled or as replicas, compute with their own weights."""

import copy
import functools
import inspect
import io
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'scanl[hub]'")

from hub_models import CASES
from scanl import hub
from tests.hub.test_accelerate import KINDS, close, padding, tokens

pytestmark = pytest.mark.cells_by_loop("name")

RNNS = {
    "gru": lambda: nn.GRU(5, 6, num_layers=2, bidirectional=True, batch_first=True),
    "tanh": lambda: nn.RNN(5, 6, batch_first=True),
    "lstm": lambda: nn.LSTM(5, 6, batch_first=True),
}
each_model = pytest.mark.parametrize("name", [*RNNS, *KINDS])


def build(name):
    torch.manual_seed(0)
    return RNNS[name]() if name in RNNS else CASES[name].build()


def run(model):
    """What the model gives: for a batch with padding where it takes one, for packed sequences where it takes them."""
    with torch.no_grad():
        if not isinstance(model, nn.RNNBase):
            return model(tokens(), attention_mask=padding(left=False), use_cache=False).logits[:, :8]
        x = torch.randn(3, 40, 5, generator=torch.Generator().manual_seed(1))
        return model(nn.utils.rnn.pack_sequence([*x]))[0].data


def with_weights(model, weights):
    twin = copy.deepcopy(model)
    twin.load_state_dict(weights)
    return twin


def other_weights(model):
    """Weights off those of the model; where it ties two, both are the same."""
    generator, twin = torch.Generator().manual_seed(2), copy.deepcopy(model)
    for parameter in twin.parameters():
        if parameter.is_floating_point():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return twin.state_dict()


def shallow(module, copied, memo=None):
    """The module over its own tables of parameters, buffers and parts, each copied as `copied` copies a module."""
    memo = {} if memo is None else memo
    if module not in memo:
        memo[module] = twin = copied(module)
        for table in ("_parameters", "_buffers", "_modules"):
            twin.__dict__[table] = dict(module.__dict__[table])
        for name, part in module._modules.items():
            twin._modules[name] = None if part is None else shallow(part, copied, memo)
    return memo[module]


def blank(module):
    twin = type(module).__new__(type(module))
    twin.__dict__.update(module.__dict__)
    return twin


@functools.cache
def built(name):
    """A model, other weights of it, and what the model gives with its own and with those."""
    model = build(name)
    weights = other_weights(model)
    return model, weights, run(model), run(with_weights(model, weights))


@each_model
def test_shallow_copies(name):
    """By copy.copy, as DataParallel makes its replicas, and by hand."""
    model, weights, own, other = copy.deepcopy(built(name))
    parameters = {place for place, _ in model.named_parameters(remove_duplicate=False)}
    hub.accelerate(model)
    for copied in (copy.copy, blank, lambda module: module._replicate_for_data_parallel()):
        twin = shallow(model, copied)
        for place, value in weights.items():
            if place in parameters:
                owner, _, leaf = place.rpartition(".")
                setattr(twin.get_submodule(owner), leaf, nn.Parameter(value))
        close(run(twin), other)
        close(run(model), own)
    twin = shallow(model, copy.copy)
    hub.restore(twin)
    assert torch.equal(run(twin), own)
    close(run(model), own)
    assert hub.accelerate(model).accelerated


@each_model
def test_other_weights(name):
    """Weights that are loaded, swapped for a call, assigned, or cast."""
    model, weights, own, other = copy.deepcopy(built(name))
    hub.accelerate(model)

    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self):
            return run(self.model)

    swapped = {f"model.{place}": weights[place] for place, _ in model.named_parameters()}
    close(torch.func.functional_call(Called(), swapped, ()), other)
    close(run(model), own)
    close(run(with_weights(model, weights)), other)
    before = copy.deepcopy(model.state_dict())
    model.load_state_dict(weights, assign=True)
    close(run(model), other)
    model.load_state_dict(before)
    close(run(model), own)


@each_model
def test_pickles(name):
    model, _, own, _ = copy.deepcopy(built(name))
    hub.accelerate(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model, 0)), copy.deepcopy(model)):
        assert [type(module).__name__ for module in twin.modules()] == [type(m).__name__ for m in model.modules()]
        close(run(twin), own)
        report = hub.accelerate(twin)
        assert report == hub.accelerate(model)
        hub.restore(twin)
        assert torch.equal(run(twin), own)
    close(run(model), own)


class Scaled(nn.Module):
    def forward(self, value):
        return 0.9 * value


@pytest.mark.parametrize("name", ["gru", "tanh", "lstm", "mamba", "rwkv", "recurrent_gemma"])
@pytest.mark.parametrize("first", ["accelerated", "parametrized"])
def test_parametrizations(name, first):
    """Put on before or after, twice, and taken off in any order: the class of the module is the one it was."""

    def parametrized(model):
        for module in list(model.modules()):
            for place in [place for place, p in module.named_parameters(recurse=False) if p.is_floating_point()][:2]:
                parametrize.register_parametrization(module, place, Scaled())
        return model

    model = build(name)
    kinds, own, wanted = [type(module) for module in model.modules()], run(model), run(parametrized(build(name)))
    assert (wanted - own).abs().max() > 1e-3 * own.abs().max()
    if first == "accelerated":
        hub.accelerate(model)
    parametrized(model)
    hub.accelerate(model)
    close(run(model), wanted)
    close(run(copy.deepcopy(model)), wanted)
    hub.restore(model)
    assert torch.equal(run(model), run(model))
    close(run(model), wanted)
    report = hub.accelerate(model)
    assert report.accelerated
    for module in list(model.modules()):
        if parametrize.is_parametrized(module):
            for place in list(module.parametrizations):
                parametrize.remove_parametrizations(module, place, leave_parametrized=False)
    close(run(model), own)
    hub.restore(model)
    assert torch.equal(run(model), own)
    assert [type(module) for module in model.modules()] == kinds


def test_a_parametrization_is_computed_with_its_own_weights_in_a_backward_pass():
    x = torch.randn(3, 7, 5)
    found = []
    for change in (lambda module: None, hub.accelerate):
        torch.manual_seed(0)
        module = nn.GRU(5, 6)
        parametrizations.weight_norm(module, "weight_hh_l0")
        change(module)
        module(x)[0].square().sum().backward()
        found.append([p.grad for p in module.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_tied_weights():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.GRU(6, 6), nn.GRU(6, 6)])
    model[1].weight_hh_l0 = model[0].weight_hh_l0
    x = torch.randn(7, 3, 6)

    def gradient():
        model.zero_grad()
        y = model[1](model[0](x)[0])[0]
        y.square().sum().backward()
        return y, model[0].weight_hh_l0.grad.clone()

    wanted = gradient()
    hub.accelerate(model)
    for found, expected in zip(gradient(), wanted, strict=True):
        torch.testing.assert_close(found, expected)
    with torch.no_grad():
        model[0].weight_hh_l0.mul_(0.5)
    accelerated = gradient()
    hub.restore(model)
    for found, expected in zip(accelerated, gradient(), strict=True):
        torch.testing.assert_close(found, expected)


def test_cast():
    torch.manual_seed(0)
    module, x = nn.GRU(5, 6), torch.randn(7, 3, 5, dtype=torch.float64)
    wanted = copy.deepcopy(module).double()(x)
    hub.accelerate(module)
    torch.testing.assert_close(module.double()(x), wanted)


class Hook:
    def pre_forward(self, module, *args, **kwargs):
        return args, kwargs

    def post_forward(self, module, output):
        return output


def hooked(module):
    """What libraries for offloading do to a module."""
    module._hf_hook = Hook()
    module._old_forward = module.forward

    def forward(module, *args, **kwargs):
        module.seen = True
        return module._old_forward(*args, **kwargs)

    module.forward = functools.update_wrapper(functools.partial(forward, module), module._old_forward)


def unhooked(module):
    module.forward = module._old_forward
    del module._old_forward, module._hf_hook


@pytest.mark.parametrize("name", ["gru", "mamba", "rwkv"])
@pytest.mark.parametrize(
    "steps",
    [
        "hook accelerate restore unhook",
        "hook accelerate unhook restore",
        "hook unhook accelerate restore",
        "accelerate hook restore unhook",
        "accelerate hook unhook restore",
        "accelerate hook restore accelerate unhook restore",
    ],
)
def test_hooks_for_offloading(name, steps, monkeypatch):
    """In every order the hooks run, the patches run while the model is accelerated, and then the original does."""
    patched, module = [], sys.modules["scanl.hub.accelerate"]  # scanl.hub.accelerate is the function
    change = module._forward
    monkeypatch.setattr(module, "_forward", lambda *a, **k: patched.append(a[1]) or change(*a, **k))
    model = build(name)
    own, modules = run(model), list(model.modules())
    signatures = [inspect.signature(module.forward) for module in modules]
    accelerated = False
    for step in steps.split():
        if step in ("hook", "unhook"):
            for module in modules:
                (hooked if step == "hook" else unhooked)(module)
        else:
            getattr(hub, step)(model)
            accelerated = step == "accelerate"
        patched.clear()
        for module in modules:
            module.__dict__.pop("seen", None)
        close(run(model), own)
        assert bool(patched) == accelerated
        assert hasattr(model, "seen") == hasattr(model, "_hf_hook")
        assert [inspect.signature(module.forward) for module in modules] == signatures
    assert torch.equal(run(model), own)
    assert not any("_scanl_forward" in module.__dict__ for module in modules)


def test_a_forward_wrapped_by_another_library_keeps_the_padding():
    """As for mixed precision: the attribute `forward` of the outer model is another function, before or after."""
    model = build("rwkv")
    twin = copy.deepcopy(model)
    hub.accelerate(twin)
    wanted = run(twin)
    for order in ("wrap accelerate", "accelerate wrap"):
        model = build("rwkv")
        for step in order.split():
            if step == "accelerate":
                hub.accelerate(model)
            else:
                model.forward = functools.partial(lambda before, *a, **k: before(*a, **k), model.forward)
        with torch.no_grad():
            left = model(tokens(), attention_mask=padding()).logits
            assert torch.equal(left, twin(tokens(), attention_mask=padding()).logits)
        assert torch.equal(run(model), wanted)
        hub.restore(model)
        assert isinstance(model.__dict__["forward"], functools.partial)
        assert model.forward.func.__name__ == "<lambda>"
        assert torch.equal(run(model), run(build("rwkv")))
