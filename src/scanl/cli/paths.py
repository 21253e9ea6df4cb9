"""The files and folders that a command line names, looked for before the command is imported.

To import torch takes seconds, and a misspelt path should not wait for it.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from scanl.errors import ConfigError
from scanl.files import BYTE_MODELS, PRETRAINED_NAME, check_folder, check_run, is_panel

FIRST_WORD = "the first argument"
PROGRAMS = (".pt2", ".onnx")  # endings of files of models that `scanl export` reads
TABLES = (".csv", ".tsv", ".gz", ".parquet", ".feather", ".xlsx", ".npz")
OTHER_FORM = re.compile(r"[*?\[]|://|^-$")  # in words that stand for files, but are no paths: patterns, URLs, -


def check_paths(command: str, argv: Sequence[str]) -> None:
    """Raise an error for a path that a command reads, where nothing is at it."""
    if "--help" in argv or "-h" in argv:
        return
    for name, check in PATHS.get(command, {}).items():
        for word in words_of(argv, name):
            check(command, name, word)


def words_of(argv: Sequence[str], name: str) -> Iterator[str]:
    """Yield the values of an option: the words behind it, up to the next option."""
    if name == FIRST_WORD:
        yield from (word for word in argv[:1] if not word.startswith("-"))
        return
    inside = False
    for word in argv:
        option, equals, value = word.partition("=")
        if word.startswith("--"):
            inside = option.replace("_", "-") == name
            if inside and equals:
                yield value
        elif inside:
            yield word


def _path(command: str, name: str, word: str) -> None:
    """Refuse a path. A word without a slash and an ending may be a name of data."""
    path = Path(word)
    if (path.name != word or path.suffix) and not OTHER_FORM.search(word) and not os.path.exists(word):
        argument = "data" if name == FIRST_WORD else name.lstrip("-").replace("-", "_")
        raise ConfigError(f"{command}: {argument} is {word}, which does not exist")


def _file(command: str, name: str, word: str) -> None:
    if not os.path.isfile(word):
        raise ConfigError(f"{command}: {name.lstrip('-')} is {word}, which is not a file")


def _run(command: str, name: str, word: str) -> None:
    check_run(word)


def _run_or_pretrained(command: str, name: str, word: str) -> None:
    if word != PRETRAINED_NAME:
        check_run(word)


def _run_or_name(command: str, name: str, word: str) -> None:
    if os.path.isdir(word) or not (BYTE_MODELS / word).is_dir():
        check_run(word)


def _run_or_file(endings: Sequence[str], command: str, name: str, word: str) -> None:
    if os.path.isfile(word) or Path(word).suffix in endings:
        _path(command, name, word)
    else:
        check_run(word)


def _exported(command: str, name: str, word: str) -> None:
    if word != PRETRAINED_NAME and (os.path.isdir(word) or not (BYTE_MODELS / word).is_dir()):
        _run_or_file(PROGRAMS, command, name, word)


def _run_or_panel(command: str, name: str, word: str) -> None:
    if not is_panel(word):
        _run_or_file(TABLES, command, name, word)


def _folder(command: str, name: str, word: str) -> None:
    check_folder(command, word)


def _input(command: str, name: str, word: str) -> None:
    if word != "-" and not os.path.isfile(word):
        raise ConfigError(f"{command}: {word} is not a file; name files, or - for the standard input")


TRAINING_PATHS = {"--config": _file, "--resume": _run, "--init": _run, "--data": _path}
PATHS: Mapping[str, Mapping[str, Callable[[str, str, str], None]]] = {
    "train": {**TRAINING_PATHS, "--init": _run_or_pretrained},
    "lr": TRAINING_PATHS,
    "learn": {FIRST_WORD: _path, "--data": _path},
    "forecast": {FIRST_WORD: _run_or_panel, "--data": _path, "--future-data": _path},
    "predict": {FIRST_WORD: _run, "--data": _path},
    "generate": {FIRST_WORD: _run_or_name, "--prompt-file": _path},
    "eval": {FIRST_WORD: _run, "--data": _path},
    "export": {FIRST_WORD: _exported},
    "serve": {FIRST_WORD: _folder},
    "bench-decode": {FIRST_WORD: _folder},
    "quantize": {FIRST_WORD: _folder},
    "pack": {FIRST_WORD: _input},
    "unpack": {FIRST_WORD: _input},
    "demo": {"--data": _path},
}
