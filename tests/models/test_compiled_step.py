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
from scanl import ops
from scanl.errors import ConfigError, ShapeError
from scanl.layers.state import index, leaves
from scanl.models import LanguageModel, Stack, Streams, quantize
from scanl.models.compiled_step import CompiledStep
from scanl.ops._recorded import loops, recorded

LAYERS = ("hawk", "mamba", "mamba2", "gla", "gated_deltanet", "rwkv7", "gru", "xlstm", "lru", "s5", "minlstm", "retnet")
SOME = ("hawk", "mamba2", "rwkv7")  # in every run; the rest with --all
VOCABULARY, DIM = 11, 8
OPTIONS: dict[str, dict[str, Any]] = {
    "mamba2": {"head_dim": 4},
    "rwkv7": {"head_dim": 4},
}


class Pointer:
    """A pointer to numbers, as kernels have it."""

    def __init__(self, numbers: np.ndarray, first: int = 0) -> None:
        self.numbers, self.first = numbers, first

    def __getitem__(self, at: int) -> Any:
        return self.numbers[self.first + at]

    def __setitem__(self, at: int, value: Any) -> None:
        self.numbers[self.first + at] = value


def pointer(address: int, dtype: type) -> Pointer:
    if address == 0:  # of scratch memory of no numbers
        return Pointer(np.empty(0, dtype))
    numbers = ctypes.POINTER(np.ctypeslib.as_ctypes_type(dtype))
    return Pointer(np.ctypeslib.as_array(ctypes.cast(address, numbers), (1 << 24,)))


def times(
    team: Pointer, out: Pointer, out_row: int, x: Pointer, x_row: int, w: Pointer, w_row: int, *sizes: int
) -> None:
    rows, columns, terms = sizes
    for row in range(rows):
        left = x.numbers[x.first + row * x_row :][:terms]
        for column in range(columns):
            out[row * out_row + column] = left @ w.numbers[w.first + column * w_row :][:terms]


def times_quantized(
    team: Pointer, y: Pointer, y_row: int, x: Pointer, x_row: int, w: Pointer, scale: Pointer, *sizes: int
) -> None:
    groups, bias, rows, columns, terms = sizes
    assert not groups
    assert not bias
    wide = Pointer(w.numbers[w.first :][: columns * terms].astype(np.float32))
    times(team, y, y_row, x, x_row, wide, terms, rows, columns, terms)
    for row in range(rows):
        for column in range(columns):
            y[row * y_row + column] *= scale[column]


class Kernel:
    def __init__(self, function: Any, names: str) -> None:
        self.function, self.names = function, names.split()

    def run(self, dtype: torch.dtype, packed: list[int], units: int, work: int) -> None:
        with np.errstate(all="ignore"):
            self.function(SimpleNamespace(units=units, **dict(zip(self.names, packed, strict=True))))


def as_python(name: str, text: str) -> SimpleNamespace:
    """Return the kernel of a source without numba."""
    scope: dict[str, Any] = {
        "np": np, "pointer": pointer, "times": times, "times_quantized": times_quantized, "separate": lambda: None,
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
    monkeypatch.setattr(recorded.Recorded, "team", lambda kernel, units: 0)


@pytest.fixture(autouse=True)
def decoding() -> Iterator[None]:
    """Without gradients; the ordinary step compiles nothing either."""
    with torch.no_grad(), ops.backend("reference"):
        yield


def model_of(layer: str, dim: int = DIM, depth: int = 1, **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(VOCABULARY, Stack(dim, depth, layer, layer_options=OPTIONS.get(layer), **options)).eval()


def check_equal(model: LanguageModel, step: CompiledStep, batch: int, tokens: int = 3) -> None:
    state = after = None
    for token in torch.randint(VOCABULARY, (tokens, batch)):
        expected, state = model.step(token, state)
        logits, after = step(token, after)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        for (path, leaf), (_, other) in zip(leaves(after), leaves(state), strict=True):
            torch.testing.assert_close(leaf, other, rtol=1e-4, atol=1e-5, msg=lambda text, path=path: f"{path}: {text}")


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    "layer", [layer if layer in SOME else pytest.param(layer, marks=pytest.mark.long) for layer in LAYERS]
)
def test_a_compiled_step_equals_the_step(layer: str) -> None:
    model = model_of(layer)
    step = model.compile_step()
    assert step.reason is None
    check_equal(model, step, 1)


@pytest.mark.usefixtures("plain")
def test_batches_run_in_parts_of_equal_sizes() -> None:
    model = model_of("gru", channel_mixer="none")
    step = model.compile_step(2)
    for batch in (2, 21):  # 21 rows are two parts of 11, which have a row in common
        check_equal(model, step, batch, tokens=2)


@pytest.mark.usefixtures("plain")
def test_parameters_are_read_anew() -> None:
    model = model_of("gru", channel_mixer="none")
    step = model.compile_step()
    for weight in model.parameters():
        weight.mul_(1.5)
    check_equal(model, step, 1, tokens=1)
    assert model.head is not None
    model.head.weight = nn.Parameter(torch.ones_like(model.head.weight))
    check_equal(model, step, 1, tokens=1)
    model.double()
    token = torch.tensor([3])
    torch.testing.assert_close(step(token, None)[0], model.step(token, None)[0])


@pytest.mark.usefixtures("plain")
def test_a_state_stays_as_it_is() -> None:
    model = model_of("gru", channel_mixer="none")
    step = model.compile_step()
    state = step(torch.tensor([1]), None)[1]
    before = copy.deepcopy(state)
    step(torch.tensor([2]), state)
    for (_, leaf), (_, other) in zip(leaves(state), leaves(before), strict=True):
        assert torch.equal(leaf, other)


@pytest.mark.usefixtures("plain")
def test_generate_uses_the_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = model_of("gru", channel_mixer="none"), torch.tensor([[1, 2, 3]])
    expected = list(model.generate(prompt, max_new_tokens=4, temperature=0))
    model.compile_step()
    calls: list[Tensor] = []
    call = CompiledStep.__call__
    monkeypatch.setattr(CompiledStep, "__call__", lambda step, *args: (calls.append(args[0]), call(step, *args))[1])
    assert list(model.generate(prompt, max_new_tokens=4, temperature=0)) == expected
    assert len(calls) == 3  # the prompt is read at once
    calls.clear()
    streams = Streams(model)
    handle = streams.join(prompt[0], temperature=0)
    streams.join(prompt[0, :2], temperature=0)
    steps = [streams.step() for _ in range(4)]
    assert [step[handle] for step in steps] == [int(token) for token in expected]
    assert [tokens.shape for tokens in calls] == [(2,)] * 3
    fresh = model_of("gru", channel_mixer="none")
    next(fresh.generate(prompt, max_new_tokens=3_000))
    assert fresh._compiled is not None


@pytest.mark.usefixtures("plain")
def test_few_kernels_serve_batches_of_any_size() -> None:
    model, sizes = model_of("gru", channel_mixer="none"), (1, 3, 5, 7, 16, 19)
    step = model.compile_step()
    with torch.no_grad():
        _, state = model(torch.randint(VOCABULARY, (max(sizes), 3)))
        for size in sizes:
            tokens, before = torch.randint(VOCABULARY, (size,)), index(state, range(size))
            torch.testing.assert_close(step(tokens, before), model.step(tokens, before))
    assert step._kernels.keys() <= {1, 2, 4, 8, 16}


@pytest.mark.usefixtures("plain")
def test_a_copy_has_a_step_of_its_own() -> None:
    model = model_of("gru", channel_mixer="none")
    model.compile_step()
    other = copy.deepcopy(model)
    for weight in other.parameters():
        weight.mul_(1.5)
    check_equal(other, other.compile_step(), 1, tokens=1)


@pytest.mark.usefixtures("plain")
def test_the_ordinary_step_runs_where_the_compiled_one_cannot() -> None:
    model, token = model_of("gru", channel_mixer="none"), torch.tensor([3])
    step = model.compile_step()
    with scanl.exact():
        assert torch.equal(step(token, None)[0], model.step(token, None)[0])
    with torch.enable_grad():
        assert step(token, None)[0].requires_grad
    assert model.explain() == "compiled: can run\nordinary: can run"
    assert model.bfloat16().explain().startswith("compiled: weight is torch.bfloat16 (takes float32 and float64)\n")
    assert step(token, None)[0].dtype == torch.bfloat16


@pytest.mark.usefixtures("plain")
def test_whole_numbers_are_read_where_they_lie() -> None:
    """Also those of a model that is quantized after its step was compiled."""
    torch.manual_seed(0)
    model = LanguageModel(70, Stack(64, 1, "gru", channel_mixer="none"), tie_embeddings=True).eval()
    step, token = model.compile_step(), torch.tensor([3])
    before = step(token, None)[0]
    quantize(model)
    assert step.reason is None
    assert not torch.equal(step(token, None)[0], before)
    check_equal(model, step, 1)
    assert step.reason is None


@pytest.mark.usefixtures("plain")
def test_a_reason_says_which_operation_has_no_loop() -> None:
    model = model_of("gru", channel_mixer="none", dropout=0.5).train()
    assert model.explain() != "compiled: can run\nordinary: can run"
    assert model.eval().explain() == "compiled: can run\nordinary: can run"


@pytest.mark.usefixtures("plain")
def test_bad_input_is_refused() -> None:
    model = model_of("gru", channel_mixer="none")
    with pytest.raises(ConfigError, match="compile_step: batch_size is 0, expected at least 1"):
        model.compile_step(0)
    step = model.compile_step()
    with pytest.raises(ShapeError, match=r"tokens is torch.int64 \(1, 1\), expected integers \(B,\)"):
        step(torch.tensor([[3]]), None)
    with pytest.raises(ShapeError, match="gru: state has "):
        step(torch.tensor([3]), model.init_state(2))
    with pytest.raises(ShapeError, match="token 11 is out of range, expected 0 to 10 of 11"):
        step(torch.tensor([11]), None)


@pytest.mark.long
@pytest.mark.parametrize("layer", LAYERS)
def test_a_kernel_of_numba_equals_the_step(layer: str) -> None:
    model = model_of(layer, dim=40, depth=2)
    for batch in (1, 6):
        check_equal(model, model.compile_step(batch), batch)
