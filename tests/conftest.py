"""Set before anything imports triton: without a GPU its kernels run in the interpreter."""

import importlib.util
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from hypothesis import settings

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from triton.runtime import interpreter

    # It patches triton's language for every call of a function from a kernel, and undoes it: once a module is enough,
    _patch, _patched = interpreter._patch_lang, set()

    def _patch_once(function):
        if id(function.__globals__) not in _patched:
            _patched.add(id(function.__globals__))
            _patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = _patch_once
    # and looks for overflows after every operation on integers: a third of its time
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)

settings.register_profile("short", max_examples=30, derandomize=True)  # the same for all who run it
settings.register_profile("long", max_examples=1000)
settings.load_profile("short")
torch.utils.deterministic.fill_uninitialized_memory = True


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
