"""The plan of docs/design.md, read from every import: arrows point down, in no circle; private names stay at home."""

import ast
import functools
from pathlib import Path

SRC = Path(__file__).parents[1] / "src"
FILES = {
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((SRC / "scanl").rglob("*.py"))
}
# What each room may import beside itself.
BELOW: dict[str, set[str]] = {
    "common": set(),  # errors, files, digests, registry
    "ops": {"common"},
    "layers": {"common", "ops"},
    "models": {"common", "ops", "layers"},
    "data": {"common"},
    "tasks": {"common", "data"},
    "learning": {"common", "ops", "layers", "models", "data", "tasks", "parallel"},
    "hub": {"common", "ops", "layers", "models"},
    "inspect": {"common", "ops", "layers", "models"},
    "export": {"common", "ops", "layers", "models"},
    "compat": {"common", "ops", "layers"},
    "parallel": {"common", "ops", "layers", "models"},
    "serve": {"common", "ops", "layers", "models"},
    "cli": {"common", "ops", "layers", "models", "data", "tasks", "learning", "hub", "inspect", "export", "serve"},
}
FAMILIES = {"memory", "rwkv", "ssm", "rnn", "ode", "attention", "channel"}


def room(module):
    """The room of a module: the folder below scanl, or "common" for a file there."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in BELOW else "common"


@functools.cache
def imports(module):
    """(module, names) of each import of ours: everywhere in the file, but not what only type checkers read."""
    found = []

    def visit(node, inside_function):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):  # holds no statement
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "scanl":
                assert child.level == 0
                for alias in child.names:
                    whole = f"{child.module}.{alias.name}"
                    found.append((whole if whole in FILES else child.module, alias.name, inside_function))
            elif isinstance(child, ast.Import):
                found.extend((a.name, "", inside_function) for a in child.names if a.name.split(".")[0] == "scanl")
            visit(child, inside_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(ast.parse(FILES[module].read_text("utf-8")), False)
    return found


def test_files_are_found():
    assert len(FILES) > 150
    assert ("scanl.errors", "ConfigError", False) in imports("scanl.registry")


def upward(module):
    """What a module imports from rooms above its own."""
    own = room(module)
    up = {f"{target} ({name})" for target, name, _ in imports(module) if room(target) not in BELOW[own] | {own}}
    folder = (*module.split("."), "")[2]
    if own == "layers" and module != "scanl.layers" and folder not in FAMILIES:  # parts and protocol know no model
        up |= {target for target, *_ in imports(module) if (*target.split("."), "", "")[2] in FAMILIES}
    return sorted(up)


def test_arrows_point_down():
    assert not {module: up for module in FILES if module != "scanl" and (up := upward(module))}


def test_no_circle():
    """A folder's __init__ counts as its face: what is below it imports modules, never the face."""
    arrows = {name: {target for target, _, late in imports(name) if not late and target in FILES} for name in FILES}
    open_, done = [], set()

    def visit(name):
        assert name not in open_, " -> ".join([*open_[open_.index(name) :], name])
        if name in done:
            return
        open_.append(name)
        for target in sorted(arrows[name]):
            visit(target)
        done.add(open_.pop())

    for name in FILES:
        visit(name)


def test_private_names_stay_at_home():
    taken = [
        f"{module} from {target}: {name}"
        for module in FILES
        for target, name, _ in imports(module)
        if name.startswith("_") and not name.endswith("__") and not (target in FILES and target.endswith(f".{name}"))
    ]
    assert not taken
