"""Files that are written whole or not at all, and folders that one process at a time may write to."""

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
    """A temporary file in the same folder; when the block ends well, it is flushed to disk and renamed to `path`.

    CheckpointError when the disk is full, or the folder may not be written to.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp{path.suffix}")
    try:
        with writing(path):
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        with suppress(OSError):  # not there any more; or the disk is at fault, which has been said
            temporary.unlink()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write into a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder: CheckpointError, which names the holder, while another process does.

    The system lets go of the lock when its process ends, however that happens; what is left then is a file without a
    meaning. A file system without locks gives a warning.
    """
    # On NFS, Linux turns the lock into one that the server keeps, unless the folder is mounted with `nolock` or
    # `local_lock`: then processes on two machines do not see each other's.
    path = folder / ".lock"
    while True:
        with writing(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if not _lock(descriptor, folder):
            os.close(descriptor)
            raise CheckpointError(f"run: {folder} is in use by {_holder(path)}; wait until it has ended, or stop it")
        if _is_file(descriptor, path):
            break
        os.close(descriptor)  # its holder has just ended and removed it: take the lock of the next file
    try:
        with writing(path):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        with suppress(OSError):  # Windows removes no open file; a file that stays has no meaning
            path.unlink()
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, 2**30, os.SEEK_SET)  # beyond the text, which the others read
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        warnings.warn(f"{folder} cannot be locked ({error.strerror}): start no second run in it", stacklevel=2)
    return True


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    with suppress(OSError):  # it may be gone by now
        return path.read_text(encoding="utf-8", errors="replace") or "another process"
    return "another process"
