"""What layers are excused from: laws that exist, for a reason, and that they would break."""

import importlib
import inspect
import itertools
from functools import partial

import pytest

from scanl import layers
from tests import test_exact, test_layer_robustness, test_layers, test_nonfinite

MODULES = (test_layers, test_layer_robustness, test_nonfinite, test_exact)
LAWS = {
    key.removeprefix("test_"): value
    for module in MODULES
    for key, value in vars(module).items()
    if key.startswith("test_") and {"name", "streaming"} & set(inspect.signature(value).parameters)
}
EXCUSES = [(name, law) for name in layers.names() for law in layers.get(name).excused]


def _size(name):
    return sum(parameter.numel() for parameter in test_layers.BUILT[name].parameters())


# The smallest layer with a law and a reason stands for the others with both.
FIRST = {}
for _name, _law in sorted(EXCUSES, key=lambda excuse: _size(excuse[0])):
    FIRST.setdefault((_law, layers.get(_name).excused[_law]), _name)
TRIED = [
    pytest.param(name, law, marks=[pytest.mark.long] * (FIRST[law, layers.get(name).excused[law]] != name))
    for name, law in EXCUSES
]


@pytest.mark.parametrize(("excused", "law"), EXCUSES)
def test_an_excuse_names_a_law_and_a_reason(excused, law):
    assert law in LAWS
    assert layers.get(excused).excused[law]


@pytest.mark.parametrize(("excused", "law"), TRIED)
def test_an_excuse_is_needed(excused, law, monkeypatch):
    """Tried, the law fails or cannot be tried, at some values of its other parameters, for one of a few inputs.

    On some processors the rounding that an excuse is for changes no bit of the first inputs.
    """
    marks = [mark for mark in getattr(LAWS[law], "pytestmark", []) if mark.name == "parametrize"]
    others = {mark.args[0]: mark.args[1] for mark in marks if mark.args[0] not in ("name", "streaming")}
    monkeypatch.setattr(test_exact, "DRAWS", 40)
    monkeypatch.setattr(test_exact, "LONGEST", 80)
    # torch computes a Jacobian whole for its message, once a product with it is wrong: up to half a minute
    monkeypatch.setattr(importlib.import_module("torch.autograd.gradcheck"), "_run_slow_mode_and_get_error", _wrong)
    for seed, *values in itertools.product(range(1, 17), *others.values()):
        monkeypatch.setattr(test_nonfinite, "inputs", partial(test_layers.inputs, seed=seed))
        try:
            LAWS[law](**dict(zip(others, values, strict=True)), name=excused)
        except (AssertionError, RuntimeError, ArithmeticError):
            return
    pytest.fail(f"{excused} passes {law}")


def _wrong(*_):
    return "a gradient is wrong"
