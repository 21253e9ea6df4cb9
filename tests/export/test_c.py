"""Models as C99: compiled without a warning, and against the models."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.export import write_c
from scanl.hub import convert
from scanl.layers import build
from scanl.layers.parts.quantized import QuantizedWeight
from scanl.layers.state import map_leaves
from scanl.models import Features, Forecaster, LanguageModel, SequenceClassifier, Stack, pretrained_forecaster, quantize
from scanl.models.forecasting.pretrained_step import PretrainedStep
from scanl.ops import exact
from scanl.ops._compiler.print_c import real
from scanl.ops._compiler.recorded import RecordedFunction
from tests.ops._compiler.test_recorded import complex_
from tests.ops._compiler.test_recorded import real as of_reals

COVERS = ["ops/products/constants"]
FLAGS = ("-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", "-O1", "-shared", "-fPIC")


class Functions(nn.Module):
    """Everything that loops can compute, of a matrix that enters as one step."""

    def init_state(self, batch_size: int) -> torch.Tensor:
        return torch.full((batch_size, 2), 0.5)

    def forward(self, x, state):
        a = x.reshape(3, 4)
        b, c, z = torch.cat([a.T, 0.3 - a.T], 1)[:, 1:], torch.stack([a + 0.2, -a]), torch.complex(a, a + 1)
        results = [*of_reals(a, b, c, z), *complex_(a, b, c, z)]
        numbers = [torch.view_as_real(value) if value.is_complex() else value for value in results]
        return torch.cat([value.reshape(1, 1, -1).float() for value in numbers], -1), state * a[0, 0]


class Views(nn.Module):
    """Its weights are parts of larger memory, one of them turned."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(9, 7)
        self.register_buffer("turned", memory[1:5, 1:4].T)
        self.register_buffer("every_other", memory[5:, ::2])
        self.register_buffer("whole", torch.randn(4, 256))

    def init_state(self, batch_size: int) -> torch.Tensor:
        return torch.zeros(batch_size, 4)

    def forward(self, x, state):
        y = x.reshape(4, 3) @ self.turned @ self.every_other
        y = torch.cat([y.reshape(1, 1, -1), (y @ self.whole).reshape(1, 1, -1)], -1)
        return y, state + self.every_other[:1]


class Pairs(nn.Module):
    """A step reads two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)

    def init_state(self, batch_size: int) -> torch.Tensor:
        return torch.zeros(batch_size, 3)

    def forward(self, x, state):
        y = self.embedding(x)
        return y.flatten(2) + torch.cat([state, state], -1)[:, None], state + y[:, 0, 0] - y[:, 0, 1]


def of_tokens() -> nn.Module:
    return LanguageModel(7, Stack(6, 3, ["gru", "indrnn", "slstm"], layer_options={"slstm": {"num_heads": 2}}))


def of_features() -> nn.Module:
    return SequenceClassifier(3, Stack(4, 2, ["mingru", "lru"]), Features(2))


def of_wide_features() -> nn.Module:
    """Its weights are so large that a kernel of their own multiplies by them."""
    return SequenceClassifier(3, Stack(32, 1, "mingru"), Features(2))


def of_whole_numbers() -> nn.Module:
    """Its weights are whole numbers of 8 bits; the rows of one have no bias."""
    model = LanguageModel(64, Stack(64, 2, "mingru")).eval()
    quantize(model)
    assert any(isinstance(part, QuantizedWeight) for part in model.modules())
    return model


def of_series() -> nn.Module:
    return Forecaster(2, Stack(4, 1, "mingru"))


NUMBERS = torch.randn(1, 5, 12, generator=torch.Generator().manual_seed(0))
MODELS = {
    "functions": (Functions, NUMBERS),
    "views": (Views, NUMBERS),
    "pairs": (Pairs, torch.tensor([[[3, 1], [6, 2], [0, 5]]])),
    "tokens": (of_tokens, torch.tensor([[3, 1, 6, 2, 0]])),
    "features": (of_features, NUMBERS[..., :2]),
    "wide": (of_wide_features, NUMBERS[..., :2]),
    "series": (of_series, NUMBERS[..., :1]),
    "whole numbers": (of_whole_numbers, torch.tensor([[3, 1, 6, 2, 0]])),
}


def outputs_in_c(model, x: torch.Tensor, folder: Path, flags: Sequence[str]) -> np.ndarray:
    """Return the numbers after each step (T, Y) by the file of a model. x: (1, T, ...)."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler, cc, is there")
    write_c(model, folder / "cell.c", x)
    subprocess.run(["cc", *flags, folder / "cell.c", "-o", folder / "cell.so", "-lm"], check=True)
    functions, memory = ctypes.CDLL(str(folder / "cell.so")), ctypes.create_string_buffer(4096)
    first = model(x[:, :1], model.init_state(1))[0].flatten().numpy()
    outputs = np.zeros((x.shape[1], len(first)), first.dtype)
    functions.cell_start(memory)
    for step, y in zip(x[0], outputs, strict=True):
        read = step.flatten().numpy() if step.is_floating_point() else step.int().numpy()
        functions.cell_step(read.ctypes.data_as(ctypes.c_void_p), memory, y.ctypes.data_as(ctypes.c_void_p))
    return outputs


@pytest.mark.parametrize("name", MODELS)
def test_a_file_equals_its_model(name, tmp_path):
    torch.manual_seed(0)
    make, x = MODELS[name]
    model = make()
    after, wanted = model.init_state(1), []
    with torch.no_grad():
        actual = outputs_in_c(model, x, tmp_path, FLAGS)
        for step in x.split(1, 1):
            y, after = model(step, after)
            wanted.append(y.flatten().numpy())
    expected = np.stack(wanted)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    # Beside whole numbers the input is rounded to 16 bits: a number that is near a half may fall to the other side.
    tolerance = 1e-6 + sum(isinstance(part, QuantizedWeight) for part in model.modules()) / 32767
    assert np.linalg.norm((actual - expected)[finite]) <= tolerance * np.linalg.norm(expected[finite])


class Elementary(nn.Module):
    """Every elementary function, of numbers of all sizes, and a sum of products."""

    def init_state(self, batch_size: int) -> torch.Tensor:
        return torch.zeros(batch_size, 1)

    def forward(self, x, state):
        functions = torch.exp, torch.expm1, torch.log, torch.log1p, torch.sigmoid, F.logsigmoid, torch.tanh
        wide = x * torch.exp(4 * x)
        return torch.cat([*(function(wide) for function in functions), (x * x).sum(-1, keepdim=True)], -1), state


# On a processor that multiplies and adds at once gcc does so at -O3, unless the file forbids it.
@pytest.mark.parametrize(
    ("make", "flags"), [(of_whole_numbers, ["-O0"]), (Elementary, ["-O3", "-std=gnu11", "-march=native"])]
)
def test_portable_bits_are_those_of_the_kernel(make, flags, tmp_path):
    torch.manual_seed(0)
    model, x = make(), torch.randn(1, 16, 300)
    x = torch.randint(64, (1, 16)) if make is of_whole_numbers else x
    with exact(portable=True), torch.no_grad():
        actual = outputs_in_c(model, x, tmp_path, [*flags, "-shared", "-fPIC"])
        state, expected = model.init_state(1), []
        step = RecordedFunction(model, x[:, :1], state, portable=True) if make is Elementary else model.compile_step()
        for each in x.split(1, 1):
            y, state = step(each if make is Elementary else each[0], state)
            expected.append(y.flatten().numpy())
    same = actual.view(np.int32) == np.stack(expected).view(np.int32)
    assert (same | np.isnan(actual) & np.isnan(np.stack(expected))).all()
    assert same.mean() > 0.7


def test_functions_of_float64_are_no_portable_ones(tmp_path):
    with (
        exact(portable=True),
        pytest.raises(ConfigError, match=r"no step in C: .* of double, whose bits depend on the"),
    ):
        write_c(of_features().double(), tmp_path / "cell.c")


def test_the_pretrained_forecaster_equals_its_model(tmp_path):
    """Row by row: missing ones first and between, and two seasons that begin."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler, cc, is there")
    model, season, levels = pretrained_forecaster(), (3, 6), (0.1, 0.5, 0.9)
    write_c(PretrainedStep(model, 2, season, levels), tmp_path / "f.c")
    subprocess.run(["cc", *FLAGS, "-O0", tmp_path / "f.c", "-o", tmp_path / "f.so", "-lm"], check=True)
    functions, memory = ctypes.CDLL(str(tmp_path / "f.so")), ctypes.create_string_buffer(65536)
    y = np.random.default_rng(0).normal(size=24).cumsum()
    y[[0, 1, 9]] = np.nan
    state, row, answers = model.init_state(1, season=season), np.zeros((2, 3)), []
    functions.f_start(memory)
    for value in y:
        functions.f_step(ctypes.byref(ctypes.c_double(value)), memory, row.ctypes.data_as(ctypes.c_void_p))
        answers.append(row.copy())
    expected, _ = model.each(y[None], state, np.arange(24), horizon=2, levels=levels)
    np.testing.assert_allclose(answers, expected[0], rtol=1e-9, atol=1e-9)


class Heard(nn.Module):
    """Convolutions, some with groups, a recurrence, a product of parts, and weights that are computed of others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 32, 5), nn.utils.parametrizations.weight_norm(nn.Conv1d(32, 64, 3))
        self.grouped = nn.Conv1d(64, 64, 3, groups=2)
        self.gru, self.out = nn.GRU(64, 40, 1, batch_first=True), nn.Linear(64, 6)
        self.parts = nn.Parameter(torch.randn(4, 10, 16))

    def forward(self, x):
        y = self.first(F.pad(x.mT, (4, 0))).relu()
        y = self.second(F.pad(y, (2, 0))) ** torch.tensor(2.0)
        y = self.gru(self.grouped(F.pad(y, (2, 0))).mT)[0].unflatten(-1, (4, 10))
        return self.out(torch.einsum("btgi,gio->btgo", y, self.parts).flatten(2))


def test_weights_of_8_bits(tmp_path):
    """Little more than a quarter of the bytes, and numbers near those of floats."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler, cc, is there")
    torch.manual_seed(0)
    models = convert(Heard().eval(), torch.randn(1, 12, 4)), LanguageModel(64, Stack(32, 1, "gru")).eval()
    for model, x in zip(models, (torch.randn(1, 20, 4), torch.randint(64, (1, 20))), strict=True):
        sizes, found = [], []
        for weights in ("float32", "int8"):
            written = write_c(model, tmp_path / f"{weights}.c", name="cell", weights=weights)
            assert str(written) in (tmp_path / f"{weights}.c").read_text(encoding="ascii")
            sizes.append(written.constants)
            made = tmp_path / f"{type(model).__name__}-{weights}.so"  # a library that is open is not opened again
            subprocess.run(["cc", *FLAGS, tmp_path / f"{weights}.c", "-o", made, "-lm"], check=True)
            functions, memory = ctypes.CDLL(str(made)), ctypes.create_string_buffer(1 << 14)
            functions.cell_start(memory)
            for step in x[0]:
                numbers = np.zeros(64, np.float32)
                read = (step if step.is_floating_point() else step.int()).numpy()
                functions.cell_step(
                    read.ctypes.data_as(ctypes.c_void_p), memory, numbers.ctypes.data_as(ctypes.c_void_p)
                )
                found.append(numbers)
        with torch.no_grad():
            expected = model(x)[0][0].numpy()
        floats, wholes = (np.stack(half)[:, : expected.shape[1]] for half in (found[:20], found[20:]))
        np.testing.assert_allclose(floats, expected, rtol=1e-4, atol=1e-5)
        assert sizes[1] < sizes[0] / 3.6
        error = np.linalg.norm(wholes - expected) / np.linalg.norm(expected)
        assert 1e-6 < error < 3 / 127, error  # seven products, each of which is rounded by half of a 127th at most


class Keyed(nn.Module):
    """A module whose state has keys of the user's choice."""

    def __init__(self, state) -> None:
        super().__init__()
        self.state = state

    def init_state(self, batch_size: int):
        return map_leaves(lambda _: torch.zeros(batch_size, 2), self.state)

    def forward(self, x, state):
        return x, map_leaves(lambda leaf: leaf + x[:, 0, :2], state)


ODD = {
    "h-1": ({"h-1": torch.zeros(1)}, r"the state has 'state.h-1', expected keys of letters, digits and _"),
    "ü": ({"ü": torch.zeros(1)}, r"the state has 'state.ü', expected keys of letters"),
    "same": (
        {"a_b": torch.zeros(1), "a": {"b": torch.zeros(1)}},
        r"the state has 'state.a_b' and 'state.a.b', expected keys that differ in C",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_names_that_c_does_not_have_are_refused(name, tmp_path):
    state, message = ODD[name]
    with pytest.raises(ConfigError, match=message):
        write_c(Keyed(state), tmp_path / "cell.c", NUMBERS[..., :2])
    assert not list(tmp_path.iterdir())


def test_a_class_that_c_does_not_have_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="the model is a 'Größe', expected a name in ASCII"):
        write_c(type("Größe", (Keyed,), {})(torch.zeros(1)), tmp_path / "cell.c", NUMBERS[..., :2])


def test_keywords_of_c_are_keys(tmp_path):
    state = {"int": torch.zeros(1), "x": torch.zeros(1), "1": torch.zeros(1)}
    write_c(Keyed(state), tmp_path / "double.c", NUMBERS[..., :2])
    if shutil.which("cc") is not None:
        subprocess.run(["cc", *FLAGS, tmp_path / "double.c", "-o", tmp_path / "cell.so", "-lm"], check=True)


@pytest.mark.parametrize(("kind", "dtype"), [("float", np.float32), ("double", np.float64)])
def test_a_literal_is_its_number(kind, dtype):
    least, limit = np.finfo(dtype).smallest_subnormal, np.finfo(dtype).max
    drawn = np.random.default_rng(0).standard_normal(200).astype(dtype) ** 5
    for value in (
        *drawn,
        dtype(0.1),
        dtype(1) / dtype(3),
        least,
        limit,
        -limit,
        dtype(1 << 24) + dtype(1),
        dtype(-0.0),
    ):
        text = real(float(value), kind)
        assert text.endswith("f") == (kind == "float")
        assert dtype(text.removesuffix("f")).tobytes() == value.tobytes()
    assert [real(value, kind) for value in (np.inf, -np.inf, np.nan)] == ["INFINITY", "-INFINITY", "NAN"]


def test_refusals(tmp_path):
    model = build("gru", 4)
    for path, more, message in (
        ("my-cell.c", {}, "name is 'my-cell', expected an identifier of C"),
        ("cell.h", {}, "expected a file of .c"),
        ("nowhere/cell.c", {}, "whose folder does not exist"),
        ("cell.c", {"weights": "int9"}, "unknown weights of export 'int9'"),
    ):
        with pytest.raises(ConfigError, match=message):
            write_c(model, tmp_path / path, **more)
    with pytest.raises(ConfigError, match="example is None for a Functions, expected an input"):
        write_c(Functions(), tmp_path / "cell.c")
    with pytest.raises(ConfigError, match="gau has no step in C: its operations depend on the numbers"):
        write_c(build("gau", 8), tmp_path / "cell.c")  # whose tables end with the longest text
    small = build("gla", 64)
    quantize(small, "int4")
    with pytest.raises(ConfigError, match="export: the model has weights of 4 bits, expected 8 bits or floats in C"):
        write_c(small, tmp_path / "cell.c")
    assert not list(tmp_path.iterdir())
