"""Sources of generated kernels: they are kept in files, so that people and the compilers can read them."""

import hashlib
import linecache
import sys
import threading
import types
from pathlib import Path

from scanl.ops._frame import cache

_WRITES = threading.Lock()


def load(name: str, text: str) -> types.ModuleType:
    """Return the module with this source, which is kept in a file if the folder of kernels can be written to."""
    title = f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    path = _kept(f"{title}.py", text)
    module = types.ModuleType(f"scanl_cells.{title}")
    module.__file__ = f"<cell {title}>" if path is None else str(path)
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)
    sys.modules[module.__name__] = module  # the compilers look it up by its name
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    return module


def _kept(name: str, text: str) -> Path | None:
    """Return the file with this text, written if it is missing or damaged; None if it cannot be."""
    try:
        path = cache.folder() / name
        with _WRITES:
            if not path.exists() or cache.read(path) != text.encode():
                cache.write(path, text.encode())
    except OSError:  # a full disk, or no folder: the kernel runs from memory
        return None
    return path
