"""Functions that only kernels call."""

import functools
from collections.abc import Callable
from typing import Any

import numba

# By default numba adds two functions, by which Python and C can call it: a third of the time in which a kernel compiles
helper: Callable[..., Any] = functools.partial(numba.njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # pyright: ignore[reportCallIssue]
