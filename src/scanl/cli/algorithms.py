"""`scanl algorithms`: list what each learning algorithm computes and costs, as in the table of its page."""

from collections.abc import Sequence

from scanl.cli.parser import Parser
from scanl.learning.algorithms import Algorithm, algorithms

HEADER = ("algorithm", "gradient", "steps of an update", "numbers kept", "multiplications of an update", "for")


def list_algorithms(argv: Sequence[str]) -> int:
    """Print a line for each algorithm."""
    Parser("algorithms", "The learning algorithms: what each computes, and what it costs.").parse(argv)
    print(table())
    print("\n`scanl train --algorithm NAME` trains with one; `--algorithm-options.NAME VALUE` changes it.")
    print("`--block N` makes updates of N steps.")
    return 0


def table() -> str:
    rows = [HEADER, tuple("---" for _ in HEADER), *(_row(algorithms.get(name)) for name in algorithms.names())]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _row(cls: type[Algorithm]) -> tuple[str, ...]:
    gradient = cls.computes if not cls.error else f"{cls.computes}: {cls.error}"
    steps = "all" if cls.update_steps is None else str(cls.update_steps)
    return f"`{cls.name}`", gradient, steps, f"`{cls.memory}`", f"`{cls.operations}`", cls.works_for
