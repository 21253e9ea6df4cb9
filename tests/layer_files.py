"""What the test files of layers declare: equations and refusals, which laws over all layers read."""

import importlib
from pathlib import Path

TESTS = Path(__file__).parent


def declared(name):
    """Return the values of `name`, one for each test file of a layer that assigns it."""
    paths = [
        path for path in sorted((TESTS / "layers").rglob("test_*.py")) if f"\n{name} = " in path.read_text("utf-8")
    ]
    files = [path.relative_to(TESTS.parent).with_suffix("") for path in paths]
    return [getattr(importlib.import_module(".".join(file.parts)), name) for file in files]
