"""Sources of published data, made of the records of a catalogue.

A *kind* is a class that reads data of one shape, such as `Images`. A record that names a kind is a source by itself, so
a new published set of a known format is one file of TOML in `catalogue/`. A source that needs code of its own is a
class with the decorator `published`, which takes the same facts from its record.

The facts are the class variables of a kind with a type, and the defaults of its options. Three class variables are not:
`readers`, the function for each format that a layout may name, whose options are its keyword-only parameters; `splits`,
the parts that a layout may have; and `most_files`, how many files a part may have, 1 without it.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_origin, get_type_hints

from scanl.data.base import Source, register, sources
from scanl.data.files import FileLayout, folders
from scanl.data.published.records import CATALOGUE, Record, read, typed
from scanl.errors import ConfigError, nearest

T = TypeVar("T", bound=type[Any])
OF_KINDS = {"readers", "splits", "most_files"}  # class variables that no record gives

records: dict[str, Record] = {}  # by the names of sources
kinds: dict[str, type[Any]] = {}


def kind(cls: T) -> T:
    """Register a class of sources (a decorator): each record that names the class becomes a source."""
    kinds[cls.__name__] = cls
    for record in records.values():
        if cls.__name__ == record.kind:
            _make(record)
    return cls


def published(name: str) -> Callable[[T], T]:
    """Decorator: register a class as the source `name`, with what its record says."""

    def add(cls: Any) -> Any:
        if name not in records:
            raise nearest("record", name, list(records))
        facts = _facts(records[name], cls)
        assert not facts.keys() & {option.name for option in fields(cls)}, "defaults of options stand in the class"
        return _register(records[name], cls, facts)

    return add


def add(folder: str | Path) -> list[str]:
    """Read a catalogue of your own, register its sources, and return their names.

    A record without a kind waits for the class that `published` registers. Raises ConfigError for a mistake in the
    catalogue, and for a name of a data set or a source that exists already; then nothing is registered.
    """
    new = read(Path(folder))
    for record in new:
        if record.files.name in folders:
            raise ConfigError(f"{record.where}: the data set {record.files.name!r} exists already; rename the file")
        if record.name in sources.names() or sum(other.name == record.name for other in new) > 1:
            raise ConfigError(f"{record.where}: a source of this name exists already, expected a new name")
        if not record.kind:
            continue
        if record.kind not in kinds:
            raise nearest(f"kind of {record.path}", record.kind, list(kinds))
        module = sys.modules[kinds[record.kind].__module__]
        if not record.class_name.isidentifier() or hasattr(module, record.class_name):
            raise ConfigError(
                f"{record.where}: class is {record.class_name!r}, expected a name that {module.__name__} lacks"
            )
        _facts(record, kinds[record.kind])
    _keep(new)
    records = [record for record in new if record.kind]
    for record in records:
        _make(record)
    return [record.name for record in records]


def _keep(new: list[Record]) -> None:
    records.update({record.name: record for record in new})
    folders.update({record.files.name: record.files for record in new})


def _make(record: Record) -> None:
    """Register a subclass of the record's kind, which stands in the kind's module, where pickle looks for it."""
    cls = kinds[record.kind]
    facts = _facts(record, cls)
    types = {option.name: option.type for option in fields(cls) if option.name in facts}
    paragraphs = (record.about, record.more.strip(), f"Args: see `{record.kind}`.")
    body = {
        "__module__": cls.__module__,
        "__doc__": "\n\n".join(filter(None, paragraphs)),
        "__annotations__": types,
        **{name: facts.pop(name) for name in types},
    }
    source = dataclass(type(record.class_name, (cls,), body))
    setattr(sys.modules[cls.__module__], record.class_name, source)
    _register(record, source, facts)


def _register(record: Record, cls: type[Any], facts: Mapping[str, Any]) -> type[Any]:
    for name, value in facts.items():
        setattr(cls, name, value)
    cls.needs, cls.id, cls.source, cls.aliases = record.files, record.id, record.citation, record.aliases
    if record.chance is not None and "chance" not in vars(cls):
        cls.chance = record.chance
    ends = [f"Split: {record.split}.", f"Source: {record.citation}."]
    ends += [] if record.chance is None else [f"Chance: {record.chance:.4g}."]
    cls.__doc__ = "\n\n".join([inspect.cleandoc(cls.__doc__ or ""), *ends]) + "\n"
    return register(record.name)(cls)


def _facts(record: Record, cls: type[Any]) -> dict[str, Any]:
    """Return the facts of a record as a class takes them. Raises ConfigError unless they fit the class."""
    known = _types(cls)
    if "readers" in known:
        if record.kind and record.files.layout is None:
            raise ConfigError(f"{record.where}: the data set has no layout, expected one because of {record.kind}")
        for layout in filter(None, (record.files.layout, record.files.other_layout)):
            _check_layout(record, cls, layout)
    needed = {name for name, hint in known.items() if get_origin(hint) is ClassVar and not hasattr(cls, name)}
    return typed(record.where, record.facts, {name: known[name] for name in known.keys() - OF_KINDS}, needed)


def _check_layout(record: Record, cls: type[Any], layout: FileLayout) -> None:
    """Raise ConfigError unless a class reads the parts of a layout, and its reader takes the options."""
    if record.kind and tuple(layout.parts) not in cls.splits:
        splits = " or ".join(", ".join(names) for names in cls.splits)
        have = ", ".join(layout.parts) or "none"
        raise ConfigError(
            f"{record.where}: the layout has the parts {have}, expected {splits} because of {record.kind}"
        )
    max_files = getattr(cls, "most_files", 1)
    for split, names in layout.parts.items():
        if not 0 < len(names) <= max_files:
            expected = "one" if max_files == 1 else "some" if max_files == sys.maxsize else f"at most {max_files}"
            raise ConfigError(
                f"{record.where}: the part {split} of the layout has {len(names)} files, expected {expected} because "
                f"of {cls.__name__}"
            )
    if layout.reader not in cls.readers:
        raise nearest(f"reader of {record.path} for {cls.__name__}", layout.reader, list(cls.readers))
    reader = cls.readers[layout.reader]
    options = [
        parameter
        for parameter in inspect.signature(reader).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    types = {option.name: option.annotation for option in options}
    typed(
        f"{record.path}: layout",
        layout.options,
        types,
        [option.name for option in options if option.default is option.empty],
    )


@cache
def _types(cls: type[Any]) -> dict[str, Any]:
    """Return the types of the class variables and of the options that a record may give."""
    hints = {name: hint for name, hint in get_type_hints(cls).items() if name not in get_type_hints(Source)}
    options = {option.name for option in fields(cls) if option.default is not MISSING}
    return {name: hint for name, hint in hints.items() if get_origin(hint) is ClassVar or name in options}


_keep(read(CATALOGUE))
