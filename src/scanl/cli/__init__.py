"""The `scanl` command. `main` runs a subcommand and prints an input error as one line."""

import importlib
import logging
import os
import sys
from collections.abc import Sequence

from scanl.cli.paths import check_paths
from scanl.errors import ScanlError, nearest

GROUPS = {  # title: name: (module and function, what it does)
    "learn from data": {
        "train": ("train:run", "train a model on a text, a table (forecast, classify), files or a task"),
        "learn": ("learn:run", "learn from a stream, sample by sample: predict, score, then learn"),
        "lr": ("lr:run", "search for a learning rate"),
        "demo": ("demo:run", "train for three minutes, then generate past 100,000 bytes"),
    },
    "use what was trained": {
        "forecast": ("forecast:run", "write what follows each series of a table, with intervals"),
        "predict": ("predict:run", "write classes, labels or numbers for a table or for files"),
        "generate": ("generate:run", "continue a text, a recording, a picture or the series of a table"),
        "eval": ("evaluate:run", "measure a run on data that it was not trained on"),
        "inspect": ("inspect:run", "tables and pictures of what a layer, or a run, remembers"),
        "serve": ("serve:run", "serve a language model over HTTP: the usual completions interface"),
        "pack": ("pack:run", "make files small by what a language model expects of them"),
        "unpack": ("pack:run_unpack", "write the files of an archive of pack"),
        "export": ("export:run", "write a run's model, or one of torch or ONNX, as ONNX, as C, or as a package"),
        "quantize": ("quantize:run", "write a model with weights of 8 or 4 bits, which it reads faster"),
    },
    "make models faster": {
        "accelerate": ("accelerate:run", "speed up a pretrained transformers model that is recurrent"),
        "bench-decode": ("bench_decode:run", "tokens a second of a language model, by texts at once"),
        "warmup": ("warmup:run", "compile and tune the GPU kernels of a layer or of ops"),
    },
    "look up": {
        "list": ("layers:list_layers", "every layer, whole model and learning algorithm"),
        "show": ("layers:show_layer", "equation, source, options and size of a layer by any name"),
        "tasks": ("tasks:list_tasks", "the synthetic tasks, and what guessing and solving them scores"),
        "algorithms": ("algorithms:list_algorithms", "the learning algorithms, what they compute and cost"),
        "data": ("data:run", "the sources of real data; get and check their files"),
        "ops": ("ops:list_ops", "the ops and what each of their backends can do"),
    },
}
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Return the exit code: 0, 2 for bad input, 130 when interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    # Lightning imports Matplotlib, which warns where it cannot write to the home directory; then it writes elsewhere.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    if args[:1] == ["help"]:
        args = [*args[1:2], "--help", *args[2:]]
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
        check_paths(args[0], args[1:])
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
    from scanl.cli.help import filled, table

    groups = [
        table(f"{title}:", ((name, about) for name, (_, about) in group.items())) for title, group in GROUPS.items()
    ]
    about = "Recurrent sequence models: a state that is updated by each step of a text, a series, a stream."
    more = "`scanl COMMAND --help` has examples and options of a command. `scanl --version` prints the version."
    return "\n\n".join(["usage: scanl COMMAND ...", filled(about), *groups, filled(more)])
