"""Configurations of commands: nested dataclasses, from which the options of the command line are made."""

import functools
import inspect
import math
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self, get_args, get_origin

import jsonargparse
import yaml

from scanl.errors import CheckpointError, ConfigError, ScanlError, nearest
from scanl.options import Option, Range, check, options, placeholder
from scanl.parsing import in_a_line

finite_number = Range("a finite number", lambda value, _: not isinstance(value, float) or math.isfinite(value))
short_integer = Range("less than 2**63", lambda value, _: not isinstance(value, int) or value < 2**63)


class Configuration:
    """The options of a command. A subclass is a dataclass whose fields are its parts, dataclasses too.

    No two parts have an option of the same name, so the command line and `of` need no name of a part. The options are
    annotated with their types, ranges and meanings.   command: name of the command, in messages.
    topics: groups of options in the help, in order, and what each is about. The dataclass that declares an option says
    its `topic`.
    """

    command: ClassVar[str]
    noun: ClassVar[str]  # what a file with a configuration describes
    topics: ClassVar[Mapping[str, str]]

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Make a configuration of options by their names: `TrainConfig.of(layer="lru", steps=100)`.

        Raises ConfigError for an unknown name.
        """
        for name in options:
            if name not in options_of(cls):
                raise nearest(f"option of {cls.command}", name, options_of(cls))
        return cls().changed(options)

    def options(self) -> dict[str, Any]:
        """Return every value by its name on the command line."""
        return {name: getattr(getattr(self, part), name) for name, part in names_of(type(self)).items()}

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return a copy in which some options, by their names on the command line, have other values."""
        groups: dict[str, dict[str, Any]] = asdict(self)  # pyright: ignore[reportArgumentType]
        for name, value in values.items():
            groups[names_of(type(self))[name]][name] = value
        return type(self)(**{name: make(**groups[name]) for name, make in parts_of(type(self)).items()})

    def check(self) -> None:
        """Raise ConfigError for a value of another type or out of range."""
        check(self.command, options_of(type(self)), self.options())

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
def names_of(cls: type[Configuration]) -> Mapping[str, str]:
    """Return the part of each option of a configuration, by the name of the option."""
    pairs = [(option.name, group) for group, make in parts_of(cls).items() for option in fields(make())]
    assert len(dict(pairs)) == len(pairs), "two parts have an option of one name"
    return dict(pairs)


@functools.cache
def options_of(cls: type[Configuration]) -> Mapping[str, Option]:
    """Return the options of all parts of a configuration by name."""
    known = [option for make in parts_of(cls).values() for option in options(type(make())).values()]
    return {option.name: replace(option, ranges=(finite_number, short_integer, *option.ranges)) for option in known}


@functools.cache
def topics_of(cls: type[Configuration]) -> Mapping[str, str]:
    """Return the topic of each option of a configuration, by the name of the option."""
    owners = [owner for make in parts_of(cls).values() for owner in type(make()).__mro__ if is_dataclass(owner)]
    return {
        name: vars(owner)["topic"]
        for owner in owners
        for name in inspect.get_annotations(owner)
        if name in names_of(cls)
    }


def add_options(parser: jsonargparse.ArgumentParser, defaults: Configuration) -> Mapping[str, str]:
    """Add the options of a command to a parser: short on the command line, in parts in a file and in the result.

    Return the topic of each by its `dest`.
    """
    topics: dict[str, str] = {}
    parts, values = names_of(type(defaults)), defaults.options()
    for name, option in options_of(type(defaults)).items():
        how: dict[str, Any] = {"type": option.type, "metavar": option.placeholder}
        if option.type is bool:
            how |= {"nargs": "?", "const": True, "metavar": "false" if values[name] else ""}  # the name alone says true
        elif get_origin(option.type) is list:
            (kind,) = get_args(option.type)
            how |= {"type": kind, "nargs": "*"}
            if option.placeholder == placeholder(option.type):
                how["metavar"] = placeholder(kind)
        flag, key = f"--{name.replace('_', '-')}", f"{parts[name]}.{name}"
        parser.add_argument(flag, dest=key, default=values[name], help=option.meaning, **how)
        topics[key] = topics_of(type(defaults))[name]
    return topics
