"""`scanl inspect RUN|LAYER`: what the layers of a run, or a new layer, remember: tables, pictures and CSV files."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scanl.cli.parser import Parser
from scanl.data.base import Source
from scanl.errors import ConfigError, ScanlError
from scanl.files import CONFIG, check_new_folder
from scanl.inspect import Inspection, Inspector, inspectors, readings, save_columns, save_picture
from scanl.inspect.base import noise
from scanl.layers import Layer, build
from scanl.layers.designation import label, make_layer
from scanl.learning import RunFolder
from scanl.learning.evaluation import trained
from scanl.learning.questions import Model, answerer
from scanl.models import Stack, presets
from scanl.options import Positive, PositiveOrNone

DIM = 64  # width of a new layer
STEPS = 256  # that the layers of a model read
ROWS = 2  # sequences

Read = Mapping[str, tuple[Layer, Tensor | None]]  # layers by name, and what each reads; None: what an inspector chooses


def run(argv: Sequence[str]) -> int:
    """Print a table for each inspector, and write its picture and its data."""
    parser = Parser("inspect", "What a layer, or each layer of a run, remembers.")
    parser.add("of", str | None, "a run folder, or a layer's name", nargs="?", metavar="RUN|LAYER")
    parser.add("--what", str, "inspectors; none: all that serve the layer", [], nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the inspectors")
    parser.add("--out", str | None, "folder; none: RUN/inspect, or inspect/LAYER", metavar="PATH")
    parser.add("--dim", Positive, "of a layer by name: its width", DIM)
    parser.add("--layer-options", dict[str, Any], "the layer's options, as for train", {})
    parser.add("--steps", PositiveOrNone, f"steps that the layers read; none: {STEPS} of a run's data")
    args = parser.parse(argv)
    if args.list:
        print("\n\n".join(map(described, map(inspectors.get, inspectors.names()))))
        return 0
    if args.of is None:
        raise ConfigError("inspect: no run or layer is named, expected one; `scanl list` prints the layers")
    chosen = [inspectors.get(name) for name in args.what or inspectors.names()]
    if os.sep in args.of or (Path(args.of) / CONFIG).is_file():
        folder = RunFolder.open(args.of)
        layers, out = layers_of_run(folder, args.steps or STEPS), folder.path / "inspect"
    else:
        layers, out = layers_by_name(args.of, args.dim, args.layer_options, args.steps)
    out = out if args.out is None else Path(args.out)
    check_new_folder("inspect", "out", out)
    for one in chosen:
        inspections, refusals = inspected(one, layers)
        if not inspections and args.what:
            raise ConfigError("; ".join(dict.fromkeys(refusals.values())))
        print(table(one, inspections, refusals), flush=True)
        if inspections:
            out.mkdir(parents=True, exist_ok=True)
            picture = save_picture(out / f"{one.name}.png", inspections, one.title)
            print(f"  {picture}, {save_columns(out / f'{one.name}.csv', inspections).name}\n", flush=True)
    return 0


def described(one: Inspector[..., Any]) -> str:
    """Return the lines of an inspector in the list."""
    return f"{one.name}: {one.title}. For {one.takes}.\n    {one.equation}\n    {one.source}"


def layers_of_run(folder: RunFolder, steps: int) -> Read:
    """Return the layers of a run's model, and what they read of the data that it was not trained on."""
    model = trained(folder)
    return read_by(model, folder.source, steps)


def read_by(model: Model, source: Source, steps: int) -> Read:
    """Return the layers of a model, and what they read of the first examples of the source's exam."""
    method = answerer(source.question)
    batch = next(iter(source.exam(sample=True).examples)).rows(slice(ROWS))
    with torch.no_grad(), readings(model) as layers:
        method.answers(model.eval(), batch.steps(0, steps, targets=method.every_step).tensors())
    return layers


def layers_by_name(name: str, dim: int, options: Mapping[str, Any], steps: int | None) -> tuple[Read, Path]:
    """Return a new layer, or the layers of a whole model, and the folder for their pictures."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if presets.find(name) is not None:
            cls = presets.get(name)
            stack = Stack(dim, len(cls.layers), name, layer_options=options or None)
            with torch.no_grad(), readings(stack) as layers:
                stack(noise(ROWS, steps or STEPS, dim).float())
            return layers, Path("inspect", cls.name)
        layer = build(name, dim, **options) if ":" not in name else make_layer(name, dim, options)
    return {label(layer): (layer, None if steps is None else noise(ROWS, steps, dim))}, Path("inspect", label(layer))


def inspected(one: Inspector[..., Any], layers: Read) -> tuple[dict[str, Inspection], dict[str, str]]:
    """Return what an inspector returns for each layer, and for the others why it refuses them."""
    inspections, refusals = {}, {}
    for name, (layer, x) in layers.items():
        try:
            inspections[name] = one(layer, None if one.own_signal else x)
        except ScanlError as error:
            refusals[name] = str(error)
    return inspections, refusals


def table(one: Inspector[..., Any], inspections: Mapping[str, Inspection], refusals: Mapping[str, str]) -> str:
    """Return the figures of each layer in a line, under their names."""
    figures = {name: inspection.figures() for name, inspection in inspections.items()}
    names = list(dict.fromkeys(name for row in figures.values() for name in row))
    rows = [["layer", *names]] if figures else []
    rows += [[name, *(f"{row[key]:.4g}" if key in row else "" for key in names)] for name, row in figures.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    refused = [f"  {name}: {reason}" for name, reason in refusals.items()]
    end = [] if figures else [""]
    return "\n".join([f"{one.title} ({one.name})", *lines, *refused, *end])
