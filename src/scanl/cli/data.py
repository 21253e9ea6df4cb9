"""`scanl data`: the sources of real data, what each needs, and whether it is there."""

from collections.abc import Sequence
from pathlib import Path

from scanl.cli.parser import Parser
from scanl.data import sources
from scanl.data.base import Entry, Source, summary
from scanl.data.files import Files, folders, root
from scanl.data.published.get import get
from scanl.errors import ConfigError, DataError, ScanlError, nearest
from scanl.learning import TrainConfig

ACTIONS = ("list", "get", "check")
NOTES = {
    "what to do": {
        "list": "every source, the files that it needs, and whether they are there",
        "get NAME": "download the files of a data set by the package manager that has them, and verify them",
        "check PATH": "say what a folder or file is, and what is wrong with it",
    }
}


def run(argv: Sequence[str]) -> int:
    """List the sources, get the files of one, or check a folder."""
    parser = Parser("data", "Real data: what there is, and how to get it.", notes=NOTES)
    parser.add("action", str, ", ".join(ACTIONS), "list", nargs="?")
    parser.add("what", str | None, "name of a data set, or path", nargs="?")
    parser.add("--archive", str, "get: packages that are already downloaded", [], nargs="*", metavar="PATH")
    args = parser.parse(argv)
    if args.action not in ACTIONS:
        raise nearest("action of data", args.action, ACTIONS)
    if (args.what is None) != (args.action == "list"):
        needed = {"list": "nothing", "get": "the name of a data set", "check": "a path"}[args.action]
        raise ConfigError(f"data: {args.action} is followed by {args.what or 'nothing'}, expected {needed}")
    if args.archive and args.action != "get":
        raise ConfigError(f"data: archive is {args.archive}, but {args.action} does not use it; leave out --archive")
    if args.action == "list":
        return _list()
    return _get(args.what, args.archive) if args.action == "get" else _check(Path(args.what))


def _list() -> int:
    width = max(map(len, sources.names())) + 2
    for name in sources.names():
        source = sources.get(name)
        print(f"{name:<{width}}{summary(source)}")
        print(f"{'':<{width}}{state(source)}")
    print(f"\nData sets lie in {root()} (SCANL_DATA). `scanl data get NAME` downloads one that a package has;")
    print("`scanl train --data NAME` trains on a source, and `--data-options.folder PATH` reads its files elsewhere.")
    return 0


def state(source: type[Entry]) -> str:
    """Return the files that a source needs, and whether they are there."""
    if source.needs is None:
        return "no files of a data set"
    missing = source.needs.missing()
    if not missing:
        return f"there: {source.needs.folder()}"
    how = f"scanl data get {source.needs.name} ({source.needs.origin})"
    if not source.needs.origin:
        how = f"put into {source.needs.folder()}: {source.needs.form}"
    return f"missing: {len(missing)} of {len(source.needs.needs)} files; {how}"


def _get(name: str, archives: Sequence[str]) -> int:
    files = folders.get(name)
    if files is None and name in sources.names():
        files = sources.get(name).needs
        if files is None:
            raise ConfigError(f"data: {name} needs no files of a data set")
    if files is None:
        raise nearest("data set", name, {*folders, *sources.names()})
    paths: dict[str, Path] = {}
    for archive in map(Path, archives):
        owner = [package.name for package in files.packages if package.archive == archive.name]
        if not owner or not archive.is_file():
            expected = " or ".join(package.archive for package in files.packages) or "none"
            raise ConfigError(f"data: archive is {archive}, expected a file named {expected} because of {files.name}")
        paths[owner[0]] = archive
    print(f"{files.name} is in {get(files, paths)}")
    return 0


def _check(path: Path) -> int:
    """Print every data set that the files are, with its counts. Raises DataError when they are damaged or none."""
    if not path.exists():
        raise DataError(f"data: {path} does not exist; name a folder or a file")
    folder = path if path.is_dir() else path.parent
    fitting = []
    for name in sources.names():
        source = sources.get(name)
        files = source.needs
        if files is None or not issubclass(source, Source):
            continue
        present = len(files.needs) - len(files.missing(str(folder)))
        named = path.is_dir() or path.name in {Path(file).name for file in _paths(files, folder)}
        if present and named:
            fitting.append((present / len(files.needs), name))
    if not fitting:
        raise DataError(
            f"data: {path} is no data set that scanl knows; `scanl data` lists them, and `scanl train --data PATH` "
            "reads text"
        )
    errors: list[str] = []
    for _, name in sorted(fitting, reverse=True):
        short = {"sequence_length": 1} if "sequence_length" in sources.get(name).option_names() else {}
        try:
            source = TrainConfig.of(data=[name], data_options={"folder": str(folder)}, **short).open_source()
            source.check()
        except ScanlError as error:
            errors.append(str(error))
        else:
            print(f"{name}: {source}")
    if len(errors) == len(fitting):
        raise DataError(errors[0])
    return 0


def _paths(files: Files, folder: Path) -> list[Path]:
    candidates = (files.find(name, str(folder)) for name in (*files.needs, *files.or_needs))
    return [path for path in candidates if path is not None]
