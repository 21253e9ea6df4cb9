"""A model as one page of a browser, which needs no network: its step in C as WebAssembly, and a form to use it."""

import base64
import importlib.util
import json
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Size, Tensor, nn

from scanl.errors import ConfigError
from scanl.export.c import c_step
from scanl.export.flat import FlatModel, check_path
from scanl.files import written_whole
from scanl.models import Forecaster, LanguageModel
from scanl.models.forecasting.pretrained_step import PretrainedStep
from scanl.models.heads.distributions import LEVELS
from scanl.ops._compiler.print_c import KINDS
from scanl.ops._compiler.recorded import RecordedFunction

TEMPLATE = Path(__file__).with_suffix(".html")
BYTE_SIZES = {"float": 4, "double": 8, "int": 4}  # of the kinds of numbers in C
PLACES = ("x", "s", "y")  # what the page reads and writes in memory
SHOWN_DISTRIBUTIONS = ("points", "quantiles", "gaussian")  # whose quantiles the page computes
# Functions of one number that WebAssembly lacks are those of the browser, in float64.
FUNCTIONS = {1: ("exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "erf"), 2: ("pow", "fmod", "atan2")}
INSTRUCTIONS = ("sqrt", "sqrtf", "fabs", "fabsf", "floor", "floorf", "rint", "rintf")
# Sums may have any order, so that they run over four numbers at once; NaN and infinity are what they are.
FLAGS = (
    "--target=wasm32-freestanding", "-nostdlib", "-std=c99", "-O3", "-msimd128", "-mbulk-memory", "-fno-builtin",
    "-fno-math-errno", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-sanitize=undefined",
    "-Wl,--no-entry", "-Wl,-s",
)  # fmt: skip


def write_page(
    model: nn.Module,
    path: str | PathLike[str],
    example: Tensor | None = None,
    *,
    title: str | None = None,
    rate: int | None = None,
    overlap: int = 0,
) -> None:
    """Write a model as one page of HTML, which opens without a network: its weights and its step are in the page.

    The page of a language model writes, that of a forecaster forecasts, and any other one reads rows of numbers. All
    show how the state moves. In its script, `model.start()` and `model.step(numbers)` are those of `write_c`.

    model, example: as for `write_onnx`.   title: None for the name of the model.   rate: samples a second of sound, a
    piece of which is the input of a step; the page reads files and a microphone.   overlap: samples of a piece that
    the piece before has too.

    Needs the package ziglang, whose compiler writes WebAssembly. Raises ConfigError without it, and as `write_c`.
    """
    file = Path(path)
    check_path(file, [".html"])
    flat = FlatModel(model, example)
    about = {"title": flat.name() if title is None else title, **_form(flat, rate, overlap)}
    if importlib.util.find_spec("ziglang") is None:
        raise ConfigError("export: a page needs ziglang, a compiler: pip install 'scanl[page]'")
    step, source = c_step(flat, "model")
    numbers = _numbers(flat, step)
    program = _program(flat.name(), source, numbers, sum(step.scratch.values()))
    about |= {"numbers": numbers, "bytes": len(program)}
    parts = {"ABOUT": json.dumps(about).replace("<", "\\u003c"), "PROGRAM": _packed(program)}
    text = TEMPLATE.read_text("utf-8")
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    with written_whole(file) as partial:
        partial.write_text(text, encoding="utf-8")


def _header() -> Iterator[str]:
    """Yield the lines of the file that stands for math.h."""
    yield "#define INFINITY __builtin_inff()"
    yield '#define NAN __builtin_nanf("")'
    yield from (f"#define {name} __builtin_{name}" for name in INSTRUCTIONS)
    for count, names in FUNCTIONS.items():
        wide, narrow, passed = (", ".join(f"{kind}{x}" for x in "xy"[:count]) for kind in ("double ", "float ", ""))
        for name in names:
            yield f'__attribute__((import_module("Math"), import_name("{name}"))) double {name}({wide});'
            yield f"static inline float {name}f({narrow}) {{ return (float){name}({passed}); }}"


def _form(flat: FlatModel, rate: int | None, overlap: int) -> dict[str, Any]:
    """Return what the page lets its user do."""
    model = flat.model
    reads = flat.first_step(1).numel()
    if rate is not None:
        if not flat.example.is_floating_point() or rate < 1 or not 0 <= overlap < reads:
            raise ConfigError(
                f"export: rate is {rate} and overlap is {overlap}, expected a rate of at least 1, an overlap of 0 to "
                f"{reads - 1}, and a model that reads real numbers"
            )
        return {"form": "sound", "rate": rate, "overlap": overlap}
    if overlap:
        raise ConfigError(f"export: overlap is {overlap}, expected 0 because rate is None")
    if isinstance(model, LanguageModel):
        return {"form": "text", "bytes_as_text": model.vocab_size == 256}
    if isinstance(model, PretrainedStep):
        return {"form": "series", "ahead": model.horizon, "targets": 1, "distribution": "quantiles", "levels": LEVELS}
    if isinstance(model, Forecaster):
        if model.distribution not in SHOWN_DISTRIBUTIONS:
            raise ConfigError(
                f"export: the forecaster's distribution is {model.distribution}, expected "
                f"{' or '.join(SHOWN_DISTRIBUTIONS)} in a page"
            )
        targets, ahead = model.targets, model.horizon
        return {"form": "series", "ahead": ahead, "targets": targets, "distribution": model.distribution,
                "levels": LEVELS}  # fmt: skip
    return {"form": "series", "ahead": 0, "targets": reads}


def _numbers(flat: FlatModel, step: RecordedFunction) -> dict[str, Any]:
    """Return kind and count of what a step reads and writes, and of each tensor of the state its place in memory."""
    kinds = {pointer: KINDS[kind] for pointer, kind in step.kinds.items() if kind in KINDS}
    state, end = [], 0
    for at, leaf in enumerate(flat.leaves, 1):
        size = BYTE_SIZES[kinds[f"x{at}"]]
        place = -(-end // size) * size
        state.append({"name": leaf.name, "kind": kinds[f"x{at}"], "place": place, "count": leaf.start.numel()})
        end = place + size * max(1, leaf.start.numel())
    tokens = not flat.example.is_floating_point()
    return {
        "x": {"kind": "int" if tokens else kinds["x0"], "count": flat.first_step(1).numel()},
        "y": {"kind": kinds["y0"], "count": Size(step.results[0][0]).numel()},
        "state": state,
        "end": -(-end // 8) * 8,
    }


def _program(name: str, source: str, numbers: dict[str, Any], scratch: int) -> bytes:
    """Return a step as a module of WebAssembly, with its weights. scratch: numbers that the step keeps on its stack."""
    stack = 8 * (scratch + numbers["x"]["count"]) + 2 * numbers["end"] + 2**18
    lines = [
        '#include "model.c"',
        *(f"static {numbers[at]['kind']} {at}[{max(1, numbers[at]['count'])}];" for at in "xy"),
        "static struct model_state s[1];",
        '#define SHOWN(name) __attribute__((export_name(name)))',
        *(f'SHOWN("{at}") void *place_of_{at}(void) {{ return {at}; }}' for at in PLACES),
        'SHOWN("start") void start(void) { model_start(s); }',
        'SHOWN("step") void step(void) { model_step(x, s, y); }',
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        texts = {"model.c": source, "math.h": "\n".join(_header()), "page.c": "\n".join(lines)}
        for each, text in texts.items():
            Path(folder, each).write_text(text + "\n", encoding="ascii")
        command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, f"-Wl,-z,stack-size={stack // 16 * 16}", "-isystem",
                   folder, "page.c", "-o", "page.wasm"]  # fmt: skip
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode != 0:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), "it says nothing")
            raise ConfigError(f"export: ziglang compiles no WebAssembly of {name}: {reason}")
        return Path(folder, "page.wasm").read_bytes()


def _packed(program: bytes) -> str:
    """Return bytes as text: the first ones of each four, the second ones and so on, compressed.

    The exponents of weights then lie side by side, and take less than half of their size.
    """
    padded = program + bytes(-len(program) % 4)
    planes = b"".join(padded[at::4] for at in range(4))
    return base64.b64encode(zlib.compress(planes, 9)).decode()
