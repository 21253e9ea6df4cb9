"""The signatures of `scanl.compat.fla` are those of the installed flash-linear-attention: names, order, defaults."""

import importlib
import inspect
import warnings

import pytest

from scanl.compat import fla as ours
from scanl.compat.calls import FUNCTIONS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of a missing GPU
    pytest.importorskip("fla", reason="needs the extra `outside`")
    MODULES = [importlib.import_module(f"fla.ops{name}") for name in ("", ".hgrn", ".rwkv7", ".gated_delta_product")]


@pytest.mark.parametrize("name", [*FUNCTIONS, "chunk_gdn", "fused_recurrent_gdn"])
def test_signature(name):
    (theirs, *_) = (vars(module)[name] for module in MODULES if name in vars(module))
    mine, other = (
        [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]
        for function in (getattr(ours, name), inspect.unwrap(theirs))
    )
    assert mine == other
