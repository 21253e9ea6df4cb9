"""Sources of generated kernels: they are kept in files, so that the compilers of the kernels keep machine code."""

import hashlib
import importlib.util
import linecache
import os
import pathlib
import sys
import threading
import types

from scanl.errors import CheckpointError
from scanl.files import written_whole

_WRITES = threading.Lock()  # threads of a process would write the same temporary file


def folder() -> pathlib.Path | None:
    """Return the folder for generated sources, made if it is missing; None if none can be written to."""
    beside = pathlib.Path(__file__).parent / "__pycache__"
    given = os.environ.get("NUMBA_CACHE_DIR")
    wanted = [pathlib.Path(given) if given else beside]
    wanted.append(pathlib.Path.home() / ".cache" / "scanl")
    for place in wanted:
        try:
            (place / "cells").mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(place / "cells", os.W_OK):
            return place / "cells"
    return None


def load(name: str, text: str) -> types.ModuleType:
    """Return the module with this source, kept in a file if there is a folder for it."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    title, place = f"{name}_{digest}", folder()
    if place is not None:
        path = place / f"{title}.py"
        try:
            with _WRITES:
                if not path.exists() or path.read_text("utf-8") != text:
                    with written_whole(path) as file:
                        file.write_text(text, "utf-8")
            spec = importlib.util.spec_from_file_location(f"scanl_cells.{title}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # numba's cache looks the module up by its name
            spec.loader.exec_module(module)
            return module
        except (OSError, CheckpointError):
            pass  # a full disk: run from memory
    path = f"<cell {title}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    module = types.ModuleType(f"scanl_cells.{title}")
    exec(compile(text, path, "exec"), module.__dict__)
    return module
