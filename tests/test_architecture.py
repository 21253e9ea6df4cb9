"""The plan of docs/design.md, read from every import and folder.

Arrows point down, in no circle. Private names stay at home. A folder has few files, or files of one kind.
"""

import ast
import functools
import re
import types
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import pytest

from scanl.layers.registry import layers
from scanl.learning.algorithms import algorithms

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
    "export": {"common", "ops", "layers", "models", "hub"},
    "packing": {"common", "ops", "layers", "models"},
    "compat": {"common", "ops", "layers"},
    "parallel": {"common", "ops", "layers", "models"},
    "serve": {"common", "ops", "layers", "models"},
    "cli": {
        "common",
        "ops",
        "layers",
        "models",
        "data",
        "tasks",
        "learning",
        "hub",
        "inspect",
        "export",
        "serve",
        "packing",
    },
}
# Folders that hold one kind of thing, one file each. Every other folder has at most `MAX_FILES`.
REGISTRIES = {
    *("ops", "ops/_cpu", "ops/_triton", "tasks", "cli", "learning/algorithms", "data/readers", "data/published"),
    *(f"layers/{family}" for family in ("memory", "rwkv", "ssm", "rnn", "ode", "attention", "channel", "parts")),
}
MAX_FILES = 18
# What `dir()` of a room shows. Those of `compat` are the modules of other libraries.
ROOMS = (
    "data",
    "export",
    "hub",
    "inspect",
    "layers",
    "learning",
    "models",
    "ops",
    "packing",
    "parallel",
    "serve",
    "tasks",
)
FAMILIES = {"memory", "rwkv", "ssm", "rnn", "ode", "attention", "channel"}
# A name that ends in one of these is no noun: words of a closed class, and participles that do not end in -ed.
CLOSED = re.findall(
    r"\w+",
    """a above across after again ahead all alone apart aside at away before below beside both down each every few here
    large last least less long many more most much next no of off on once only out over own past plain same small so
    some such that there these this to under up what when where which who with within
    begun broken drawn found given grown held hidden kept known learnt left lost made meant put read seen sent shown
    shrunk stood sung taken told worn written""",
)
ENDED = {"digest", "embed", "feed", "need", "request", "seed", "speed", "test"}  # nouns that end as participles do


def room(module):
    """The room of a module: the folder below scanl, or "common" for a file there."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in BELOW else "common"


@functools.cache
def imports(module):
    """(module, name, when) of each import of ours; when: "", "late" in a function, "types" for type checkers alone."""
    found = []

    def visit(node, when):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):  # holds no statement
                continue
            inner = "types" if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING" else when
            if when == "" and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = "late"
            if isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "scanl":
                assert child.level == 0
                for alias in child.names:
                    whole = f"{child.module}.{alias.name}"
                    found.append((whole if whole in FILES else child.module, alias.name, when))
            elif isinstance(child, ast.Import):
                found.extend((a.name, "", when) for a in child.names if a.name.split(".")[0] == "scanl")
            visit(child, inner)

    visit(ast.parse(FILES[module].read_text("utf-8")), "")
    return found


def test_files_are_found():
    assert len(FILES) > 150
    assert ("scanl.errors", "ConfigError", "") in imports("scanl.registry")


def upward(module):
    """What a module imports from rooms above its own."""
    own = room(module)
    taken = [(target, name) for target, name, when in imports(module) if when != "types"]
    up = {f"{target} ({name})" for target, name in taken if room(target) not in BELOW[own] | {own}}
    folder = (*module.split("."), "")[2]
    if own == "layers" and module != "scanl.layers" and folder not in FAMILIES:  # parts and protocol know no model
        up |= {target for target, _ in taken if (*target.split("."), "", "")[2] in FAMILIES}
    return sorted(up)


def test_arrows_point_down():
    assert not {module: up for module in FILES if module != "scanl" and (up := upward(module))}


def test_no_circle():
    """A folder's __init__ counts as its face: what is below it imports modules, never the face.

    What only type checkers read counts too, but for the names of `scanl` itself.
    """
    left_out = {"scanl": ("late", "types")}
    arrows = {
        name: {target for target, _, when in imports(name) if when not in left_out.get(name, ("late",))} & FILES.keys()
        for name in FILES
    }
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
        for target, name, when in imports(module)
        if when != "types"
        and name.startswith("_")
        and not name.endswith("__")
        and not (target in FILES and target.endswith(f".{name}"))
    ]
    assert not taken


def test_a_folder_has_few_files_or_one_kind():
    root = SRC / "scanl"
    counts = {str(path.relative_to(root)): len(list(path.glob("*.py"))) for path in root.rglob("*") if path.is_dir()}
    assert not REGISTRIES - counts.keys()
    assert {name: count for name, count in counts.items() if count > MAX_FILES and name not in REGISTRIES} == {}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_shows_what_can_be_used(room):
    package = import_module(f"scanl.{room}")
    shown = dir(package)
    assert shown
    assert not [name for name in shown if isinstance(getattr(package, name), types.ModuleType) or name.startswith("_")]


@functools.cache
def defined():
    """(name, module, whether it is a class) of each class and each constant of a module."""
    found = []
    for module, path in FILES.items():
        tree = ast.parse(path.read_text("utf-8"))
        found += [(node.name, module, True) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            found += [(name, module, False) for name in names if name.isupper()]
    return found


def test_a_class_name_is_defined_once():
    """Those of `compat` are the names of other libraries."""
    homes = defaultdict(set)
    for name, module, is_class in defined():
        if is_class and not name.startswith("_") and room(module) != "compat":
            homes[name].add(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_classes_and_constants_end_in_a_noun():
    """What a room shows has the names of the field."""
    public = {name for room in ROOMS for name in dir(import_module(f"scanl.{room}"))} | {"IGNORED"}
    public |= {registry.get(name).__name__ for registry in (layers, algorithms) for name in registry.names()}

    def is_noun(name):
        word = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)[-1].lower()
        return word not in CLOSED and (word in ENDED or not re.fullmatch(r"[a-z]+(ed|est)", word))

    assert [f"{module}.{name}" for name, module, _ in defined() if name not in public and not is_noun(name)] == []
