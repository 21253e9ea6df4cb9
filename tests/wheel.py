"""Try a built wheel alone: in a fresh environment, outside the checkout.

    python tests/wheel.py try dist/scanl-0.1.0-py3-none-any.whl
    python tests/wheel.py lowest

`try` downloads nothing. The fresh environment gets the wheel, and links to the packages that the wheel's metadata asks
for. These are taken from the environment that runs this program, and no other package of it can be imported. So a
dependency that is not declared is missing, and one that is too old is reported. tests/smoke.py runs there. `lowest`
prints the oldest versions that pyproject.toml allows, as constraints for pip.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

TESTS = Path(__file__).parent
EXTRA = "series"  # what a forecast of a table needs beside scanl


def needed(requirements: list[Requirement]) -> dict[str, Distribution]:
    """Return what is installed here of the requirements, and of theirs, by name. Refuse what is absent or too old."""
    known: dict[str, Distribution] = {}
    visited: set[tuple[str, str]] = set()
    waiting = [(each, "") for each in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            package = distribution(requirement.name)
        except PackageNotFoundError:
            sys.exit(f"wheel: {requirement} is not installed here")
        if not requirement.specifier.contains(package.version, prereleases=True):
            sys.exit(f"wheel: {requirement.name} {package.version} is installed here, expected {requirement.specifier}")
        known[requirement.name.lower()] = package
        for extra in ("", *requirement.extras):
            if (requirement.name, extra) not in visited:
                visited.add((requirement.name, extra))
                waiting += [(Requirement(line), extra) for line in package.requires or ()]
    return known


def metadata(wheel: Path) -> list[Requirement]:
    """Return what a wheel requires, with the extra's requirements."""
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = re.findall(r"^Requires-Dist: (.*)$", archive.read(name).decode(), re.MULTILINE)
    requirements = [Requirement(line) for line in lines]
    return [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": EXTRA})]


def link(package: Distribution, site: Path) -> None:
    """Link a package's top-level folders and files into another environment's folder of packages."""
    for name in {file.parts[0] for file in package.files or () if file.parts[0] not in ("..", "__pycache__")}:
        if not (site / name).exists():
            (site / name).symlink_to(Path(str(package.locate_file(name))).resolve())


def try_wheel(wheel: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, symlinks=True)
        python = Path(folder) / "bin" / "python"
        quiet = ["--disable-pip-version-check", "--python", str(python)]
        subprocess.run(
            [sys.executable, "-m", "pip", *quiet, "install", "-qq", "--no-deps", "--no-index", wheel], check=True
        )
        (site,) = Path(folder).glob("lib/python*/site-packages")
        for package in needed([Requirement(str(each).split(";")[0]) for each in metadata(wheel)]).values():
            link(package, site)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run([python, "-I", TESTS / "smoke.py"], cwd=folder, env=environment).returncode


def lowest() -> list[str]:
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"][EXTRA]]
    return [line.replace(">=", "==") for line in lines]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["try", wheel]:
            sys.exit(try_wheel(Path(wheel).resolve()))
        case ["lowest"]:
            print("\n".join(lowest()))
        case _:
            sys.exit(__doc__)
