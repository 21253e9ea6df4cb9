"""The padding and packing of a call of an accelerated model: known inside the call, and nowhere else."""

import ctypes
import threading

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'scanl[hub]'")

from hub_models import CASES
from scanl import hub
from tests.hub.test_accelerate import STEPS, close, each_kind, padding, tokens

PADDED = {"attention_mask": padding()}
PACKED = {"cu_seq_lens_q": torch.tensor([0, 4, STEPS])}


def interrupting(error):
    def interrupt(*_):
        raise error

    return interrupt


def called(model):
    """The modules of the model in the order of their first calls. A patch refuses hooks on modules that it reads."""
    order, read = {}, set()
    for module in model.modules():
        for path in vars(module).get("_scanl_reads", ()):
            read.update(module.get_submodule(path).modules())
    hooks = [
        module.register_forward_pre_hook(lambda module, _: order.setdefault(module))
        for module in model.modules()
        if module not in read
    ]
    model(tokens(), use_cache=False)
    for hook in hooks:
        hook.remove()
    return list(order)


@each_kind
@torch.no_grad()
def test_whatever_ends_a_call_ends_its_context(name):
    """Ctrl-C, the end of a thread or a generator, or an error, at any depth."""
    model = CASES[name].build()
    wanted = model(tokens()).logits, model(tokens(1)).logits
    patched = hub.accelerate(model).accelerated[-1]
    errors = [KeyboardInterrupt(), SystemExit(), GeneratorExit(), RuntimeError()]
    order, first = called(model), list(CASES).index(name)  # another model meets another error at each depth
    modules = order[0], model.get_submodule(patched.module), order[len(order) // 2], order[-1]
    for at, module in enumerate(modules, first):
        error = errors[at % len(errors)]
        hook = module.register_forward_pre_hook(interrupting(error))
        for batch, more in ((2, PADDED), (1, PACKED)):
            with pytest.raises(type(error)):
                model(tokens(batch), **more, use_cache=False)
        hook.remove()
        for batch, logits in zip((2, 1), wanted, strict=True):
            close(model(tokens(batch)).logits, logits)


@torch.no_grad()
def test_an_exception_from_another_thread():
    """It arises between any two instructions of the thread that runs the model."""
    model = CASES["mamba"].build()
    wanted = model(tokens()).logits
    hub.accelerate(model)
    inside, outcome = threading.Event(), []

    def wait(*_):
        inside.set()
        while True:
            pass

    hook = model.backbone.norm_f.register_forward_pre_hook(wait)

    def work():
        torch.set_grad_enabled(False)
        try:
            model(tokens(), **PADDED)
        except KeyboardInterrupt:
            hook.remove()
            outcome.append(model(tokens()).logits)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(60)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))
    thread.join(60)
    close(outcome[0], wanted)


@torch.no_grad()
def test_a_call_inside_a_call_of_another_model_has_its_own_padding():
    """As that of a teacher, inside that of a student; and that of a module of another model."""
    outer, inner, twin = (CASES[name].build() for name in ("mamba", "rwkv", "mamba"))
    mixer, x = twin.backbone.layers[0].mixer, torch.randn(2, STEPS, 32, generator=torch.Generator().manual_seed(0))
    for model in (outer, inner, twin):
        hub.accelerate(model)
    wanted, more = inner(tokens()).logits, inner(tokens(), **PADDED).logits
    seen = []

    def within(*_):
        seen.extend([inner(tokens()).logits, inner(tokens(), **PADDED).logits])
        seen.extend([mixer(x), mixer(x, attention_mask=padding())])

    alone = mixer(x), mixer(x, attention_mask=padding())
    assert (alone[0] - alone[1]).abs().max() > 0.01 * alone[0].abs().max()
    padded = outer(tokens(), **PADDED).logits
    outer.backbone.layers[0].register_forward_pre_hook(within)
    for given in ({}, PADDED):
        logits = outer(tokens(), **given).logits
        close(logits, padded if given else outer(tokens()).logits)
    for found, expected in zip(seen[:8], [wanted, more, *alone] * 2, strict=True):
        assert torch.equal(found, expected)


@torch.no_grad()
def test_a_forward_called_as_a_method_knows_its_padding():
    model = CASES["rwkv"].build()
    hub.accelerate(model)
    assert torch.equal(model.forward(tokens(), **PADDED).logits, model(tokens(), **PADDED).logits)
