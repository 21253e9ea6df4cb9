"""Export layers and models, run the files, and compare the numbers with those of scanl.

    python benchmarks/quality/exports.py                 # every layer, and three models: an hour on one core
    python benchmarks/quality/exports.py gru forecaster  # some of them

Layers have random weights; the models (a language model, a forecaster, a classifier) are trained for a few seconds.
Each is written in both formats. onnxruntime reads three sequences in two pieces and then step by step, each time from
the state that it returned. The C file is compiled with -Wall -Wextra -pedantic -Werror -std=c99 and reads a sequence
step by step. An error is the norm of the difference over the norm of what scanl computes; of a file of ONNX it is the
largest one of the outputs and the tensors of the last state.
"""

import ctypes
import functools
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.export import start_state, write
from scanl.export.flat import FlatModel
from scanl.layers import registry
from scanl.models import Features, Forecaster, LanguageModel, SequenceClassifier, Stack

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser

DIM, STEPS, UPDATES = 12, 24, 100
FLAGS = ("-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", "-O2", "-shared", "-fPIC")
Loss = Callable[[], Tensor]


def spoken() -> tuple[nn.Module, Loss]:
    """Return a language model, and its loss on a text that repeats."""
    model = LanguageModel(128, Stack(DIM, 2, "gated_deltanet", layer_options={"num_heads": 2}))
    text = torch.tensor([list(b"Once upon a time there was a state. " * 3)])
    return model, lambda: nn.functional.cross_entropy(model(text[:, :-1])[0].mT, text[:, 1:])


def forecast() -> tuple[nn.Module, Loss]:
    """Return a forecaster, and its loss on waves."""
    model = Forecaster(3, Stack(DIM, 2, "hawk"))
    waves = (torch.arange(STEPS + 3.0) / 2 + torch.rand(8, 1) * 6).sin()[..., None] * 20 + 100
    targets = waves.unfold(1, 3, 1)[:, 1:].movedim(-1, 2)
    return model, lambda: model.loss(waves[:, :STEPS], targets[:, :STEPS])[0]


def classified() -> tuple[nn.Module, Loss]:
    """Return a classifier, and its loss on the question which of two channels has the larger mean."""
    model, x = SequenceClassifier(2, Stack(DIM, 2, "mingru"), Features(2)), torch.randn(32, STEPS, 2)
    return model, lambda: nn.functional.cross_entropy(model(x)[0], x.mean(1).argmax(1))


MODELS: dict[str, Callable[[], tuple[nn.Module, Loss]]] = {
    "language model": spoken,
    "forecaster": forecast,
    "classifier": classified,
}


def trained(name: str, updates: int) -> nn.Module:
    """Return a model that has learnt."""
    torch.manual_seed(0)
    model, loss = MODELS[name]()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(updates):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return model.eval()


def made(name: str, updates: int) -> nn.Module:
    """Return a layer of small sizes, or a trained model."""
    if name in MODELS:
        return trained(name, updates)
    torch.manual_seed(0)
    layer = registry.build(name, DIM, **registry.get(name).sample).eval()
    with torch.no_grad():  # move parameters away from special values: zero biases, unit norms
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def difference(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    infinite = expected.isinf()
    assert torch.equal(actual[infinite], expected[infinite])
    actual, expected = actual.masked_fill(infinite, 0), expected.masked_fill(infinite, 0)
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-30)).item() if expected.numel() else 0.0


@torch.no_grad()
def by_onnx(model: nn.Module, file: Path) -> float:
    """Return the largest error of outputs and last states of onnxruntime, in pieces and steps."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    state = start_state(session.get_modelmeta().custom_metadata_map["state"], 3)
    flat, x, outputs = FlatModel(model), inputs(model, 3), []
    for piece in x.split([STEPS // 2, STEPS // 2 - 4, 1, 1, 1, 1], 1):
        y, *last = session.run(None, {"x": piece.numpy(), **state})
        state = dict(zip(state, last, strict=True))
        outputs.append(torch.from_numpy(y))
    expected, *after = flat(x, *flat.start(3))
    pooled = expected.shape[:2] != x.shape[:2]  # one answer for the whole sequence
    errors = [difference(outputs[-1] if pooled else torch.cat(outputs, 1), expected)]
    errors += [difference(torch.from_numpy(a), b) for a, b in zip(state.values(), after, strict=True)]
    return max(errors)


@torch.no_grad()
def by_c(model: nn.Module, file: Path) -> float:
    """Return the error of the outputs of a C file."""
    library = file.with_suffix(".so")
    subprocess.run(["cc", *FLAGS, str(file), "-o", str(library), "-lm"], check=True)
    functions, flat, x = ctypes.CDLL(str(library)), FlatModel(model), inputs(model, 1)
    state = ctypes.create_string_buffer(16 * sum(leaf.start.numel() + 1 for leaf in flat.leaves))
    functions.model_start(state)
    actual, expected, now = [], [], flat.start(1)
    for step in x.split(1, 1):
        y, *now = flat(step, *now)
        numbers = np.zeros(y.numel(), np.float64 if y.dtype == torch.float64 else np.float32)
        read = step.contiguous().numpy() if x.is_floating_point() else step.int().numpy()
        functions.model_step(read.ctypes.data_as(ctypes.c_void_p), state, numbers.ctypes.data_as(ctypes.c_void_p))
        expected.append(y.flatten())
        actual.append(torch.from_numpy(numbers))
    return difference(torch.stack(actual), torch.stack(expected))


def inputs(model: nn.Module, rows: int) -> Tensor:
    torch.manual_seed(1)
    example = FlatModel(model).example
    if not example.is_floating_point():
        return torch.randint(100, (rows, STEPS))
    return torch.randn(rows, STEPS, example.shape[-1])


FORMATS: dict[str, Callable[[nn.Module, Path], float]] = {".onnx": by_onnx, ".c": by_c}


def main() -> int:
    words = parser(__doc__, [*MODELS, *registry.names(presets=False)])
    words.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    options = parse(words)
    results = Results("exports", options)
    for name in options.names:
        model = functools.cache(functools.partial(made, name, 2 if options.quick else UPDATES))
        for ending in options.formats:
            if results.has(name=name, format=ending):
                continue
            begin = time.process_time()
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, f"model{ending}")
                row = {"name": name, "kind": "model" if name in MODELS else "layer", "format": ending}
                try:
                    write(model(), file)
                except ConfigError as error:
                    results.add(**row, refusal=re.sub(r"\s+", " ", str(error))[:160])
                    continue
                results.add(**row, refusal="", error=FORMATS[ending](model(), file), bytes=file.stat().st_size,
                            seconds=time.process_time() - begin)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
