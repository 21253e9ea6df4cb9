"""The folder of generated kernels, for their source and their machine code.

It belongs to the user, and never lies in the package. Names of files contain a digest of all that the content depends
on, so a file never becomes wrong, and processes that write it at the same time write the same. Files that nothing reads
any more are deleted when the folder has grown.
"""

import os
import stat
import sys
import uuid
from contextlib import suppress
from pathlib import Path

from scanl.files import user_cache

LIMIT = 1 << 28  # bytes in the folder; twenty times what all kernels of the library take for one dtype


def folder() -> Path:
    """Return the folder of generated kernels: scanl in `NUMBA_CACHE_DIR`, or kernels in the user's cache.

    It may be missing. Raises OSError if the user has no home folder.
    """
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    return Path(chosen) / "scanl" if chosen else user_cache() / "kernels"


def read(path: Path) -> bytes:
    """Return the content of a file of the folder, which counts as used now.

    Raises OSError if there is none, or if other users can have written it: what it holds runs as the user's program.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if sys.platform != "win32" and (status.st_uid not in (0, os.getuid()) or status.st_mode & stat.S_IWOTH):
            raise PermissionError(f"{path} belongs to another user, or every user may write it")
        content = file.read()
    with suppress(OSError):  # a folder that may only be read
        os.utime(path)
    return content


def write(path: Path, content: bytes) -> None:
    """Write a file of the folder whole or not at all, then delete others if the folder has grown too large.

    Raises OSError if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # not a process's number: machines and containers that share the folder have equal ones
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    _prune(path.parent)


def _prune(place: Path) -> None:
    """Delete the files that were not used for longest, until at most LIMIT bytes are left."""
    used = []
    for path in place.iterdir():
        with suppress(OSError):  # another process has just deleted it
            entry = path.stat()
            used.append((entry.st_mtime_ns, entry.st_size, path))
    total = sum(size for _, size, _ in used)
    for _, size, path in sorted(used)[:-1]:
        if total <= LIMIT:
            return
        with suppress(OSError):  # as above, or Windows while another process reads it
            path.unlink()
        total -= size
