"""Configurations of commands: nested dataclasses, from which the options of the command line are made."""

import functools
import math
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, get_args, get_origin, get_type_hints

import jsonargparse
import yaml

from scanl.errors import CheckpointError, ConfigError, ScanlError, nearest
from scanl.options import Range
from scanl.parsing import in_a_line


class Option(NamedTuple):
    """An option: the part that it belongs to, its type, its meaning, and the ranges of its values."""

    part: str
    kind: Any
    meaning: str
    ranges: tuple[Range, ...]


class Configuration:
    """The options of a command. A subclass is a dataclass whose fields are its parts, dataclasses too.

    No two parts have an option of the same name, so the command line and `of` need no name of a part. The options are
    annotated with their types, ranges and meanings.   command: name of the command, in messages.
    """

    command: ClassVar[str]
    noun: ClassVar[str]  # what a file with a configuration describes

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Make a configuration of options by their names: `TrainConfig.of(layer="lru", steps=100)`.

        Raises ConfigError for an unknown name.
        """
        known = options_of(cls)
        parts: dict[str, dict[str, Any]] = {group: {} for group in parts_of(cls)}
        for name, value in options.items():
            if name not in known:
                raise nearest(f"option of {cls.command}", name, known)
            parts[known[name].part][name] = value
        return cls(**{group: make(**parts[group]) for group, make in parts_of(cls).items()})

    def options(self) -> dict[str, Any]:
        """Return every value by its name on the command line."""
        return {name: getattr(getattr(self, option.part), name) for name, option in options_of(type(self)).items()}

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return a copy in which some options, by their names on the command line, have other values."""
        groups = {name: asdict(getattr(self, name)) for name in parts_of(type(self))}
        for name, value in values.items():
            groups[options_of(type(self))[name].part][name] = value
        return type(self)(**{name: make(**groups[name]) for name, make in parts_of(type(self)).items()})

    def check(self) -> None:
        """Raise ConfigError for a value out of range."""
        known = options_of(type(self))
        for name, value in self.options().items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{self.command}: {name} is {value}, expected a finite number")
            if isinstance(value, int) and value >= 2**63:
                raise ConfigError(f"{self.command}: {name} is {value}, expected less than 2**63")
            for allowed in known[name].ranges if value is not None else ():
                if not allowed.holds(value, {}):
                    raise ConfigError(f"{self.command}: {allowed.explained(name, value, {})}")

    def to_yaml(self) -> str:
        """Return the text of the file `config.yaml`."""
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)  # pyright: ignore[reportArgumentType]

    @classmethod
    def from_yaml(cls, path: Path) -> Self:
        """Read a run's config.yaml. Raises CheckpointError when that fails, and ConfigError as `check` does."""
        try:
            return cls.from_values(yaml.safe_load(path.read_text(encoding="utf-8")), path)
        except RecursionError as error:
            raise CheckpointError(f"run: {path} cannot be read: it has too many brackets within each other") from error
        except ConfigError as error:
            raise ConfigError(f"run: {path}: {error}") from error
        except (OSError, ValueError, yaml.YAMLError) as error:  # PyYAML raises ValueError for a wrong date
            raise CheckpointError(f"run: {path} cannot be read: {' '.join(str(error).split())}") from error

    @classmethod
    def from_values(cls, values: Any, path: Path) -> Self:
        """Make a configuration from the values of a file.

        Raises CheckpointError for an unknown name or a wrong type, and ConfigError as `check` does.
        """
        no_configuration = f"run: {path} is no configuration of a {cls.noun}"
        if not isinstance(values, dict):
            raise CheckpointError(f"{no_configuration}: it is {reprlib.repr(values)}; put it back")
        for name, group in values.items():
            if not isinstance(group, dict):
                raise CheckpointError(
                    f"{no_configuration}: {name} is {reprlib.repr(group)}, expected the options "
                    f"of one of the parts {', '.join(parts_of(cls))}"
                )
        parser = jsonargparse.ArgumentParser(exit_on_error=False)
        add_options(parser, cls())
        try:
            config = cls.parsed(parser.parse_object(values))
        except ScanlError:
            raise
        except Exception as error:  # of a value of another type jsonargparse raises anything
            raise CheckpointError(
                f"{no_configuration}: {in_a_line(str(error))}; correct it, or go on "
                "with the version of scanl that wrote it"
            ) from error
        config.check()
        return config

    @classmethod
    def parsed(cls, values: jsonargparse.Namespace) -> Self:
        """Make a configuration of what a parser with the options of `add_options` returns.

        Raises ConfigError for a part that is not a mapping.
        """
        parts = parts_of(cls)
        for name in parts:
            if not isinstance(values[name], jsonargparse.Namespace):
                raise ConfigError(f"{cls.command}: {name} is {values[name]}, expected options by name")
        return cls(**{name: group(**vars(values[name])) for name, group in parts.items()})


@functools.cache
def parts_of(cls: type[Configuration]) -> Mapping[str, Any]:
    """Return the maker of each part of a configuration with its defaults, by the name of the part."""
    return {group.name: group.default_factory for group in fields(cls)}  # pyright: ignore[reportArgumentType]


@functools.cache
def options_of(cls: type[Configuration]) -> Mapping[str, Option]:
    """Return the options of all parts of a configuration by name."""
    found: dict[str, Option] = {}
    for group, make in parts_of(cls).items():
        for name, hint in get_type_hints(type(make()), include_extras=True).items():
            kind, *notes = get_args(hint)
            (meaning,) = (note for note in notes if isinstance(note, str))
            assert name not in found, "two parts have an option of one name"
            found[name] = Option(group, kind, meaning, tuple(note for note in notes if isinstance(note, Range)))
    return found


def add_options(parser: jsonargparse.ArgumentParser, defaults: Configuration) -> None:
    """Add the options of a command to a parser: short on the command line, in parts in a file and in the result."""
    for name, option in options_of(type(defaults)).items():
        how: dict[str, Any] = {"type": option.kind}
        if option.kind is bool:
            how |= {"nargs": "?", "const": True, "metavar": "false"}  # the name alone says true
        elif get_origin(option.kind) is list:
            (kind,) = get_args(option.kind)
            metavar = {"data": "NAME_OR_PATH"}.get(name, "COLUMN" if kind is str else "NUMBER")
            how = {"type": kind, "nargs": "*", "metavar": metavar}
        default = getattr(getattr(defaults, option.part), name)
        flag, key = f"--{name.replace('_', '-')}", f"{option.part}.{name}"
        parser.add_argument(flag, dest=key, default=default, help=option.meaning, **how)
