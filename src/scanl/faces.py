"""Public names of packages, made from what their modules register.

A package whose classes register themselves has the names of these classes, and imports a class when its name is first
used. The stub beside it, `__init__.pyi`, is written from the registry by `docs/write.py`; it tells type checkers the
names, and this module where they are.
"""

import ast
import functools
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any


def face(
    package: str, classes: Callable[[], Iterable[type[Any]]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package.

    classes: imports all modules, and returns the registered classes. It is called for a name that the stub lacks.
    """

    def get(name: str) -> Any:
        module = table(package).get(name)
        if module is not None:
            return getattr(import_module(module), name)
        if name[0].isupper():  # else a module of the package, which Python itself finds
            for cls in members(package, classes()):
                if cls.__name__ == name:
                    return cls
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted(table(package).keys() - vars(sys.modules[package]).keys())

    return get, listed


def public(package: str) -> Callable[[], list[str]]:
    """Return `__dir__` of a package that imports its public names: these names, and no module."""
    return lambda: sorted(own(package))


def touched(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that imports each of its public names when it is first used."""

    def get(name: str) -> Any:
        module = own(package).get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module), name)

    return get, public(package)


def members(package: str, classes: Iterable[type[Any]]) -> list[type[Any]]:
    """Return the classes that are defined below a package."""
    return [cls for cls in classes if cls.__module__.startswith(f"{package}.")]


def stub(package: str, classes: Iterable[type[Any]]) -> str:
    """Return the text of a package's stub: what the package imports by itself, then each class."""
    names = {cls.__name__: cls.__module__ for cls in members(package, classes)} | own(package)
    lines = sorted((module, name.casefold(), name) for name, module in names.items())
    return "".join(f"from {module} import {name} as {name}\n" for module, _, name in lines)


@functools.cache
def table(package: str) -> dict[str, str]:
    """Return the module of each name in a package's stub."""
    return _imports(package, ".pyi")


def own(package: str) -> dict[str, str]:
    """Return the module of each name that a package makes public by itself, beside registered classes."""
    return _imports(package, ".py")


def _imports(package: str, suffix: str) -> dict[str, str]:
    """Return the module of each name that a package's file makes public: `from module import name as name`."""
    path = Path(str(import_module(package).__file__)).with_suffix(suffix)
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else []
    lines = [(name, str(node.module)) for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names]
    return {name.name: module for name, module in lines if name.asname == name.name}
