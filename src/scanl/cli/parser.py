"""Option parsing that raises a ConfigError with a one-line message for every mistake."""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any

import jsonargparse

from scanl.errors import ConfigError, nearest
from scanl.options import Option, check
from scanl.parsing import in_a_line


class _Help(argparse.RawDescriptionHelpFormatter, jsonargparse.DefaultHelpFormatter):
    """Keep the line breaks of the text below the options."""


class Parser(jsonargparse.ArgumentParser):
    """A jsonargparse parser that raises ConfigError with the nearest known option, instead of printing its usage.

    below: returns the text below the options; called only when the help is printed.
    words: the option that the message names when an argument has no option.
    """

    def __init__(
        self, command: str, description: str, *, below: Callable[[], str] | None = None, words: str = "", **kwargs: Any
    ) -> None:
        super().__init__(
            prog=f"scanl {command}", description=description, exit_on_error=False, formatter_class=_Help, **kwargs
        )
        self.command, self._below, self._words = command, below, words
        self._ranged: dict[str, Option] = {}

    def add(self, name: str, kind: Any, meaning: str, default: Any = None, **settings: Any) -> None:
        """Add an option. kind: its type, whose ranges `parse` checks.   settings: of `add_argument`."""
        option = Option.of(name.lstrip("-").replace("-", "_"), kind)
        if option.ranges:
            self._ranged[option.name] = option
        self.add_argument(name, type=option.type, default=default, help=meaning, **settings)

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        if self._below is not None:
            self.epilog = self._below()
        return super().format_help(*args, **kwargs)

    def parse(self, argv: Sequence[str], *, defaults: bool = True) -> jsonargparse.Namespace:
        """Parse the options. `--batch_size` is read as `--batch-size`. Raises ConfigError for a mistake.

        defaults: whether the result has the defaults of options that `argv` does not have.
        """
        known = [option for action in self._actions for option in action.option_strings]
        argv = [_dashed(argument, known) for argument in argv]
        for argument in argv:
            name = re.split(r"[=.+]", argument, maxsplit=1)[0]
            if argument.startswith("--") and len(argument) > 2 and name not in known:
                raise nearest(f"option of {self.command}", name, [k for k in known if k.startswith("--")])
        try:
            args = self.parse_args(argv, defaults=defaults)
        except jsonargparse.ArgumentError as error:
            text, advice = in_a_line(str(error)), f"see scanl {self.command} --help"
            stray = re.match("unrecognized arguments: (.*)", text, re.IGNORECASE)
            if stray and self._words:
                advice = f"give {self._words} {stray[1]}"
            raise ConfigError(f"{self.command}: {text}; {advice}") from error
        check(self.command, self._ranged, vars(args))
        return args


def _dashed(argument: str, known: Sequence[str]) -> str:
    stem = re.split(r"[=.+]", argument, maxsplit=1)[0]
    dashed = stem.replace("_", "-")
    return dashed + argument[len(stem) :] if stem.startswith("--") and dashed in known else argument
