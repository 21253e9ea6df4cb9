"""Option parsing that raises a ConfigError with a one-line message for every mistake."""

import re
from collections.abc import Sequence
from typing import Any

import jsonargparse

from scanl.cli.help import Manual
from scanl.cli.paths import words_of
from scanl.errors import ConfigError, nearest
from scanl.options import Option, check
from scanl.parsing import in_a_line

UNREAD_CONFIG = re.compile("Unexpected config|Problems parsing config(: .*)?")  # how messages about a file begin


class Parser(jsonargparse.ArgumentParser):
    """A jsonargparse parser that raises ConfigError with the nearest known option, instead of printing its usage.

    manual: examples, topics and notes of the help, as `Manual` has them.
    words: the option that the message names when an argument has no option.
    topics: of options by `dest`, where they are not in the last one.
    """

    def __init__(self, command: str, description: str, *, words: str = "", **manual: Any) -> None:
        super().__init__(prog=f"scanl {command}", description=description, exit_on_error=False)
        self.command, self._words = command, words
        self.manual = Manual(command, description, **manual)
        self.topics: dict[str, str] = {}
        self._ranged: dict[str, Option] = {}

    def add(self, name: str, kind: Any, meaning: str, default: Any = None, **settings: Any) -> None:
        """Add an option. kind: its type, whose ranges `parse` checks.   settings: of `add_argument`."""
        option = Option.of(name.lstrip("-").replace("-", "_"), kind)
        if option.ranges:
            self._ranged[option.name] = option
        if name.startswith("--"):
            settings = {"metavar": option.placeholder, **settings}
        self.add_argument(name, type=option.type, default=default, help=meaning, **settings)

    def add_config_file(self, meaning: str) -> None:
        """Add `--config` and `--print_config`."""
        self.add_argument("--config", action="config", metavar="FILE", help=meaning)
        (printed,) = (action for action in self._actions if "--print_config" in action.option_strings)
        printed.metavar, printed.help = "", "print the options as such a file, and do no more"

    def page(self, *words: str) -> str:
        """Return the first screen of the help, or the page of the topic that the first word names."""
        topic = next((word for word in words[:1] if self.manual.topics and not word.startswith("-")), None)
        options = [action for action in self._actions if "--help" not in action.option_strings]
        return self.manual.page(options, self.topics, topic)

    def parse(self, argv: Sequence[str], *, defaults: bool = True) -> jsonargparse.Namespace:
        """Parse the options. `--batch_size` is read as `--batch-size`. Raises ConfigError for a mistake.

        `--help`, with the name of a topic behind it or not, is printed, and ends the process.

        defaults: whether the result has the defaults of options that `argv` does not have.
        """
        for place, argument in enumerate(argv):
            if argument in ("-h", "--help"):
                print(self.page(*argv[place + 1 :]), end="")
                raise SystemExit(0)
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
            if unread := UNREAD_CONFIG.match(text):
                *_, file = words_of(argv, "--config")
                text = f"config is {file}, expected a YAML file of options in parts{unread[1] or ''}"
                advice = "the config.yaml of a run is one"
            stray = re.match("unrecognized arguments: (.*)", text, re.IGNORECASE)
            if stray and self._words and not re.match(r"-|[\d.]+$", stray[1]):
                advice = f"give {self._words} {stray[1]}"
            raise ConfigError(f"{self.command}: {text}; {advice}") from error
        check(self.command, self._ranged, vars(args))
        return args


def _dashed(argument: str, known: Sequence[str]) -> str:
    stem = re.split(r"[=.+]", argument, maxsplit=1)[0]
    dashed = stem.replace("_", "-")
    return dashed + argument[len(stem) :] if stem.startswith("--") and dashed in known else argument
