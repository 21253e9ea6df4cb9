"""`scanl list` and `scanl show NAME`: layers, whole models, learning algorithms, and whatever else has a name."""

import copy
import inspect
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any

import torch

from scanl import layers
from scanl.cli.columns import row
from scanl.cli.parser import Parser
from scanl.layers import Layer, build, get
from scanl.layers.initial_state import rows as state_rows
from scanl.layers.registry import layers as layers_by_name
from scanl.layers.state import leaves
from scanl.learning.algorithms import algorithms
from scanl.models import Stack, presets
from scanl.models.presets import Preset, WholeModel, wholes
from scanl.ops import backend
from scanl.ops import registry as ops
from scanl.ops.registry import Backend
from scanl.options import Option, Positive, options
from scanl.registry import Registry, look_up

BODIES = "Bodies and wrappers of other layers"
TITLES = {
    "whole model": "Whole models",
    "algorithm": "Learning algorithms",
    "channel mixer": "Channel mixers",
    "task": "Tasks",
    "source": "Sources of data",
}
LEGEND = """\
linear: the next state is a linear function of the state, and something added. elementwise: a number of the state acts
on itself alone, or on one more. gated: what is kept of the state depends on the input; of a recurrence that is not
linear: its equation has a gate. online: each channel has a recurrence of its own, so real-time recurrent learning is
cheap. time, state: how the work over a sequence of T steps, and the state, grow with T; W is the size of a window, a
segment or a chunk, and a state of O(T) ends at `max_length`."""
FIXED_POINT = "fixed_point"  # the op of layers that iterate
NAME_WIDTH = 22  # letters of most names
WIDTH = 256  # model width for which sizes are printed
Entry = tuple[str, type[Any]]
HANGING_INDENT: Any = {"initial_indent": " " * 12, "subsequent_indent": " " * 14}


def options_of(name: str) -> list[Option]:
    """Return a layer's options, except its width."""
    return [option for option in options(get(name)).values() if option.name != "dim"]


def list_layers(argv: Sequence[str]) -> int:
    """Print a line for each registered layer, whole model and learning algorithm, or for the names that are asked.

    With --long: what kind of recurrence a layer is, which is measured, what it costs, and its equation too.
    """
    parser = Parser("list", "The layers by family, the whole models and the learning algorithms, a line each.")
    parser.add_argument("names", type=str, nargs="*", help="only these, by any name of the literature")
    parser.add_argument("--long", action="store_true", help="the kind, the cost and the equation of each layer too")
    args = parser.parse(argv)
    groups: dict[str, list[Entry]] = {}
    asked = dict.fromkeys(pair for name in args.names for pair in _found(name))
    for registry, name in asked or _all():
        cls = registry.get(name)
        groups.setdefault(_family(cls) if registry is layers_by_name else TITLES[registry.kind], []).append((name, cls))
    for title, group in groups.items():
        print(f"{title}:")
        for name, cls in group:
            origin = f" A preset of {cls.preset_of.name}." if issubclass(cls, Layer) and cls.preset_of else ""
            print(_cut(f"{name:<{NAME_WIDTH}}  {summary(cls)}{origin}"))
            for line in _facts(cls) if args.long else ():
                print(f"{'':<{NAME_WIDTH}}  {line}")
        print()
    rest = "" if args.long else "; `scanl list --long` has the kinds, costs and equations"
    print(f"{LEGEND}\n\n" * args.long + f"`scanl show NAME` says all of one{rest}.")
    return 0


def _facts(cls: type[Any]) -> list[str]:
    """Return the lines of `scanl list --long` below the first: the kind and the cost of a layer, and the equation."""
    recurrence = [row(cls)] if issubclass(cls, Layer) else []
    return [*recurrence, getattr(_made(cls), "equation", "") or f"scanl.models.{cls.__name__}"]


def _cut(line: str) -> str:
    """Return a line as it fits the terminal; for a file or a pipe, the whole line."""
    width = shutil.get_terminal_size().columns
    return line if len(line) <= width or not sys.stdout.isatty() else f"{line[: width - 4]} ..."


def _all() -> list[tuple[Registry[Any], str]]:
    """Return every entry of `scanl list`."""
    return [(kind, name) for kind in (layers_by_name, presets, wholes, algorithms) for name in kind.names()]


def _found(name: str) -> list[tuple[Registry[Any], str]]:
    """Return the entries of a name, the nearest spelling first. Raises ConfigError for an unknown name."""
    found = look_up(name)
    if not found:
        get(name)  # which says what is near, or what has the part of this name
    return found


def _made(cls: type[Any]) -> Any:
    """Return the function or class that a whole model's record stands for; any other class itself."""
    return cls.make if issubclass(cls, WholeModel) else cls


def _family(cls: type[Layer]) -> str:
    """Return the part of the folder's docstring that is about its layers."""
    package = sys.modules[cls.__module__.rpartition(".")[0]]
    return BODIES if package is layers else (inspect.getdoc(package) or package.__name__).partition("\n")[0].rstrip(".")


def describe(name: str, dim: int = WIDTH) -> str:
    """Describe a layer or a preset. The text is the same on any machine."""
    return describe_preset(name, dim) if name in presets.names() else describe_layer(name, dim)


def describe_other(registry: Registry[Any], name: str) -> str:
    """Describe an entry that is neither a layer nor a pattern of layers, from its declarations and its docstring."""
    cls = registry.get(name)
    made = _made(cls)
    facts = {"kind": registry.kind, "use": registry.usage(name)}
    if issubclass(cls, WholeModel):
        facts["options"] = str(inspect.signature(made))
    declared = ("equation", "source", "computes", "error", "memory", "operations", "works_for")
    facts |= {title: value for title in declared if isinstance(value := getattr(made, title, ""), str) and value}
    lines = [_row((title.replace("_", " "), text)) for title, text in facts.items()]
    about = [textwrap.indent(paragraph, " " * 12) for paragraph in paragraphs(cls)[1:]]
    return "\n".join([f"{name}: {summary(cls)}", "", *lines, *(line for part in about for line in ("", part))])


def describe_preset(name: str, dim: int) -> str:
    """Describe a whole model, built as a stack of one period with the stack's default options."""
    cls = presets.get(name)
    stack = Stack(dim, len(cls.layers), name)
    parameters = sum(p.numel() for p in stack.parameters())
    period = f"in {len(cls.layers)} blocks of dim {dim}"
    rows = [
        ("equation", cls.equation),
        ("source", cls.source),
        ("layers", ", ".join(cls.layers)),
        ("options", "of each layer by its name: --layer-options '{" + f"{cls.layers[0]}: {{...}}" + "}'"),
        ("parameters", f"{parameters:,} {period}"),
        ("state", f"{state_size(stack):,} floats a sequence {period}"),
        ("step", f"{step_cost(stack):,} multiplications by matrices {period}"),
        *_about(cls),
    ]
    return "\n".join([f"{name}: {summary(cls)}", "", *map(_row, rows)])


def describe_layer(name: str, dim: int) -> str:
    """Describe a layer, built with its default options."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # how many steps an ODE solver takes depends on the weights
        cls, layer = get(name), build(name, dim)
    parameters = sum(p.numel() for p in layer.parameters())
    state = step = "none: it reads the whole sequence"
    if not layer.bidirectional:
        carried = "" if cls.state is None else "; ".join(["", *dict.fromkeys(state_rows(cls.state, layer=layer))])
        state = f"{state_size(layer):,} floats a sequence at dim {dim}{carried}"
        counted = " for each evaluation of its map" if layer.op == FIXED_POINT else ""
        step = f"{step_cost(layer):,} multiplications by matrices at dim {dim}{counted}"
    rows = [
        ("equation", cls.equation),
        ("source", cls.source),
        *([] if cls.preset_of is None else [("preset of", origin(cls)), *_about(cls)]),
        ("options", ", ".join(f"{option.name}={option.default}" for option in options_of(name))),
        ("parameters", f"{parameters:,} at dim {dim}"),
        ("state", state),
        ("step", step),
        ("recurrence", row(cls)),
        *_reads(layer),
        ("op", cls.op or without_op(layer)),
    ]
    lines = [f"{name}: {summary(cls)}", ""]
    for fact in rows:
        lines.append(_row(fact))
        if fact[0] == "options":
            meanings = [f"{option.name}: {option.meaning}." for option in options_of(name)]
            lines += [textwrap.fill(meaning, 100, **HANGING_INDENT, break_long_words=False) for meaning in meanings]
    for entry in backends(cls):
        where = "any device" if entry.devices is None else ", ".join(entry.devices)
        if entry.name == "triton" and isinstance(ops.get(str(cls.op)), ops.Cell):
            where += "; it refuses some cells, see docs/cell_kernels.md"
        lines.append(f"{'':<12}{entry.name}: {where}")
    return "\n".join(lines)


def _about(cls: type[Layer | Preset]) -> list[tuple[str, str]]:
    """Return the parts of a preset's docstring below its first line."""
    return [("" if i else "about", " ".join(paragraph.split())) for i, paragraph in enumerate(paragraphs(cls)[1:])]


def _reads(layer: Layer) -> list[tuple[str, str]]:
    """Return the row that names the modules whose weights the layer reads; none for a layer that calls them all."""
    paths = ", ".join(layer.read_paths())
    return [("reads", f"the weights of {paths}: no hooks or wrappers there")] if paths else []


def _row(fact: tuple[str, str]) -> str:
    title, text = fact
    line, indent = f"{title:<12}{text}", " " * 12
    return textwrap.fill(line, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def show_layer(argv: Sequence[str]) -> int:
    """Print the description of what a name stands for; of a layer, then the facts that depend on this machine."""
    parser = Parser(
        "show", "One layer, whole model, algorithm, task or source: equation, source, options, size, backends."
    )
    parser.add_argument("name", type=str, help="any name of the literature; `scanl list` prints those of scanl")
    parser.add("--dim", Positive, "model width for the sizes", WIDTH)
    args = parser.parse(argv)
    (registry, name), *others = _found(args.name)
    also = [f"{other.kind}: {known}, {other.usage(known)}" for other, known in others]
    if registry not in (layers_by_name, presets):
        print(describe_other(registry, name))
        print("\n".join(f"{'' if i else 'also':<12}{line}" for i, line in enumerate(also)), end="\n" if also else "")
        return 0
    is_preset, cls = registry is presets, registry.get(name)
    print(describe(cls.name, args.dim))
    layer = Stack(args.dim, len(presets.get(cls.name).layers), cls.name) if is_preset else build(cls.name, args.dim)
    here = [] if layer.bidirectional else [f"{step_time(layer):.2f} ms a step, of one sequence on the CPU"]
    entries = [] if is_preset else backends(get(cls.name))
    here += [f"{entry.name}: package {entry.package} is not installed" for entry in entries if entry.package]
    for title, lines in (("here", here), ("also", also)):
        for i, line in enumerate(lines):
            print(f"{'' if i else title:<12}{line}")
    return 0


def origin(cls: type[Layer]) -> str:
    """Return a preset's layer and options as a call."""
    assert cls.preset_of is not None
    return f"{cls.preset_of.name} with " + ", ".join(f"{name}={value!r}" for name, value in cls.preset_options.items())


def paragraphs(cls: type[Any]) -> list[str]:
    return inspect.cleandoc(_made(cls).__doc__ or "").split("\n\n")


def summary(cls: type[Any]) -> str:
    """Return the first line of a docstring as it is written. What is made from declarations below it takes time."""
    made = _made(cls)
    return inspect.cleandoc(vars(made).get("__doc__") or made.__doc__ or "").partition("\n")[0]


def backends(cls: type[Layer]) -> list[Backend]:
    if cls.op is None:
        return []
    return [ops.get(cls.op).backends[name] for name in ops.get(cls.op).preference()]


def without_op(layer: Layer) -> str:
    if any(isinstance(module, Layer) for module in layer.modules() if module is not layer):
        return "of the layer inside"
    return "plain functions of PyTorch and scanl.ops"


@torch.no_grad()
def step_cost(layer: Layer | Stack) -> int:
    """Count the multiplications in matrix products for one token of one sequence, from the empty state.

    A layer that iterates evaluates its map once: how often it iterates depends on the numbers, and on the processor.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports triton: too slow for `scanl list`

    # On the meta device a map is evaluated once. In float64 rounding does not decide how often an ODE solver steps.
    device = "meta" if isinstance(layer, Layer) and layer.op == FIXED_POINT else "cpu"
    layer = copy.deepcopy(layer).to(device, torch.float64)
    x, state = torch.zeros(1, 1, layer.dim, device=device, dtype=torch.float64), layer.init_state(1)
    cell = isinstance(layer, Layer) and layer.op in {op.name for op in ops.cells()}
    fused = torch.backends.mkldnn.enabled
    try:
        torch.backends.mkldnn.enabled = False  # the counter misses its fused LSTM, and not every machine has it
        # the products of a cell are inside its kernels; the loop shows them, and compiles nothing
        with FlopCounterMode(display=False) as counter, backend("reference" if cell else "auto"):
            layer(x, state)
    finally:
        torch.backends.mkldnn.enabled = fused
    return counter.get_total_flops() // 2


@torch.no_grad()
def step_time(layer: Layer | Stack) -> float:
    """Measure the milliseconds for one token of one sequence on this machine."""
    x, state = torch.zeros(1, 1, layer.dim), layer.init_state(1)
    layer(x, state)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        layer(x, state)
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times)


def state_size(layer: Layer | Stack) -> int:
    """Count the floats in the state of one sequence. A complex number counts as two."""
    parts = [(2 if leaf.is_complex() else 1) * leaf.numel() for _, leaf in leaves(layer.init_state(1, device="meta"))]
    return sum(parts)
