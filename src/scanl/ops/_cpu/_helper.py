"""Functions that only kernels call."""

from collections.abc import Callable
from typing import Any

import numba
from numba import types  # pyright: ignore[reportPrivateImportUsage]


def helper(**options: Any) -> Callable[[Callable], Any]:
    """Compile a function that kernels call, once for each set of argument types.

    By default numba adds two functions, by which Python and C can call it: a third of the time in which a kernel
    compiles. It also compiles anew for each constant argument; here a constant is passed as any other number.
    """

    def made(function: Callable) -> Any:
        compiler: Any = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)  # pyright: ignore[reportCallIssue]
        compiled = compiler(function)
        resolve = compiled.get_call_template
        compiled.get_call_template = lambda args, kws: resolve(tuple(map(types.unliteral, args)), kws)
        return compiled

    return made
