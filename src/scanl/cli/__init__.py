"""The `scanl` command. `main` runs a subcommand and prints an input error as one line."""

import importlib
import logging
import os
import sys
from collections.abc import Sequence

from scanl.errors import ScanlError, nearest

COMMANDS = {  # name: (module and function, what it does)
    "train": ("train:run", "train a model on your own files, a data set or a synthetic task"),
    "learn": ("learn:run", "learn from a stream, sample by sample: predict, score, then learn"),
    "lr": ("lr:run", "search for a learning rate"),
    "forecast": ("forecast:run", "write what follows each series of a run's table, with intervals and a picture"),
    "generate": ("generate:run", "continue a text, a recording, a picture or the series of a table"),
    "serve": ("serve:run", "serve a language model over HTTP: the usual completions interface, with sessions"),
    "bench-decode": ("bench_decode:run", "measure tokens a second of a language model by the number of texts at once"),
    "predict": ("predict:run", "write a run's classes, labels or numbers for a table or for files"),
    "eval": ("evaluate:run", "measure a run: bits per byte of its held-out text, or its score on a task"),
    "export": ("export:run", "write a run's model as an ONNX file, as C, or as a package of torch"),
    "quantize": ("quantize:run", "write a model with weights of 8 or 4 bits, which it reads faster"),
    "inspect": ("inspect:run", "tables and pictures of what a layer, or each layer of a run, remembers"),
    "list": ("layers:list_layers", "print every layer, whole model and learning algorithm"),
    "show": ("layers:show_layer", "print what a name of the literature is: equation, source, options, size, backends"),
    "tasks": ("tasks:list_tasks", "print the synthetic tasks, and what guessing and solving them scores"),
    "algorithms": ("algorithms:list_algorithms", "print the learning algorithms, what they compute and cost"),
    "data": ("data:run", "print the sources of real data and whether they are there; get and check their files"),
    "ops": ("ops:list_ops", "print the ops and what each of their backends can do"),
    "warmup": ("warmup:run", "compile and tune the GPU kernels of a layer or of ops"),
    "accelerate": ("accelerate:run", "run a transformers model's recurrent modules on scanl's ops"),
    "demo": ("demo:run", "train for three minutes, then generate past 100,000 bytes"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Return the exit code: 0, 2 for bad input, 130 when interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    # Lightning imports Matplotlib, which warns where it cannot write to the home directory; then it writes elsewhere.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    if args[:1] == ["help"]:
        args = [*args[1:2], "--help"]
    try:
        if not args or args[0] in ("-h", "--help"):
            print(_usage())
            return 0
        if args[0] == "--version":
            from scanl import __version__

            print(f"scanl {__version__}")
            return 0
        if args[0] not in COMMANDS:
            raise nearest("command", args[0], list(COMMANDS))
        module, function = COMMANDS[args[0]][0].split(":")
        code = getattr(importlib.import_module(f"scanl.cli.{module}"), function)(args[1:])
        sys.stdout.flush()
        return code
    except ScanlError as error:
        print(f"scanl: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("scanl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The process that read our output has ended. Without this line Python fails again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _usage() -> str:
    lines = [f"  {name:<13}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: scanl COMMAND ...",
            "",
            *lines,
            "",
            "`scanl COMMAND --help`, or `scanl help COMMAND`, lists its options.",
        ]
    )
