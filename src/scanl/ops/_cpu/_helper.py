"""Functions that only kernels call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
from numba import config, types  # pyright: ignore[reportPrivateImportUsage]
from numba.core.compiler_lock import global_compiler_lock


@contextmanager
def compiling() -> Iterator[Any]:
    """Let numba compile, and yield its settings. They are as before afterwards.

    NUMBA_DISABLE_JIT does not count here: without compilation there are no addresses, and kernels work on addresses.
    """
    settings: Any = config  # numba gives it its attributes at run time
    with global_compiler_lock:
        saved = settings.DISABLE_JIT, settings.OPT
        settings.DISABLE_JIT = 0
        try:
            yield settings
        finally:
            settings.DISABLE_JIT, settings.OPT = saved


def helper(**options: Any) -> Callable[[Callable], Any]:
    """Compile a function that kernels call, once for each set of argument types.

    By default numba adds two functions, by which Python and C can call it: a third of the time in which a kernel
    compiles. It also compiles anew for each constant argument; here a constant is passed as any other number.
    """

    def made(function: Callable) -> Any:
        compiler: Any = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)  # pyright: ignore[reportCallIssue]
        with compiling():
            compiled = compiler(function)
        resolve = compiled.get_call_template
        compiled.get_call_template = lambda args, kws: resolve(
            tuple(map(types.unliteral, args)), {name: types.unliteral(kind) for name, kind in dict(kws).items()}
        )
        return compiled

    return made
