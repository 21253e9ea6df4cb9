"""The pages of the `scanl` command, made from the parser of each subcommand."""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from making.models import table
from scanl.cli import COMMANDS, GROUPS, main
from scanl.cli.help import EVERYTHING

WIDTH = "96"  # letters in a line of a help


def pages(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the text of each page below a folder."""
    for name in COMMANDS:
        yield folder / "commands" / f"{name}.md", page(name)
    yield folder / "commands.md", index()


def page(name: str) -> str:
    """Return the page of a subcommand."""
    about = COMMANDS[name][1]
    return f"# scanl {name}\n\n{about[0].upper()}{about[1:]}.\n\n```text\n{help_of(name)}```\n"


def help_of(name: str) -> str:
    """Return what a subcommand prints with `--help all`."""
    out = io.StringIO()
    plain = {"COLUMNS": WIDTH, "NO_COLOR": "1"}
    with mock.patch.dict(os.environ, plain), contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([name, "--help", EVERYTHING])
    return out.getvalue()


def index() -> str:
    """Return the page that leads to the subcommands."""
    groups = [
        f"## {title.capitalize()}\n\n"
        + table(("", ""), [(f"[scanl {name}](commands/{name}.md)", about) for name, (_, about) in group.items()])
        for title, group in GROUPS.items()
    ]
    toctree = "\n".join([":::{toctree}", ":hidden:", *(f"commands/{name}" for name in COMMANDS), ":::"])
    return "\n\n".join(["# The scanl command", *groups, toctree]) + "\n"
