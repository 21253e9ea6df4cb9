"""From a module of torch to its streaming form."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export, load

from scanl.errors import ConfigError
from scanl.hub.streaming.onnx_module import ONNXModule
from scanl.hub.streaming.stream import StreamingModule
from scanl.hub.streaming.survey import LEAST_ENTRIES, UnstreamableError

EXAMPLE_STEPS = 12  # of an example that no one gave
LONGEST_EXAMPLE = 12_000
LAST_PLACE = 1 << 30  # behind every operation


def convert(
    module: nn.Module | ExportedProgram | str | PathLike[str],
    example: Tensor | None = None,
    *,
    time: int | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> StreamingModule:
    """Return the streaming form of a module, which reads a sequence in pieces.

    It is found: the module is exported by `torch.export`, and runs once over the example. Each nn.GRU, nn.LSTM and
    nn.RNN, each convolution, pooling and `unfold` along time keeps a state; what stands before the first step (causal
    padding) is a part of the first state. Every other operation has to give for each entry by itself what it gives for
    all, which is tried on random numbers. Where a part looks ahead (a bidirectional recurrence, a centred convolution,
    attention over all steps), the error names it. At last the stream reads the example in pieces, and has to give what
    the module gives.

    module: a module with one tensor for its input, the program of one, or the path of a file that `torch.export.save`
    wrote, or of an ONNX file. The stream has the module's own parameters. Of an ONNX file it reads the first input, and
    gives the first output; inputs that are the first state of a recurrence are zeros.   example: an input; None to make
    one for the module's first part.   time: the time axis of the input; None to find it.   inputs: of an ONNX file,
    values of other inputs by name.

    Raises ConfigError for a module with a part that has no streaming form, and names the part.
    """
    if isinstance(module, str | PathLike):
        path = Path(module)
        module = ONNXModule(_found(path), inputs) if path.suffix == ".onnx" else _program(_found(path))
    if isinstance(module, ExportedProgram):
        (given,), _ = module.example_inputs or ((None,), {})
        return _converted(module, _checked(given if example is None else example, 1), time, None)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"convert: module is a {type(module).__name__}, expected a torch.nn.Module")
    if example is not None:
        return _streaming(module, _checked(example, 2), time)
    errors: list[ConfigError] = []
    for x in _examples(module):
        try:
            return _streaming(module, x, time)
        except UnstreamableError:
            raise
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    raise ConfigError(f"convert: example is None for a {type(module).__name__}, expected an input of the module")


def _streaming(module: nn.Module, x: Tensor, time: int | None) -> StreamingModule:
    """Return the stream of a module, from an example that is repeated where more steps tell more."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        while True:
            try:
                return _converted(_exported(module, x), x, time, module)
            except UnstreamableError as error:
                steps = -(-x.shape[error.time] // error.multiple) * error.multiple if error.multiple else 0
                if not x.shape[error.time] < steps <= LONGEST_EXAMPLE:
                    raise
                x = _repeated(x, error.time, steps)
    finally:
        for part, training in modes:
            part.training = training


def _converted(program: ExportedProgram, x: Tensor, time: int | None, module: nn.Module | None) -> StreamingModule:
    """Return the stream of a program, or raise the error of the time axis that most of the program can have."""
    changed = sorted(program.graph_signature.buffers_to_mutate.values())
    if changed:
        raise ConfigError(
            f"convert: the module changes its buffer {changed[0]}, expected one that keeps no state itself"
        )
    axes = [axis for axis in (1, 2, 0) if axis < x.ndim and x.shape[axis] >= LEAST_ENTRIES]
    if time is not None:
        axes = [time % x.ndim]
    form = program.call_spec.out_spec
    assert form is not None
    with _quiet():
        runs = program.module(check_guards=False)
    errors: list[UnstreamableError] = []
    for axis in axes:
        try:
            stream = StreamingModule(runs, form, x, axis)
            if module is None:
                _check(stream, x, runs)
            else:
                _check(stream, _repeated(x, axis, 2 * x.shape[axis]), module)
        except UnstreamableError as error:
            error.time = axis
            errors.append(error)
        else:
            return stream
    raise max(errors, key=lambda error: (error.place, error.ahead))


def _check(stream: StreamingModule, x: Tensor, module: nn.Module) -> None:
    """Raise UnstreamableError unless pieces of the example give what the module gives."""
    steps = x.shape[stream.time]
    cuts = sorted({0, 1, 2, min(2 + stream.stride, steps), steps // 2, steps})
    with torch.no_grad():
        whole = module(x)
        pieces, state = [], None
        for start, end in pairwise(cuts):
            y, state = stream(x.narrow(stream.time, start, end - start), state)
            pieces.append(y)
    if not stream.joins(pieces, whole):
        raise UnstreamableError("convert: the module gives pieces another result than the whole sequence", LAST_PLACE)


def _exported(module: nn.Module, x: Tensor) -> ExportedProgram:
    with _quiet(), torch.no_grad():
        try:
            return export(module, (x,), dynamic_shapes=(dict.fromkeys(range(x.ndim), Dim.AUTO),), strict=False)
        except Exception as error:  # torch has no common class for what it cannot export
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ConfigError(f"convert: torch.export has no program of {type(module).__name__}: {reason}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what torch.export says of torch's own functions, and of the list of weights that an nn.LSTM has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _found(path: Path) -> Path:
    if not path.is_file() or path.suffix not in (".pt2", ".onnx"):
        raise ConfigError(f"convert: module is {path}, expected a file .pt2 that torch.export.save wrote, or .onnx")
    return path


def _program(path: Path) -> ExportedProgram:
    with _quiet():
        return load(path)


def _repeated(x: Tensor, axis: int, steps: int) -> Tensor:
    """Return the sequences again and again, up to so many steps."""
    return torch.cat([x] * -(-steps // x.shape[axis]), axis).narrow(axis, 0, steps)


def _checked(example: Any, rows: int) -> Tensor:
    """Return the example with at least so many sequences: torch.export takes a size of 1 for a fixed one."""
    if not isinstance(example, Tensor) or example.ndim < 2 or max(example.shape) < LEAST_ENTRIES:
        form = tuple(example.shape) if isinstance(example, Tensor) else type(example).__name__
        raise ConfigError(
            f"convert: example is {form}, expected a tensor of sequences with {LEAST_ENTRIES} steps or more"
        )
    return torch.cat([example] * rows) if len(example) == 1 else example


def _examples(module: nn.Module) -> Iterator[Tensor]:
    """Yield inputs for the first part of the module that says what it reads; the module may turn its axes before."""
    steps = EXAMPLE_STEPS
    for part in module.modules():
        match part:
            case ONNXModule():
                yield _checked(part.example(), 1)
                return
            case nn.Embedding():
                yield torch.randint(part.num_embeddings, (2, steps))
                return
            case nn.RNNBase():
                width, first = part.input_size, (2, steps) if part.batch_first else (steps, 2)
            case nn.Conv1d():
                width, first = part.in_channels, (2, 0)
            case nn.Linear():
                width, first = part.in_features, (2, steps)
            case _:
                continue
        for order in dict.fromkeys((first, (2, steps), (2, 0), (steps, 2))):
            yield torch.randn(*order, width) if order[1] else torch.randn(2, width, steps)
        return
