"""Hooks, adapters, pruning and quantization of the modules inside of a layer: each has its effect or is refused.

A layer calls a module, or it declares in `reads` that it reads the module's weights instead.
"""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize, prune, spectral_norm, weight_norm

from scanl import layers
from scanl.cli.layers import describe
from scanl.errors import ConfigError
from scanl.layers import CfC, CfCNCP
from scanl.layers.base import Layer
from scanl.models import LanguageModel, Stack
from tests.test_layers import CASES, DIM, REGISTERED, inputs, make

COVERS = ["layers/adapters"]

pytestmark = pytest.mark.cells_by_loop("name")

OPTIONS = {  # with modules that the samples do not have
    "cfc_deep": lambda: CfC(DIM, 10, hidden_dim=8, depth=2, mixed_memory=True),
    "cfc_without_backbone": lambda: CfC(DIM, depth=0),
    "cfc_ncp_with_memory": lambda: CfCNCP(DIM, mixed_memory=True),
    "ligru_in_training": lambda: layers.build("ligru", DIM),
    "mamba_without_conv_bias": lambda: layers.build("mamba", DIM, conv_bias=False),
}
OTHERS = [name for name in CASES if name.startswith(("mixer_", "short_convolution", "bidirectional_"))]
LAYERS = [*REGISTERED, *OTHERS, *OPTIONS]


class Added(nn.Module):
    """What a low-rank adapter adds to a weight."""

    def __init__(self, weight, seed):
        super().__init__()
        draws = torch.Generator().manual_seed(seed)
        self.A = nn.Parameter(torch.randn(weight[0].numel(), 2, generator=draws).to(weight) / 4)
        self.B = nn.Parameter(torch.randn(2, weight.shape[0], generator=draws).to(weight) / 4)

    def forward(self, weight):
        return weight + (self.A @ self.B).T.view_as(weight)


class Adapter(nn.Module):
    """What the map inside returns, plus x A B. Nothing of the map can be read past it."""

    def __init__(self, base, seed):
        super().__init__()
        self.base, self.added = base, Added(base.weight, seed)

    def forward(self, x):
        if isinstance(self.base, nn.Conv1d):
            weight = (self.added.A @ self.added.B).T.view_as(self.base.weight)
            return self.base(x) + F.conv1d(x, weight, stride=self.base.stride)
        return self.base(x) + x @ self.added.A @ self.added.B


class Wrapper(nn.Module):
    """Any module, called through another."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, *args):
        return self.base(*args)


def made(name, dtype=torch.float64):
    if name in CASES:
        return make(name, dtype)
    torch.manual_seed(0)
    return OPTIONS[name]().to(dtype)


def inner(layer, kinds=(nn.Linear, nn.Conv1d)):
    return [(path, module) for path, module in layer.named_modules() if path and isinstance(module, kinds)]


def with_weights(layer):
    """Return the modules of torch that have parameters and can be called, by path."""
    of_torch = ((path, module) for path, module in inner(layer, nn.Module) if type(module).__module__[:6] == "torch.")
    callable_ones = ((path, module) for path, module in of_torch if type(module).forward is not nn.Module.forward)
    return {path: module for path, module in callable_ones if any(p is not None for p in module._parameters.values())}


def read(layer):
    """Return the paths of the modules whose weights the layer declares that it reads."""
    inside = {module for path in layer.read_paths() for module in layer.get_submodule(path).modules()}
    return [path for path, module in with_weights(layer).items() if module in inside]


def put(layer, path, module):
    parent, _, name = path.rpartition(".")
    layer.get_submodule(parent)._modules[name] = module


def run(layer):
    torch.manual_seed(3)  # some layers draw noise
    return layer(inputs(2, 3, dtype=next(layer.parameters()).dtype))[0]


def step(layer):
    state = layer.init_state(2)
    for x in inputs(2, 3).unbind(1):
        _, state = layer.step(x, state)


def refused(layer, match):
    """Assert that a call of the layer, and a step, raise one line of this kind."""
    for call in (run,) if layer.bidirectional else (run, step):
        with pytest.raises(ConfigError) as error:
            call(layer)
        assert re.fullmatch(rf"\w+: \S+ {match} because the layer reads its weights and .*", str(error.value))


@pytest.fixture(params=LAYERS)
def name(request):
    return request.param


@pytest.mark.parametrize("training", [True, False])
def test_a_layer_calls_a_module_or_declares_that_it_reads_it(name, training):
    layer = made(name).train(training)
    for call in (run, step):
        called = set()
        with register_module_forward_hook(lambda module, *_, called=called: called.add(module)):
            call(layer)
        uncalled = sorted(path for path, module in with_weights(layer).items() if module not in called)
        assert sorted(read(layer)) == uncalled
        if layer.bidirectional:
            break


def test_an_adapter_has_its_effect(name):
    adapted, merged = made(name), made(name)
    weights = []
    for seed, (path, module) in enumerate(inner(adapted)):
        if path not in read(merged):
            put(adapted, path, Adapter(module, seed))
            parametrize.register_parametrization(merged.get_submodule(path), "weight", Added(module.weight, seed))
            weights.append(path)
    y, expected = run(adapted), run(merged)
    torch.testing.assert_close(y, expected)
    if not weights:
        return
    assert not torch.allclose(y, run(made(name)))
    y.square().sum().backward()
    expected.square().sum().backward()
    for path in weights:
        own, other = adapted.get_submodule(path).added, merged.get_submodule(path).parametrizations.weight[0]
        for parameter, same in zip(own.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, same.grad)


def test_a_wrapper_or_hook_without_effect_is_refused(name):
    for path in read(made(name)):
        layer = made(name)
        module = layer.get_submodule(path)
        for register, expected in (
            (module.register_forward_hook, "has a forward hook, expected none"),
            (module.register_forward_pre_hook, "has a forward pre-hook, expected none"),
            (module.register_full_backward_hook, "has a backward hook, expected none"),
            (module.register_full_backward_pre_hook, "has a backward hook, expected none"),
        ):
            hook = register(lambda *_: None)
            refused(layer, expected)
            hook.remove()
        run(layer)
        put(layer, path, Wrapper(module))
        refused(layer, rf"is a {re.escape(__name__)}\.Wrapper, expected a plain nn\.{type(module).__name__}")


def test_a_parametrization_has_its_effect(name):
    layer, merged = made(name), made(name)
    for seed, path in enumerate(read(merged)):
        weight = layer.get_submodule(path)._parameters.get("weight")
        if weight is not None:
            added = Added(weight, seed)
            parametrize.register_parametrization(layer.get_submodule(path), "weight", added)
            with torch.no_grad():
                merged.get_submodule(path).weight.copy_(added(weight))
    torch.testing.assert_close(run(layer), run(merged))


def test_pruning_lasts_over_steps(name):
    layer, merged = made(name), made(name)
    for path, module in inner(layer):
        prune.random_unstructured(module, "weight", 0.5)
        with torch.no_grad():
            merged.get_submodule(path).weight.mul_(module.weight_mask)
    for _ in range(2):
        y, expected = run(layer), run(merged)
        torch.testing.assert_close(y, expected)
        y.square().sum().backward()
        expected.square().sum().backward()
    for path, module in inner(layer):
        grad = merged.get_submodule(path).weight.grad
        torch.testing.assert_close(module.weight_orig.grad, None if grad is None else grad * module.weight_mask)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning")
def test_dynamic_quantization_runs_or_is_refused(name):
    layer = made(name, torch.float32).eval()
    swapped = [path for path in read(layer) if type(layer.get_submodule(path)) in (nn.Linear, nn.GRUCell)]
    quantized = torch.ao.quantization.quantize_dynamic(layer)
    if swapped:
        with pytest.raises(ConfigError, match=r"is a torch\.ao\.nn\.quantized\.dynamic\.\S+, expected a plain nn\."):
            quantized(inputs(2, 3, dtype=torch.float32))
        return
    y = quantized(inputs(2, 3, dtype=torch.float32))[0]
    assert y.shape == (2, 3, DIM)
    assert y.isfinite().all()


@pytest.mark.parametrize(("name", "path"), [("slstm", "conv1d"), ("cfc", "rnn_cell"), ("odernn", "ode_func.deep")])
def test_hooks_on_what_holds_a_module_that_is_read_are_refused(name, path):
    layer = made(name)
    layer.get_submodule(path).register_forward_hook(lambda *_: None)
    refused(layer, "has a forward hook, expected none")


def test_the_refusal_says_what_to_do():
    layer = made("deltanet")
    layer.q_conv1d.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError) as error:
        run(layer)
    assert str(error.value) == (
        "deltanet: q_conv1d has a forward hook, expected none because the layer reads its weights and does not call "
        "it; leave it as it is, or change its weight by torch.nn.utils.parametrize"
    )


def test_a_forward_of_its_own_is_refused():
    """Some libraries set the forward of one module instead of wrapping it."""
    layer = made("deltanet")
    layer.q_conv1d.forward = lambda x: x
    refused(layer, r"has a forward of its own, expected that of nn\.Conv1d")


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_the_older_norms_of_weights_have_their_effect():
    layer, merged = made("deltanet").eval(), made("deltanet").eval()
    weight_norm(layer.q_conv1d)
    spectral_norm(layer.k_conv1d, n_power_iterations=1000).train()
    with torch.no_grad():
        layer.q_conv1d.weight_g.mul_(2)
        merged.q_conv1d.weight.mul_(2)
        merged.k_conv1d.weight.div_(torch.linalg.matrix_norm(merged.k_conv1d.weight[:, 0], 2))
    for _ in range(2):
        y = run(layer)
        torch.testing.assert_close(y, run(merged))
        y.sum().backward()


def test_a_language_model_calls_its_head():
    torch.manual_seed(0)
    model, tokens = LanguageModel(7, Stack(8, 1, "lru"), tie_embeddings=False), torch.tensor([[1, 2, 3]])
    before = model(tokens)[0]
    head = model.head = Adapter(model.head, 0)
    hidden = model.stack(model.embedding(tokens))[0]
    torch.testing.assert_close(model(tokens)[0], before + hidden @ head.added.A @ head.added.B)


def test_hooks_on_all_other_modules_run(name):
    layer, seen = made(name), set()
    refusing = (inside for inside in layer.modules() if isinstance(inside, Layer))
    for module in set(layer.modules()).difference(*(inside.read_modules() for inside in refusing)):
        module.register_forward_hook(lambda module, *_: seen.add(module))
    run(layer)
    assert seen.isdisjoint(layer.get_submodule(path) for path in read(layer))
    assert layer in seen


def test_a_description_names_what_is_read():
    assert "reads       the weights of q_conv1d, k_conv1d, v_conv1d: no hooks or wrappers there" in describe("deltanet")
    assert "the weights of conv_1d.conv:" in describe("hawk")
    assert "\nreads " not in describe("lru")
