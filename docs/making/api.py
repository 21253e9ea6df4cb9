"""The pages of the public names that have no pages of their own: one for each package, from which autodoc reads them.

A name is public where its package imports it under its own name, or has it in `__all__`. A module is public if a page
imports from it.
"""

import ast
import functools
import inspect
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import scanl
from making.docstrings import markdown, pieces, prose
from making.models import table
from scanl import faces
from scanl.data import sources
from scanl.inspect import inspectors
from scanl.layers import classes
from scanl.learning.algorithms import algorithms
from scanl.ops import registry

IMPORT = re.compile(r"^\s*from (scanl(?:\.\w+)*) import ", re.MULTILINE)
ELSEWHERE = "scanl.cli"  # the command has pages of its own


def modules(docs: Path) -> list[str]:
    """Return the packages with public names, and the modules from which the pages below a folder import."""
    named = {name for path in docs.glob("*.md") for name in IMPORT.findall(path.read_text(encoding="utf-8"))}
    listed = {*_packages(), *named, "scanl.errors"} - {"scanl"}
    return [name for name in sorted(listed) if "._" not in name and names(name)]


@functools.cache
def _packages() -> list[str]:
    every = [module.name for module in pkgutil.walk_packages(scanl.__path__, "scanl.") if module.ispkg]
    return sorted(name for name in every if "._" not in name and name != ELSEWHERE)


@functools.cache
def names(module: str) -> list[str]:
    """Return the public names of a module that autodoc reads: no modules, and nothing that has a page."""
    if not _is_package(module):  # it may import a package that is not here
        defined = [node for node in _parsed(module).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        return sorted(
            [*_made(module), *(node.name for node in defined if node.name[0] != "_" and ast.get_docstring(node))]
        )
    loaded = import_module(module)
    every = {*vars(loaded).get("__all__", ()), *faces.own(module)}
    paged = {*registry.names(), *(cls.__name__ for cls in classes())}
    paged |= {algorithms.get(name).__name__ for name in algorithms.names()}
    paged |= {cls.__name__ for cls in map(sources.get, sources.names())} | {*inspectors.names()}
    return sorted(name for name in every - paged if not isinstance(vars(loaded).get(name), ModuleType))


def _made(module: str) -> dict[str, str]:
    """Return the docstrings of classes that a call makes: `NAME.__doc__ = "..."`."""
    lines = [node for node in _parsed(module).body if isinstance(node, ast.Assign)]
    return {
        text.removesuffix(".__doc__"): ast.literal_eval(line.value)
        for line in lines
        if (text := ast.unparse(line.targets[0])).endswith(".__doc__") and isinstance(line.value, ast.Constant)
    }


def _is_package(module: str) -> bool:
    return _file(module).name == "__init__.py"


def _file(module: str) -> Path:
    found = find_spec(module)
    assert found is not None
    return Path(str(found.origin))


def _parsed(module: str) -> ast.Module:
    return ast.parse(_file(module).read_text(encoding="utf-8"))


def pages(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the text of each page below a folder, which lies in that of the hand-written pages."""
    listed = modules(folder.parent)
    for module in listed:
        yield folder / "api" / f"{module}.md", page(module)
    yield folder / "api.md", index(listed)


def page(module: str) -> str:
    """Return the page of a module."""
    about = markdown(pieces(ast.get_docstring(_parsed(module))))
    entries = _of_package(module) if _is_package(module) else list(_written(module))
    return "\n\n".join([f"# {module}", *about, *entries]) + "\n"


def _of_package(module: str) -> list[str]:
    """Return the paragraphs of a package: what autodoc reads, names that another page has, and optional ones."""
    present = vars(import_module(module))  # the other names are imported when they are used: of an optional package
    own = [name for name in names(module) if name in present and _home(module, name) == module]
    others = [(name, _home(module, name)) for name in names(module) if name in present and name not in own]
    lazy = {name: faces.own(module)[name] for name in names(module) if name not in present}
    also = [f"`{name}` of [{home}]({home}.md)" for name, home in others]
    summary = [".. autosummary::", "   :nosignatures:", "", *(f"   {module}.{name}" for name in own), ""]
    directives = [line for name in own for line in _directive(module, name)]
    lines = "\n".join(["```{eval-rst}", *summary, *directives, "```"])
    written = [text for name, home in lazy.items() for text in _written(home, name)]
    return [*([lines] if own else []), *([f"It has {', '.join(also)} too."] if also else []), *written]


def _home(module: str, name: str) -> str:
    """Return the package whose page documents a name: the first that has the same class or function."""
    value = getattr(import_module(module), name)
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return module
    having = (other for other in _packages() if vars(import_module(other)).get(name) is value and name in names(other))
    return next(having, module)


def _directive(module: str, name: str) -> list[str]:
    value = getattr(import_module(module), name)
    kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
    return [f".. auto{kind}:: {module}.{name}", *(["   :members:"] if kind == "class" else []), ""]


def _written(module: str, only: str | None = None) -> Iterator[str]:
    """Yield the paragraphs about the names of a module, or one of them, without its import."""
    public = [only] if only else names(module)
    for name, text in _made(module).items():
        if name in public:
            yield f"## {name}"
            yield from markdown(pieces(text))
    for node in _parsed(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in public:
            yield f"## {node.name}"
            yield from _described(node)
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and method.name[0] != "_" and ast.get_docstring(method):
                    yield f"### {node.name}.{method.name}"
                    yield from _described(method)


def _described(node: ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    """Yield how a class or a function is called, and its docstring."""
    start = (
        node
        if isinstance(node, ast.FunctionDef)
        else next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    )
    if start is not None:
        arguments = ast.unparse(start.args).removeprefix("self, ").removeprefix("self")
        yield f"```text\n{node.name}({arguments})\n```"
    every = [] if start is None else [*start.args.posonlyargs, *start.args.args, *start.args.kwonlyargs]
    yield from markdown(pieces(ast.get_docstring(node), [each.arg for each in every]))


def index(listed: list[str]) -> str:
    """Return the page that leads to the modules."""
    rows = [(f"[{name}](api/{name}.md)", prose(_first(name))) for name in listed]
    toctree = "\n".join([":::{toctree}", ":hidden:", *(f"api/{name}" for name in listed), ":::"])
    about = "Layers, ops, algorithms, sources and tasks have pages of their own. This is all else that is public."
    return "\n\n".join(["# Packages", about, table(("", ""), rows), toctree]) + "\n"


def _first(module: str) -> str:
    return (ast.get_docstring(_parsed(module)) or "").split("\n\n")[0]
