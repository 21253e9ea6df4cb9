"""Machine code of kernels on disk, so that a later process compiles nothing.

The name of a file has a digest of all that its machine code depends on: the source of the kernel's file and of the
files of kernels that it imports, the arguments, the processor and the versions. numba's own cache looks at the
kernel's file alone, and has several kernels in one index, which processes overwrite for one another.
"""

import functools
import hashlib
import linecache
import pickle
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from scanl.ops._frame import cache

_IMPORT = re.compile(r"^from (scanl\.ops\.(?:_cpu|products)\.\w+) import ", re.MULTILINE)


class MachineCode:
    """The machine code of one kernel on disk, as numba asks for it."""

    def __init__(self, function: Callable, source: str, arguments: Any):
        """source: digest of the function's source.   arguments: their types."""
        self._function, self._source, self._arguments = function, source, arguments

    def _path(self, codegen: Any) -> Path:
        if not self._source:
            raise OSError(f"the source of {self._function.__module__} is missing")
        name = f"{self._function.__module__.rpartition('.')[2]}.{self._function.__name__}"
        versions = numba.__version__, sys.version_info[:3]
        parts = self._function.__qualname__, self._source, self._arguments, codegen.magic_tuple(), versions
        return cache.folder() / f"{name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.nbc"

    def load_overload(self, signature: Any, target_context: Any) -> CompileResult | None:
        """Return the compiled kernel; None if there is none, or its file is damaged."""
        target_context.refresh()
        try:
            content = cache.read(self._path(target_context.codegen()))
        except OSError:
            return None
        try:
            return CompileResult._rebuild(target_context, *pickle.loads(content))
        except Exception:  # damaged bytes may raise anything: the kernel is compiled, and written again
            return None

    def save_overload(self, signature: Any, compiled: CompileResult) -> None:
        """Keep a compiled kernel; warn if that is impossible."""
        assert not compiled.library.has_dynamic_globals  # they are addresses of this process
        keep(lambda: self._path(compiled.library.codegen), dumps(compiled._reduce()))


@functools.cache
def source_digest(module: str | None) -> str:
    """Return a digest of the source of a module and of the files of kernels that it imports; "" without a source.

    module: its name; None for code that belongs to no module.

    Call it while the module is imported: later its file may be another one.
    """
    loaded = sys.modules.get(module or "")
    text = "".join(linecache.getlines(getattr(loaded, "__file__", None) or "", vars(loaded) if loaded else None))
    parts = [text, *map(source_digest, dict.fromkeys(_IMPORT.findall(text)))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest() if all(parts) else ""


def keep(path: Callable[[], Path], content: bytes) -> None:
    """Write a file of the folder of kernels; warn if that is impossible."""
    try:
        cache.write(path(), content)
    except OSError as error:
        _without_cache(str(error))


_warned = False


def _without_cache(reason: str) -> None:
    """Warn once, saying what to do."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "scanl: compiled kernels cannot be kept on disk, so every process takes seconds to compile each of them; "
            f"set the environment variable NUMBA_CACHE_DIR to a folder with room that can be written to ({reason})",
            RuntimeWarning,
            stacklevel=2,
        )
