"""Tests mirror the source: `tests/X/test_Y.py` tests `src/scanl/X/Y.py`, or a law file lists X/Y in `COVERS`.

`COVERS` has modules without a file of their own, "ops/gru", and packages all of whose modules a law finds by
themselves, "tasks/*".
"""

import ast
import functools
import itertools
from fnmatch import fnmatchcase
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "scanl"


def is_public(path):
    """Whether a module and the folders around it have public names, and it defines one."""
    if any(part.startswith("_") for part in path.relative_to(SOURCE).parts):
        return False
    for node in ast.parse(path.read_text("utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        names = [getattr(target, "name", getattr(target, "id", "_")) for target in targets]
        if not isinstance(node, ast.Import | ast.ImportFrom) and not all(name.startswith("_") for name in names):
            return True
    return False


def lists():
    """Return what `COVERS` has in each law file."""
    found = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text("utf-8")
        if "\nCOVERS = " in text:
            (value,) = (
                node.value
                for node in ast.parse(text).body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COVERS"
            )
            found[str(path.relative_to(TESTS))] = ast.literal_eval(value)
    return found


@functools.cache
def modules():
    """Return the public modules. To read them all takes a second, which only the worker that tests them spends."""
    paths = [path for path in sorted(SOURCE.rglob("*.py")) if is_public(path)]
    return [path.relative_to(SOURCE).with_suffix("").as_posix() for path in paths]


def own_file(module):
    """Return the test file of a module."""
    folder, _, name = module.rpartition("/")
    return TESTS / folder / f"test_{name}.py"


def covers(pattern, module):
    """Whether an entry of `COVERS` stands for a module. A star stands for one name, not for a path."""
    return fnmatchcase(module, pattern) and module.count("/") == pattern.count("/")


def test_a_module_has_a_test_file_or_a_law_that_covers_it():
    patterns = list(itertools.chain(*lists().values()))
    untested = [
        f"src/scanl/{module}.py: write {own_file(module).relative_to(TESTS.parent)}, or add it to COVERS of its law"
        for module in modules()
        if not own_file(module).exists() and not any(covers(pattern, module) for pattern in patterns)
    ]
    assert not untested, "\n".join(untested)


def test_lists_name_modules_that_exist_and_have_no_file():
    covered = lists()
    patterns = list(itertools.chain(*covered.values()))
    assert len(patterns) == len(set(patterns)), "two laws list one module"
    for file, own in covered.items():
        for pattern in own:
            matches = [module for module in modules() if covers(pattern, module)]
            assert matches, f"{file}: COVERS has {pattern!r}, which is no public module"
            assert not all(own_file(module).exists() for module in matches), f"{file}: {pattern!r} has its own file"
