"""`scanl export RUN FILE`: a run's model, or a program of torch, as an ONNX file, as C99, or as a package of torch."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from scanl.cli.parser import Parser
from scanl.cli.paths import PRETRAINED_NAME, PROGRAMS
from scanl.errors import ConfigError
from scanl.export.file import ENDINGS, write
from scanl.export.flat import check_path
from scanl.hub import convert
from scanl.learning import RunFolder
from scanl.models import pretrained_forecaster
from scanl.models.byte_models import byte_model, byte_model_names
from scanl.models.forecasting.pretrained_step import PretrainedStep
from scanl.ops import exact
from scanl.options import PositiveOrNone

NOTES = {
    "what is written, by the ending of FILE": {
        ".onnx": "a file for onnxruntime; the state is among its inputs and outputs",
        ".c": "one file in C99: a struct for the state, a function that starts it, and one for a step",
        ".pt2": "a package that torch has compiled (needs a C++ compiler)",
    }
}


def run(argv: Sequence[str]) -> int:
    """Write the file and print its path."""
    parser = Parser("export", "Write a model as a file that runs without scanl.", notes=NOTES)
    parser.add_argument(
        "run",
        type=str,
        help="run folder; or a program of torch (.pt2) or ONNX, whose streaming form is written; or, in the package, "
        f"{', '.join(byte_model_names())}, a language model of bytes, or {PRETRAINED_NAME}, the forecaster, no .pt2",
    )
    parser.add_argument("file", type=str, metavar="FILE", help=f"file to write: {', '.join(ENDINGS)}")
    parser.add("--name", str | None, ".c only: what its names begin with (default: the file's name)")
    parser.add_argument("--portable", action="store_true", help=".c only: the same bits by every compiler")
    parser.add("--horizon", PositiveOrNone, f"of {PRETRAINED_NAME}: steps to forecast (default: 12)")
    parser.add("--season", PositiveOrNone, f"of {PRETRAINED_NAME}: steps of a season (default: none)")
    args = parser.parse(argv)
    path = Path(args.file)
    for name in ("name", "portable"):
        if (value := getattr(args, name)) and path.suffix != ".c":
            raise ConfigError(f"export: {name} is {value}, but {path} is no file in C; leave it out")
    check_path(path, list(ENDINGS))
    options = {} if args.name is None else {"name": args.name}
    if args.run == PRETRAINED_NAME and not Path(args.run).is_dir():
        if args.portable:
            raise ConfigError(f"export: portable is True, expected False because {PRETRAINED_NAME} computes in float64")
        if path.suffix == ".pt2":
            raise ConfigError(f"export: path is {path}, expected a file of .c or .onnx for {PRETRAINED_NAME}")
        sizes = {"horizon": args.horizon or 12, "season": args.season or 1}
        step = PretrainedStep(pretrained_forecaster(), sizes["horizon"], (sizes["season"], 1))
        write(step, path, **options)
        print(path)
        return 0
    for name in ("horizon", "season"):
        if (value := getattr(args, name)) is not None:
            raise ConfigError(f"export: {name} is {value}, expected none because {args.run} is not {PRETRAINED_NAME}")
    if Path(args.run).suffix in PROGRAMS:
        model = convert(args.run)
    elif args.run in byte_model_names() and not os.path.isdir(args.run):
        model = byte_model(args.run)
    else:
        model = RunFolder.open(args.run).load_model()
    with exact(portable=True) if args.portable else nullcontext():
        write(model, path, **options)
    print(path)
    return 0
