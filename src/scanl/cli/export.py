"""`scanl export RUN FILE`: a run's model, or a program of torch, as a file that runs without scanl."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from scanl.cli.parser import Parser
from scanl.cli.paths import PROGRAMS
from scanl.errors import ConfigError
from scanl.export.file import ENDINGS, write
from scanl.export.flat import check_path
from scanl.files import PRETRAINED_NAME
from scanl.hub import convert
from scanl.learning import RunFolder
from scanl.models import pretrained_forecaster
from scanl.models.byte_models import byte_model, byte_model_names
from scanl.models.forecasting.pretrained_step import PretrainedStep, stepped
from scanl.ops import exact
from scanl.options import NaturalOrNone, PositiveOrNone

NOTES = {
    "what is written, by the ending of FILE": {
        ".onnx": "a file for onnxruntime; the state is among its inputs and outputs",
        ".c": "one file in C99: a struct for the state, a function that starts it, and one for a step",
        ".html": "a page that writes, forecasts or reads numbers in a browser, without a network (needs ziglang)",
        ".pt2": "a package that torch has compiled (needs a C++ compiler)",
    }
}
# Options of one format, and its ending.
OPTIONS = {
    "name": ".c",
    "portable": ".c",
    "weights": ".c",
    "opset": ".onnx",
    **dict.fromkeys(("title", "rate", "overlap"), ".html"),
}
SIZES = {"horizon": 12, "season": 1}  # of the forecaster in the package


def run(argv: Sequence[str]) -> int:
    """Write the file and print its path."""
    parser = Parser("export", "Write a model as a file that runs without scanl.", notes=NOTES)
    names = ", ".join([PRETRAINED_NAME, *byte_model_names()])
    parser.add_argument(
        "run",
        type=str,
        help="run folder; or a program of torch (.pt2) or ONNX, whose streaming form is written; or a model that comes "
        f"with scanl: {names}",
    )
    parser.add_argument("file", type=str, metavar="FILE", help=f"file to write: {', '.join(ENDINGS)}")
    parser.add("--name", str | None, ".c only: what its names begin with (default: the file's name)")
    parser.add_argument("--portable", action="store_true", help=".c only: the same bits by every compiler")
    parser.add("--opset", PositiveOrNone, ".onnx only: 25, which browsers read, or 27, for long prompts (default: 25)")
    parser.add("--title", str | None, ".html only: heading of the page (default: the name of RUN)")
    parser.add("--rate", PositiveOrNone, ".html only: samples a second of sound, pieces of which a step reads")
    parser.add("--overlap", NaturalOrNone, ".html only: samples of a piece that the one before has too (default: 0)")
    parser.add("--horizon", PositiveOrNone, f"of {PRETRAINED_NAME}: steps to forecast (default: {SIZES['horizon']})")
    parser.add("--season", PositiveOrNone, f"of {PRETRAINED_NAME}: steps of a season (default: none)")
    parser.add("--weights", str | None, ".c only: float32 (default) or int8, whole numbers and a factor a channel")
    parser.add("--inputs", str | None, "of --weights int8: real inputs (.npy), which the weights are rounded for")
    args = parser.parse(argv)
    path = Path(args.file)
    check_path(path, list(ENDINGS))
    options = {name: value for name in OPTIONS if (value := getattr(args, name)) not in (None, False)}
    for name, value in options.items():
        if path.suffix != OPTIONS[name]:
            raise ConfigError(f"export: {name} is {value}, but {path} is no file of {OPTIONS[name]}; leave it out")
    if path.suffix == ".html":
        options.setdefault("title", Path(args.run).resolve().stem)
    if args.inputs is not None:
        if args.weights != "int8":
            raise ConfigError(f"export: inputs is {args.inputs}, expected none without --weights int8")
        options["example"] = _inputs(Path(args.inputs))
    model = _model(args, path)
    with exact(portable=True) if options.pop("portable", False) else nullcontext():
        sizes = write(model, path, **options)
    print(path)
    if sizes is not None:
        print(sizes, file=sys.stderr)
    return 0


def _model(args: Namespace, path: Path) -> nn.Module:
    """Return the model to write."""
    if args.run == PRETRAINED_NAME and not Path(args.run).is_dir():
        sizes = {name: getattr(args, name) or size for name, size in SIZES.items()}
        check_step(args, path)
        return PretrainedStep(pretrained_forecaster(), sizes["horizon"], (sizes["season"], 1))
    for name in SIZES:
        if (value := getattr(args, name)) is not None:
            raise ConfigError(f"export: {name} is {value}, expected none because {args.run} is not {PRETRAINED_NAME}")
    if Path(args.run).suffix in PROGRAMS:
        return convert(args.run)
    if args.run in byte_model_names() and not Path(args.run).is_dir():
        return byte_model(args.run)
    model = stepped(RunFolder.open(args.run).load_model())
    if isinstance(model, PretrainedStep):
        check_step(args, path)
    return model


def check_step(args: Namespace, path: Path) -> None:
    """Raise ConfigError for options that the step of a pretrained forecaster does not have."""
    if args.portable:
        raise ConfigError(f"export: portable is True, expected False because {args.run} computes in float64")
    if args.weights:
        raise ConfigError(f"export: weights is {args.weights}, but {args.run} computes in float64")
    if path.suffix == ".pt2":
        raise ConfigError(
            f"export: path is {path}, expected a file of .c, .onnx or .html because {args.run} has no step for torch"
        )


def _inputs(path: Path) -> Tensor:
    if not path.is_file() or path.suffix != ".npy":
        raise ConfigError(f"export: inputs is {path}, expected a file .npy with inputs as the model reads them")
    return torch.from_numpy(np.load(path, allow_pickle=False))
