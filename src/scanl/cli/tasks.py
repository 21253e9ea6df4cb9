"""`scanl tasks`."""

from collections.abc import Sequence

from scanl.cli.parser import Parser
from scanl.data.base import summary
from scanl.options import options
from scanl.tasks import build, get, names


def list_tasks(argv: Sequence[str]) -> int:
    """Print the summary of each task, and its chance score with the default options."""
    Parser("tasks", "The synthetic tasks.").parse(argv)
    width = max(map(len, names())) + 2
    for name in names():
        task = build(name)
        print(f"{name:<{width}}{summary(type(task))}")
        print(f"{'':<{width}}{task.metric}: chance {task.chance:.4g}, best {task.best:g}; {_options(name)}")
    print("\n`scanl train --data NAME --layer LAYER` trains a model on one; `--data-options.NAME VALUE` changes it.")
    return 0


def _options(name: str) -> str:
    return "  ".join(f"{option.name}={option.default}" for option in options(get(name)).values())
