"""The elementary functions of our own as LLVM has them, for kernels that numba does not compile."""

# pyright: reportCallIssue=false
# numba's types of numbers are no types for pyright.

import functools
import hashlib
import re
from collections.abc import Callable
from typing import Any

import numba
from numba import float32, float64  # pyright: ignore[reportPrivateImportUsage]

from scanl.ops._cpu._cache import keep, source_digest
from scanl.ops._cpu._helper import compiling, helper
from scanl.ops._cpu._logarithm import expm1, log, log1p
from scanl.ops._cpu._math import exp
from scanl.ops._cpu._sigmoid import log_sigmoid, sigmoid, tanh
from scanl.ops._frame import cache

FUNCTIONS = {"exp": exp, "expm1": expm1, "log": log, "log1p": log1p, "log_sigmoid": log_sigmoid, "sigmoid": sigmoid,
             "tanh": tanh}  # fmt: skip
_KINDS = {"float": float32, "double": float64}
# numba's functions return a status, and write their result where the first argument points to.
_WRAPPER = """
define linkonce_odr {kind} @{name}({kind} %x) alwaysinline nounwind {{
  %result = alloca {kind}
  %error = alloca ptr
  %status = call i32 @{numba}(ptr %result, ptr %error, {kind} %x)
  %y = load {kind}, ptr %result
  ret {kind} %y
}}
"""


@functools.cache
def source(function: str, kind: str, name: str) -> str:
    """Return LLVM's text of a module that defines a function of one number, of "float" or "double", by a name."""
    title = f"{name}-{digest()}.ll"
    try:
        return cache.read(cache.folder() / title).decode()
    except OSError:
        text = _compiled(FUNCTIONS[function], kind, name)
    keep(lambda: cache.folder() / title, text.encode())
    return text


@functools.cache
def digest() -> str:
    """Return a digest of what the functions are made of."""
    modules = exp.__module__, sigmoid.__module__, log.__module__, __name__
    parts = *map(source_digest, modules), numba.__version__
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _compiled(function: Callable[[Any], Any], kind: str, name: str) -> str:
    called = helper(forceinline=True)(lambda x: function(x))
    with compiling():
        called.compile((_KINDS[kind],))
    (made,) = called.overloads.values()
    text = re.sub("^@.* = common .*\n", "", made.library.get_llvm_str(), flags=re.MULTILINE)  # numba's environments
    # Internal names do not clash: numba counts functions in each process, and modules come from several.
    text = re.sub("^define (linkonce_odr )?", "define internal ", text, flags=re.MULTILINE)
    return text + _WRAPPER.format(kind=kind, name=name, numba=f'"{made.fndesc.llvm_func_name}"')
