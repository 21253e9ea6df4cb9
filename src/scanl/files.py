"""Files that are written whole or not at all, and folders that one process at a time writes to."""

import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scanl.errors import CheckpointError


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary file in the same folder. When the block ends well, it is flushed to disk and renamed to `path`.

    Raises CheckpointError when the disk is full, or when the folder is not writable.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp{path.suffix}")
    try:
        with writing(path):
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        with suppress(OSError):  # it was renamed; or the disk failed, and the error above says so
            temporary.unlink()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder for this process. Raises CheckpointError, which names the other process, when another has it.

    The system releases the lock when the process ends, however it ends. The file `.lock` that may remain means nothing.
    A file system without locks gives a warning.
    """
    # On NFS, Linux has the server keep the lock, so processes on two machines see each other's. They do not when the
    # folder is mounted with `nolock` or `local_lock`.
    path = folder / ".lock"
    while True:
        with writing(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if not _lock(descriptor, folder):
            os.close(descriptor)
            raise CheckpointError(f"run: {folder} is in use by {_holder(path)}; wait until it has ended, or stop it")
        if _is_file(descriptor, path):
            break
        os.close(descriptor)  # the other process has just ended and removed the file: lock the next one
    try:
        with writing(path):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        with suppress(OSError):  # Windows does not remove an open file, and a file that remains means nothing
            path.unlink()
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, 2**30, os.SEEK_SET)  # beyond the text, which other processes read
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
    with suppress(OSError):  # it may be removed by now
        return path.read_text(encoding="utf-8", errors="replace") or "another process"
    return "another process"
