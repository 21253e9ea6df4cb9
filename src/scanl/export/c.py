"""A model as one file in C99 that takes one step at a time, without allocation."""

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, nearest
from scanl.export.flat import FlatModel, Leaf, check_path
from scanl.files import written_whole
from scanl.layers.parts.quantized import QuantizedWeight
from scanl.ops._compiler.print_c import KINDS, function, helper, real, row_bytes
from scanl.ops._compiler.recorded import RecordedFunction
from scanl.ops._compiler.recording import record
from scanl.ops._compiler.rules import UnsupportedOperation
from scanl.ops._frame.context import backend, portably
from scanl.ops.products.constants import Constants

PORTABLE = """\
#if defined(__FAST_MATH__) || (FLT_EVAL_METHOD != 0 && FLT_EVAL_METHOD != 16)
#error "The bits need arithmetic by IEEE: no -ffast-math, and SSE2 in the place of the x87"
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#elif defined(_MSC_VER)
#pragma fp_contract(off)
#else
#pragma STDC FP_CONTRACT OFF
#endif"""

WEIGHTS = ["float32", "int8"]
MAX_STEPS = 256  # steps of an example for which weights are rounded
BYTES = {"float": 4, "double": 8, "signed char": 1}


class CFileSizes(NamedTuple):
    """Bytes of a file in C. constants: weights, and what of the first state is not zero.   state: the struct.

    stack: what a step needs. The step takes the same operations each time. The compiler adds its instructions, and a
    few registers to the stack.
    """

    constants: int
    state: int
    stack: int

    def __str__(self) -> str:
        return f"constants {self.constants:,} bytes, state {self.state:,} bytes, stack of a step {self.stack:,} bytes"


def write_c(
    model: nn.Module,
    path: str | PathLike[str],
    example: Tensor | None = None,
    *,
    name: str | None = None,
    weights: str = "float32",
) -> CFileSizes:
    """Write the step of a model as one file in C99, which allocates no memory and needs math.h alone.

    model, example: as for `write_onnx`.   name: what the names in the file begin with; None for the file's name.
    weights: "int8" makes weights of products, convolutions and embeddings whole numbers of 8 bits, each channel with a
    factor of 8 bits. Biases have 16 bits.
    They are rounded so that the products of inputs such as those of the example change least: give real ones.

    The file has a struct and two functions; y has the numbers of the model's output after one step:

        struct NAME_state {...};
        void NAME_start(struct NAME_state *s);
        void NAME_step(const float *x, struct NAME_state *s, float *y);

    x of a model of tokens is `const int *`. Numbers that are float64 in the model, as in a forecaster, are double,
    and so are integers of the state. The weights are const arrays. Returns sizes, which the file says too. Under
    `scanl.exact(portable=True)` y has the bits of the compiled step within that context, by every compiler that keeps
    to IEEE's arithmetic.

    Raises ConfigError for names that C does not have (`name`, keys of the state, the class), or a model whose step
    depends on the numbers or uses an operation that has no loop.
    """
    file = Path(path)
    check_path(file, [".c"])
    name = file.stem if name is None else name
    if not (name.isidentifier() and name.isascii()):
        raise ConfigError(f"export: name is {name!r}, expected an identifier of C; give --name")
    flat = FlatModel(model, example)
    step, source = c_step(flat, name, weights)
    with written_whole(file) as partial:
        partial.write_text(source, encoding="ascii")
    return _sizes(flat, step)


def c_step(flat: FlatModel, name: str, weights: str = "float32") -> tuple[RecordedFunction, str]:
    """Return one step of a model, and its file, in which names begin with `name`. The rest is as in `write_c`."""
    if any(isinstance(part, QuantizedWeight) and part.groups is not None for part in flat.model.modules()):
        raise ConfigError("export: the model has weights of 4 bits, expected 8 bits or floats in C")
    if weights not in WEIGHTS:
        raise nearest("weights of export", weights, WEIGHTS)
    if weights != "float32" and portably():
        raise ConfigError(f"export: weights is {weights!r}, expected 'float32' because of exact(portable=True)")
    _check_names(flat)
    constants = Constants(whole_numbers=weights == "int8")
    try:
        with torch.no_grad():
            if weights == "int8":
                _observe(flat, constants)
            step = RecordedFunction(
                flat,
                flat.first_step(1),
                *flat.start(1),
                portable=portably(),
                constants=None if portably() else constants,  # the compiled step reads them anew
            )
        return step, "\n\n".join(_parts(name, flat, step, _sizes(flat, step), portably())) + "\n"
    except (UnsupportedOperation, RuntimeError) as error:  # torch has no common class for what it cannot export
        raise ConfigError(f"export: {flat.name()} has no step in C: {str(error).splitlines()[0]}") from error


def _observe(flat: FlatModel, constants: Constants) -> None:
    """Let the weights be rounded for the inputs that they have in the example."""
    count = min(flat.example.shape[flat.time] // flat.steps, MAX_STEPS)
    x = flat.example.narrow(flat.time, 0, count * flat.steps)
    rows = 1 if flat.batch is None else x.shape[flat.batch]
    with backend("reference"), constants.observing():
        record(flat, [x, *flat.start(rows)], constants)


def _check_names(flat: FlatModel) -> None:
    """Raise ConfigError for a class or a key of the state that cannot stand in C."""
    if not (flat.name().isascii() and flat.name().isprintable()) or "*/" in flat.name():
        raise ConfigError(f"export: the model is a {flat.name()!r}, expected a name in ASCII, as C code is")
    known: dict[str, str] = {}
    for leaf in flat.leaves:
        field = _field(leaf)
        if not (field.isascii() and field.replace("_", "a").isalnum()):
            raise ConfigError(
                f"export: the state has {leaf.name!r}, expected keys of letters, digits and _, as C has them"
            )
        if field in known:
            raise ConfigError(
                f"export: the state has {known[field]!r} and {leaf.name!r}, expected keys that differ in C, where both "
                f"are {field}"
            )
        known[field] = leaf.name


def _field(leaf: Leaf) -> str:
    return leaf.name.replace(".", "_")


def _sizes(flat: FlatModel, step: RecordedFunction) -> CFileSizes:
    """Return the sizes of the file. A row of whole numbers stands on the stack in its product."""
    parts = [max(1, leaf.start.numel()) * BYTES[KINDS[step.kinds[f"x{at}"]]] for at, leaf in enumerate(flat.leaves, 1)]
    state, starts = sum(parts), sum(part for part, leaf in zip(parts, flat.leaves, strict=True) if leaf.start.any())
    weights = sum(_stored(tensor).numel() * BYTES[KINDS[step.kinds[at]]] for at, tensor in step.captured.items())
    scratch = sum(size * BYTES[KINDS[kind]] for kind, size in step.scratch.items())
    tokens = 0 if flat.example.is_floating_point() else 8 * flat.first_step(1).numel()
    return CFileSizes(weights + starts, state, scratch + state + tokens + row_bytes(step.schedule.functions))


def _parts(name: str, flat: FlatModel, step: RecordedFunction, sizes: CFileSizes, portable: bool) -> Iterator[str]:
    """Yield the parts of the file."""
    schedule, kinds = step.schedule, {pointer: KINDS[kind] for pointer, kind in step.kinds.items() if kind in KINDS}
    fields = {_field(leaf): f"x{at}" for at, leaf in enumerate(flat.leaves, 1)}
    counts = [max(1, leaf.start.numel()) for leaf in flat.leaves]
    tokens = not flat.example.is_floating_point()
    reads, outputs = flat.first_step(1).numel(), torch.Size(step.results[0][0]).numel()
    yield "\n".join([
        f"/* One step of a {flat.name()}: {name}_start(&s), then {name}_step(x, &s, y) for each step.",
        f"   x: {reads} numbers.   y: {outputs} numbers.",
        f"   {sizes}. */",
        *(["#include <float.h>"] if portable else []),
        "#include <math.h>",
        *(["#include <stdint.h>", PORTABLE] if portable else []),
    ])  # fmt: skip
    members = [f"    {kinds[at]} {field}[{count}];" for (field, at), count in zip(fields.items(), counts, strict=True)]
    yield "\n".join([f"struct {name}_state {{", *members, "};"])
    for pointer, tensor in step.captured.items():
        numbers, kind = _stored(tensor), kinds[pointer]
        yield f"static const {kind} {pointer}[{max(1, numbers.numel())}] = {_numbers(numbers, kind)};"
    functions = [function(_name(loop), made, portable) for made, loop in schedule.functions.items()]
    needed = set().union(*(helpers for _, helpers in functions))
    if portable:
        from scanl.ops._cpu._elementary_c import definitions  # with numba, which takes long to import

        yield from definitions(called for called, _ in needed)
    else:
        yield from (helper(*each) for each in sorted(needed))
    yield from (text for text, _ in functions)
    begun, starts = [], []
    for (field, at), leaf in zip(fields.items(), flat.leaves, strict=True):
        count, zero = max(1, leaf.start.numel()), not leaf.start.any()
        if not zero:
            starts.append(f"    static const {kinds[at]} {field}[{count}] = {_numbers(leaf.start, kinds[at])};")
        begun.append(f"    for (int i = 0; i < {count}; i++) s->{field}[i] = {0 if zero else f'{field}[i]'};")
    yield "\n".join([f"void {name}_start(struct {name}_state *s)", "{", *starts, *begun, "}"])
    memories = {at: f"s->{field}" for field, at in fields.items()}
    memories |= {f"y{number}": f"next.{field}" for number, field in enumerate(fields, 1)}
    memories |= {"x0": "tokens" if tokens else "x", "y0": "y"}
    scratch = [f"    {KINDS[kind]} scratch{kind[-2:]}[{size}];" for kind, size in step.scratch.items() if size]
    calls = []
    for loop, views in schedule.calls:
        places = []
        for memory, offset in ((view.memory, view.offset + view.memory.offset) for view in views):
            if memory.kind not in KINDS:  # the other threads
                continue
            place = memories.get(memory.name, memory.name)
            places.append(f"{place} + {offset}" if offset else place)
        calls.append(f"    {_name(loop)}({', '.join(places)});")
    converted = [f"    double tokens[{reads}];", f"    for (int i = 0; i < {reads}; i++) tokens[i] = x[i];"]
    yield "\n".join([
        f"void {name}_step(const {'int' if tokens else kinds['x0']} *x, struct {name}_state *s, {kinds['y0']} *y)",
        "{",
        f"    struct {name}_state next;",
        *scratch,
        *(converted if tokens else []),
        *calls,
        "    *s = next;",
        "}",
    ])  # fmt: skip


def _name(loop: str) -> str:
    return loop.removeprefix("_")


def _stored(tensor: Tensor) -> Tensor:
    """Return all numbers of the memory of a tensor, which may be a view of it."""
    memory = tensor.detach().new_empty(0).set_(tensor.untyped_storage())
    return torch.view_as_real(memory) if memory.is_complex() else memory


def _numbers(tensor: Tensor, kind: str) -> str:
    """Return an initialiser."""
    values = tensor.flatten().tolist()
    if not any(values):
        return "{0}"
    texts = [str(int(value)) if kind == KINDS["int8"] else real(value, kind) for value in values]
    lines = [", ".join(texts[at : at + 16]) for at in range(0, len(texts), 16)]
    return "{\n    " + ",\n    ".join(lines) + "\n}"
