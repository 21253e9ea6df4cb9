"""The records of published data: the entries of a catalogue's files about data sets and their sources.

A catalogue is a folder. A data set is one file NAME.toml, which says

    form, license, needs, or_needs, counts, sha256   as `Files` has them; without `needs`, the files of the layout
    made_by                                          as `Files` has it
    [layout], [other_layout]                         `reader`, `train`, `validation` and `test` or `whole`, and options
    [packages.PACKAGE]                               the path in the archive of each file that a package has
    [sources.SOURCE]                                 what is asked, as `Record` has it, and facts of its kind

The file packages.toml says for each package what `Package` has.
"""

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Union, get_args, get_origin

from scanl.data.files import FileLayout, Files, Package
from scanl.errors import ConfigError, DataError, nearest
from scanl.options import fits

CATALOGUE = Path(__file__).parent / "catalogue"
PACKAGES = "packages.toml"
PARTS = ("train", "validation", "test", "whole")
Types = Mapping[str, Any]
OF_DATA_SETS: Types = {
    **dict.fromkeys(("form", "license", "made_by"), str),
    **dict.fromkeys(("needs", "or_needs"), tuple[str, ...]),
    **dict.fromkeys(("layout", "other_layout"), Mapping[str, Any]),
    "counts": Mapping[str, int],
    "sha256": Mapping[str, str],
    "packages": Mapping[str, Mapping[str, str]],
    "sources": Mapping[str, Mapping[str, Any]],
}
OF_LAYOUTS: Types = {"reader": str, **dict.fromkeys(PARTS, tuple[str, ...])}
OF_PACKAGES: Types = {**dict.fromkeys(("manager", "version", "archive", "sha256"), str), "options": tuple[str, ...]}
OF_SOURCES: Types = {
    **dict.fromkeys(("class", "kind", "id", "about", "more", "citation", "split"), str),
    "aliases": tuple[str, ...],
    "chance": float,
}


@dataclass(frozen=True)
class Record:
    """A catalogue's entry about a source.

    path: the file that says it.   files: of the data set.   citation: who has published the data and the question.
    split: which rows are for training, validation and test.   chance: score of guessing; None if it is not known. With
    the fact `classes` it is the chance of guessing one of them.   id, aliases: as `Source` has them.
    kind: name of the class that reads the data; empty for a source with code of its own.   class_name: name of the
    class that is made of a record with a kind.   about, more: the first paragraph of its description, and the others.
    facts: the other entries: class variables of the kind, and defaults of its options.
    """

    name: str
    path: Path
    files: Files
    facts: Mapping[str, Any]
    citation: str
    split: str
    id: str = ""
    aliases: tuple[str, ...] = ()
    chance: float | None = None
    kind: str = ""
    class_name: str = ""
    about: str = ""
    more: str = ""

    @property
    def where(self) -> str:
        return f"catalogue: {self.path}: sources.{self.name}"


def read(folder: Path) -> list[Record]:
    """Read a catalogue. Raises ConfigError for an entry that is not known, is lacking, or has another type."""
    if not (tables := {path: _parsed(path) for path in sorted(folder.glob("*.toml"))}):
        raise DataError(f"catalogue: {folder} has no file *.toml, expected one for each data set")
    packages, where = tables.pop(folder / PACKAGES, {}), f"catalogue: {folder / PACKAGES}"
    typed(where, packages, dict.fromkeys(packages, Mapping[str, Any]))
    required = OF_PACKAGES.keys() - {"options"}
    packages = {name: typed(f"{where}: {name}", table, OF_PACKAGES, required) for name, table in packages.items()}
    return [record for path, table in tables.items() for record in _records(path, table, packages)]


def _records(path: Path, table: dict[str, Any], packages: Mapping[str, Mapping[str, Any]]) -> list[Record]:
    where = f"catalogue: {path}"
    table = typed(where, table, OF_DATA_SETS, ("form", "sources"))
    layouts = [_layout(f"{where}: {key}", table.pop(key, None)) for key in ("layout", "other_layout")]
    for name in (contents := table.pop("packages", {})):
        if name not in packages:
            raise nearest(f"package of {path}", name, list(packages))
    sources = table.pop("sources")
    table["form"] = " ".join(table["form"].split())
    table.setdefault("needs", _names(layouts[0]) or tuple(table.get("sha256", ())))
    table.setdefault("or_needs", _names(layouts[1]))
    if not table["needs"]:
        raise ConfigError(f"{where} names no file, expected needs, a layout or sha256")
    files = Files(
        path.stem,
        packages=tuple(Package(name=name, members=members, **packages[name]) for name, members in contents.items()),
        layout=layouts[0],
        other_layout=layouts[1],
        **table,
    )
    return [_record(name, path, files, source) for name, source in sources.items()]


def _names(layout: FileLayout | None) -> tuple[str, ...]:
    return tuple(name for names in layout.parts.values() for name in names) if layout else ()


def _layout(where: str, table: Mapping[str, Any] | None) -> FileLayout | None:
    if table is None:
        return None
    options = typed(where, {key: value for key, value in table.items() if key in OF_LAYOUTS}, OF_LAYOUTS, ("reader",))
    parts = {name: options[name] for name in PARTS if name in options}
    return FileLayout(options["reader"], parts, {key: value for key, value in table.items() if key not in OF_LAYOUTS})


def _record(name: str, path: Path, files: Files, table: Mapping[str, Any]) -> Record:
    entries = {key: value for key, value in table.items() if key in OF_SOURCES}
    facts = {key: value for key, value in table.items() if key not in OF_SOURCES}
    required = ("citation", "split", *(("class", "about") if "kind" in table else ()))
    entries = typed(f"catalogue: {path}: sources.{name}", entries, OF_SOURCES, required)
    entries |= {key: " ".join(entries[key].split()) for key in ("citation", "split", "about") if key in entries}
    if type(facts.get("classes")) is int:
        entries.setdefault("chance", 1 / facts["classes"])
    return Record(name, path, files, facts, class_name=entries.pop("class", ""), **entries)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"catalogue: {path} is no file of TOML: {error}") from error


def typed(where: str, table: Mapping[str, Any], types: Types, required: Collection[str] = ()) -> dict[str, Any]:
    """Return the entries of a table as these types have them, with tuples for lists.

    Raises ConfigError for an unknown entry, for a wrong type, and for a required entry that is missing or empty.
    """
    for name, value in table.items():
        if name not in types:
            raise nearest(f"entry of {where.removeprefix('catalogue: ')}", name, list(types))
        if not fits(value, types[name]):
            raise ConfigError(f"{where}: {name} is {value!r}, expected {_named(types[name])}")
    if lacking := sorted(name for name in required if table.get(name) in (None, "", [], {})):
        raise ConfigError(f"{where} has no {lacking[0]}, expected {', '.join(sorted(required))}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}


def _named(hint: Any) -> str:
    """Return TOML's name of a type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is ClassVar:
        return _named(inner[0])
    if origin in (Union, UnionType):
        return " or ".join(_named(kind) for kind in inner if kind is not type(None))
    if origin is tuple:
        return f"a list of {_named(inner[0])}" + ("" if inner[-1] is Ellipsis else f", {len(inner)} of them")
    if origin is not None:
        return "a table" + ("" if inner[1] is Any else f" of {_named(inner[1])}")
    return str(getattr(hint, "__name__", hint))
