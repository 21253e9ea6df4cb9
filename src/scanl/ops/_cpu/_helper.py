"""Functions that only kernels call."""

import functools

from numba import njit

# By default numba adds two functions, by which Python and C can call it: a third of the time in which a kernel compiles
helper = functools.partial(njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)
