"""Write files atomically, lock folders so that only one process writes to them, and find the user's cache."""

import os
import shutil
import socket
import sys
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scanl.errors import CheckpointError, ConfigError

CONFIG = "config.yaml"  # the file of a run folder with its configuration
BYTE_MODELS = Path(__file__).with_name("models") / "weights"  # a folder for each model of bytes that comes with scanl
PRETRAINED_NAME = "pretrained"  # in the place of a run: the forecaster in the package


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary file in the same folder. When the block succeeds, flush it to disk and rename it to `path`.

    Raises CheckpointError when the disk is full or the folder is not writable.
    """
    temporary = temporary_path(path)
    try:
        with writing(path):
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        with suppress(OSError):  # the file was renamed, or the error above reports a disk failure
            temporary.unlink()


@contextmanager
def files_written_whole(path: Path) -> Iterator[Path]:
    """Yield a path of the same name in a temporary folder, for a writer that makes other files beside it.

    When the block succeeds, flush all of them to disk and move them to the folder of `path`, `path` itself last. Raises
    CheckpointError as `written_whole` does.
    """
    folder = temporary_path(path)
    try:
        with writing(path):
            folder.mkdir()
            yield folder / path.name
            files = sorted(folder.iterdir(), key=lambda file: file.name == path.name)
            for file in files:
                with file.open("rb+") as opened:
                    os.fsync(opened.fileno())
            for file in files:
                os.replace(file, path.with_name(file.name))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def temporary_path(path: Path) -> Path:
    """Return a name beside `path` that no other thread, process, container or machine uses: `.NAME.*.tmp.ENDING`."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp{path.suffix}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError of the block into a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error


def check_run(path: str | Path) -> None:
    """Raise CheckpointError unless the folder of a run is at `path`."""
    if not os.path.isdir(path):
        raise CheckpointError(f"run: {path} is not a folder; name one that `scanl train` has written")
    if not os.path.isfile(Path(path, CONFIG)):
        raise CheckpointError(
            f"run: {path} is not a run folder: it has no {CONFIG}; name one that `scanl train` has written"
        )


def is_panel(path: str | Path) -> bool:
    """Return whether a folder of Parquet files is at `path`, which is no run."""
    return os.path.isdir(path) and not os.path.isfile(Path(path, CONFIG)) and any(Path(path).rglob("*.parquet"))


def check_folder(who: str, path: str | Path) -> None:
    """Raise CheckpointError unless the folder of a run, or of another model, is at `path`."""
    if not os.path.isdir(path):
        raise CheckpointError(f"{who}: {path} is not a folder, expected a run or the folder of a model")


def check_new_folder(who: str, name: str, path: Path) -> None:
    """Raise ConfigError unless a folder can be made at `path`, with those above it, or is there and can be written.

    who, name: the command or function, and its argument, in the message.
    """
    above = path
    while not _is_there(who, name, above):
        above = above.parent
    if not above.is_dir():
        what = "which is a file" if above == path else f"but {above} is a file"
        raise ConfigError(f"{who}: {name} is {path}, {what}, expected a new folder; choose another --{name}")
    _try_to_write(who, name, path, above)


def check_new_file(who: str, name: str, path: Path) -> None:
    """Raise ConfigError unless a file can be written at `path`. who, name: as in `check_new_folder`."""
    if _is_there(who, name, path) and path.is_dir():
        raise ConfigError(f"{who}: {name} is {path}, which is a folder, expected the path of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{who}: {name} is {path}, whose folder does not exist; make it first")
    _try_to_write(who, name, path, path.parent)


def _is_there(who: str, name: str, path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ConfigError(f"{who}: {name} is {path}, which cannot be written: {error.strerror}") from error
    return True


def _try_to_write(who: str, name: str, path: Path, folder: Path) -> None:
    """Make a file without a name in a folder: permissions alone do not say what a file system allows."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{who}: {name} is {path}, which cannot be written: {error.strerror}") from error


@contextmanager
def locked(folder: Path, name: str = ".lock", what: str | None = None) -> Iterator[None]:
    """Lock a folder for this process. If another process holds it, raises a CheckpointError that names the process.

    The system releases the lock whenever the process ends. A file `name` that remains has no meaning. On a file system
    without locks there is only a warning.

    what: the thing that is locked, for the message; None: the run in the folder. It has a file `name` of its own.
    """
    # On NFS under Linux the server keeps the lock, so it works between machines, unless the folder is mounted with
    # `nolock` or `local_lock`.
    path = folder / name
    while True:
        with writing(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if not _lock(descriptor, folder):
            os.close(descriptor)
            raise CheckpointError(
                f"{what or f'run: {folder}'} is in use by {_holder(path)}; wait until it has ended, or stop it"
            )
        if _is_file(descriptor, path):
            break
        os.close(descriptor)  # the other process has just ended and removed the file: lock a new one
    try:
        with writing(path):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        with suppress(OSError):  # Windows does not remove an open file; a remaining file has no meaning
            path.unlink()
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, 2**30, os.SEEK_SET)  # past the text, which other processes read
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        warnings.warn(f"{folder} cannot be locked ({error.strerror}): do not start a second run in it", stacklevel=2)
    return True


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    with suppress(OSError):  # it may already be removed
        return path.read_text(encoding="utf-8", errors="replace") or "another process"
    return "another process"


def user_cache() -> Path:
    """Return scanl's folder in the user's cache, by the rules of the system; it may be missing.

    It is in `%LOCALAPPDATA%` on Windows, in ~/Library/Caches on macOS, and elsewhere in `XDG_CACHE_HOME` or ~/.cache.
    Raises OSError if the user has no home folder.
    """
    if sys.platform == "win32":
        chosen, usual = os.environ.get("LOCALAPPDATA", ""), ("AppData", "Local")
    elif sys.platform == "darwin":
        chosen, usual = "", ("Library", "Caches")
    else:
        chosen, usual = os.environ.get("XDG_CACHE_HOME", ""), (".cache",)
    if os.path.isabs(chosen):  # the XDG specification ignores a path that is not
        return Path(chosen, "scanl")
    try:
        return Path.home().joinpath(*usual, "scanl")
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from error
