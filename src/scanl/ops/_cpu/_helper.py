"""Functions that only kernels call."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
from numba import config, types  # pyright: ignore[reportPrivateImportUsage]
from numba.core.compiler_lock import global_compiler_lock

from scanl.ops._cpu._flat import flattened
from scanl.ops._cpu._pipeline import HelperCompiler


@contextmanager
def compiling() -> Iterator[Any]:
    """Let numba compile, and yield its settings. They are as before afterwards.

    NUMBA_DISABLE_JIT does not count here: without compilation there are no addresses, and kernels work on addresses.
    Python does not look for garbage meanwhile: a seventh of the time would go to that.
    """
    settings: Any = config  # numba gives it its attributes at run time
    with global_compiler_lock:
        saved, collects = (settings.DISABLE_JIT, settings.OPT), gc.isenabled()
        settings.DISABLE_JIT = 0
        gc.disable()
        try:
            yield settings
        finally:
            settings.DISABLE_JIT, settings.OPT = saved
            if collects:
                gc.enable()


def helper(**options: Any) -> Callable[[Callable], Any]:
    """Compile a function that kernels call, once for each set of argument types.

    By default numba adds two functions, by which Python and C can call it: a third of the time in which a kernel
    compiles. It also compiles anew for each constant argument; here a constant is passed as any other number. And it
    forces the helper into its callers if the first of them is forced so.
    """
    options = {"forceinline": False, **options}

    def made(function: Callable) -> Any:
        compiler: Any = numba.njit(  # pyright: ignore[reportCallIssue]
            no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=HelperCompiler, **options
        )
        with compiling():
            compiled = compiler(function)
        resolve = compiled.get_call_template
        compiled.get_call_template = lambda args, kws: resolve(
            tuple(map(_taken, args)), {name: _taken(kind) for name, kind in dict(kws).items()}
        )
        return compiled

    return made


def _taken(kind: types.Type) -> types.Type:
    """Return the type of an argument that a helper gets for one of a type."""
    return flattened(types.unliteral(kind))
