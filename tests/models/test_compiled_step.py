"""A compiled step equals the ordinary step. Most kernels run as plain Python here: numba takes seconds for each."""

import copy
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import scanl
from scanl.errors import ConfigError, ShapeError
from scanl.layers import Layer
from scanl.layers.state import leaves
from scanl.models import LanguageModel, Stack
from scanl.models.compiled_step import CompiledStep
from scanl.ops._recorded import loops, recorded

LAYERS = ("hawk", "mamba", "mamba2", "gla", "gated_deltanet", "rwkv7", "gru", "xlstm", "lru", "s5", "minlstm", "retnet")
VOCABULARY, DIM = 11, 8


class Pointer:
    """A pointer to numbers, as kernels have it."""

    def __init__(self, numbers: np.ndarray, first: int = 0) -> None:
        self.numbers, self.first = numbers, first

    def __getitem__(self, at: int) -> Any:
        return self.numbers[self.first + at]

    def __setitem__(self, at: int, value: Any) -> None:
        self.numbers[self.first + at] = value


def pointer(address: int, dtype: type) -> Pointer:
    numbers = ctypes.POINTER(np.ctypeslib.as_ctypes_type(dtype))
    return Pointer(np.ctypeslib.as_array(ctypes.cast(address, numbers), (1 << 24,)))


def multiply(
    out: Pointer, out_row: int, x: Pointer, x_row: int, w: Pointer, w_row: int, rows: int, columns: int, terms: int
) -> None:
    for row in range(rows):
        left = x.numbers[x.first + row * x_row :][:terms]
        for column in range(columns):
            out[row * out_row + column] = left @ w.numbers[w.first + column * w_row :][:terms]


class Kernel:
    def __init__(self, function: Any, names: str) -> None:
        self.function, self.names = function, names.split()

    def run(self, dtype: torch.dtype, packed: list[int], units: int, work: int) -> None:
        with np.errstate(all="ignore"):
            self.function(SimpleNamespace(units=units, **dict(zip(self.names, packed, strict=True))))


def as_python(name: str, text: str) -> SimpleNamespace:
    """Return the kernel of a source without numba."""
    scope: dict[str, Any] = {
        "np": np, "pointer": pointer, "multiply": multiply, "separate": lambda: None,
        "at": lambda first, count: Pointer(first.numbers, first.first + count),
        "units": lambda slots: range(slots.units), "helper": lambda **flags: lambda function: function,
        "kernel": lambda names: lambda function: Kernel(function, names),
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "log_sigmoid": lambda x: -np.logaddexp(0, -x),
        "exp": np.exp, "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "tanh": np.tanh, "sqrt": np.sqrt,
        "cos": np.cos, "sin": np.sin, "atan2": np.arctan2, "inf": np.inf, "nan": np.nan,
    }  # fmt: skip
    exec(text.removeprefix(loops.HEADER), scope)
    return SimpleNamespace(run=scope["run"])


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "load", as_python)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def model_of(layer: str | type[Layer], **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(VOCABULARY, Stack(DIM, 1, layer, **options)).eval()


def check_equal(model: LanguageModel, step: CompiledStep, batch: int, tokens: int = 3) -> None:
    state = after = None
    for token in torch.randint(VOCABULARY, (tokens, batch)):
        expected, state = model.step(token, state)
        logits, after = step(token, after)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        for (path, leaf), (_, other) in zip(leaves(after), leaves(state), strict=True):
            torch.testing.assert_close(leaf, other, rtol=1e-4, atol=1e-5, msg=lambda text, path=path: f"{path}: {text}")


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("layer", LAYERS)
def test_a_compiled_step_equals_the_step(layer: str) -> None:
    model = model_of(layer)
    step = model.compile_step()
    assert step.reason is None
    check_equal(model, step, 1)
