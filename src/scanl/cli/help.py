"""The text of `--help`: one screen for a command, a page for each topic of its options, and one with all of them."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scanl.errors import nearest

WIDTH = 100  # letters in a line, at most
LEFT_WIDTH = 28  # letters before a meaning, at most
EVERYTHING = "all"  # the topic of every option
UNBROKEN = "\N{NO-BREAK SPACE}"  # at which no line ends
ARGUMENTS, OPTIONS = "arguments", "options"  # groups of a command without topics

Rows = Mapping[str, str]  # what stands on the left, and what on the right


@dataclass(frozen=True)
class Manual:
    """What the help of a command says beside its options.

    description: what the command does.   examples: command lines, and what each does.
    topics: groups of options by name, and what each is about. With topics, the first screen has the options of the
    examples alone, and `--help TOPIC` has the others.   notes: tables below the options, by their titles.
    elsewhere: defaults by option that hold instead of the declared ones, by when they do: {"to forecast": {"dim": 16}}.
    """

    command: str
    description: str
    examples: Rows = field(default_factory=dict)
    topics: Rows = field(default_factory=dict)
    notes: Mapping[str, Rows] = field(default_factory=dict)
    elsewhere: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def page(self, options: Sequence[argparse.Action], topics: Rows, topic: str | None = None) -> str:
        """Return the first screen, or the page of a topic. Raises ConfigError for an unknown topic.

        topics: of options by `dest`; an option that is not there has the last topic.
        """
        if topic is not None and topic not in (*self.topics, EVERYTHING):
            raise nearest(f"topic of scanl {self.command} --help", topic, [*self.topics, EVERYTHING])
        groups = self._groups(options, topics)
        if topic in groups:
            return f"{self._section(topic, groups[topic])}\n"
        arguments = " ".join(_bracketed(option) for option in options if not option.option_strings)
        parts = [" ".join(["usage: scanl", self.command, *filter(None, [arguments]), "[OPTION ...]"])]
        parts.append(filled(self.description))
        if self.examples:
            lines = [line for example, text in self.examples.items() for line in (f"# {text}", _folded(example))]
            parts.append("\n  ".join(["examples:", *lines]))
        if topic is None and self.topics:
            used = set(re.findall("--[a-z-]+", " ".join(self.examples)))
            first = [
                option
                for group in groups.values()
                for option in group
                if used & {*option.option_strings} or not option.option_strings
            ]
            more = [(f"--help {name}", text) for name, text in (*self.topics.items(), (EVERYTHING, "every option"))]
            brief = [(name, _clause(text) + defaults) for name, text, defaults in map(self._row, first)]
            parts += [table("options of these examples:", brief), table("more options:", more)]
        else:
            parts += [self._section(name, group) for name, group in groups.items()]
        parts += [table(f"{title}:", rows.items()) for title, rows in self.notes.items()]
        return "\n\n".join(parts) + "\n"

    def _groups(self, options: Sequence[argparse.Action], topics: Rows) -> dict[str, list[argparse.Action]]:
        groups: dict[str, list[argparse.Action]] = {name: [] for name in self.topics or (ARGUMENTS, OPTIONS)}
        *_, last = groups
        for option in options:
            usual = last if option.option_strings or self.topics else ARGUMENTS
            groups[topics.get(option.dest, usual)].append(option)
        return {name: group for name, group in groups.items() if group}

    def _section(self, name: str, group: Iterable[argparse.Action]) -> str:
        title = f"{name}: {self.topics[name]}" if name in self.topics else f"{name}:"
        return table(title, [(name, text + defaults) for name, text, defaults in map(self._row, group)])

    def _row(self, option: argparse.Action) -> tuple[str, str, str]:
        """Return an option as it is written, its meaning, and its defaults in brackets."""
        name = option.dest.rpartition(".")[2]
        usual = _value(option.default)
        others = {when: _value(values[name]) for when, values in self.elsewhere.items() if name in values}
        together = {text: ", ".join(when for when in others if others[when] == text) for text in others.values()}
        texts = {"default": usual} | {when: text for text, when in together.items() if text != usual}
        defaults = "; ".join(f"{when}: ".replace(" ", UNBROKEN) + text for when, text in texts.items() if text)
        return _invocation(option), str(option.help), f" ({defaults})" if defaults else ""


def _clause(text: str) -> str:
    """Return the first clause of a meaning."""
    return re.split(r"[.;] ", text, maxsplit=1)[0]


def filled(text: str) -> str:
    """Return a text in lines that fit the terminal."""
    return textwrap.fill(text, _width())


def table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return a title, and rows of two columns below it. A long left side has a line of its own."""
    rows = list(rows)
    left = 4 + max((len(name) for name, _ in rows if len(name) <= LEFT_WIDTH - 4), default=0)
    lines = [filled(title)]
    for name, text in rows:
        begin = f"  {name:<{left - 2}}"
        if len(name) + 4 > left:
            lines.append(begin)
            begin = " " * left
        wrapped = textwrap.wrap(text, _width() - left, break_long_words=False, break_on_hyphens=False)
        lines.append((begin + ("\n" + " " * left).join(wrapped)).rstrip())
    return "\n".join(lines).replace(UNBROKEN, " ")


def _width() -> int:
    return min(WIDTH, shutil.get_terminal_size().columns)


def _folded(command: str) -> str:
    """Return a command line, in several lines for the shell where it does not fit the terminal."""
    lines = textwrap.wrap(
        command, _width() - 4, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
    )
    return " \\\n".join(lines)


def _invocation(option: argparse.Action) -> str:
    """Return an option as it is written: "--dim INTEGER"."""
    word = "" if option.nargs == 0 else str(option.dest.upper() if option.metavar is None else option.metavar)
    repeated = f"{word} ..." if option.nargs in ("*", "+") else word
    gap = "" if repeated.startswith(".") or not option.option_strings else " "  # --layer-options.NAME VALUE
    flags = [flag for flag in option.option_strings if not flag.endswith("+")]  # --hosts+ adds to a list
    return f"{', '.join(flags)}{gap}{repeated}".rstrip()


def _bracketed(option: argparse.Action) -> str:
    text = _invocation(option)
    return f"[{text}]" if option.nargs in ("*", "?") else text


def _value(value: object) -> str:
    """Return a default, or "" for what its meaning says: none."""
    if value is None or value is False or value in ("", argparse.SUPPRESS) or value in ([], {}, ()):
        return ""
    if isinstance(value, (list, tuple)):
        return " ".join(map(_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if value is True else str(value)
