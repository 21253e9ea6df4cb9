"""Read plain data from published pickles, without running their code.

A pickle is a program: it may name any function and call it. Here no name is ever looked up. The few names that an array
of numbers needs stand for the functions below, which only keep numbers. Every other name is refused.
"""

import io
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.files import Files

READ_ERRORS = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)


class _Type:
    """Stands in for numpy.dtype: the type of numbers."""

    def __init__(self, code: str, *_: Any) -> None:
        if not re.fullmatch(r"[<>|]?[biuf][1248]", str(code)):
            raise ValueError(f"it has an array of {code!r}, expected numbers")
        self.type = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        if order not in ("<", ">", "|", "="):
            raise ValueError(f"it has an array in the byte order {order!r}")
        self.type = self.type.newbyteorder(order)


class _Array:
    """Stands in for numpy.ndarray: its numbers, once they are known."""

    def __init__(self, *_: Any) -> None:
        self.values: NDArray[Any] = np.empty(0)

    def __setstate__(self, state: Any) -> None:
        _version, shape, kind, by_columns, content = state
        self.values = _values(content, kind, shape, "F" if by_columns else "C").values


def _values(content: Any, kind: _Type, shape: Any, order: str) -> _Array:
    array = _Array()
    raw = content.encode("latin-1") if isinstance(content, str) else content  # a string of Python 2
    array.values = np.frombuffer(raw, kind.type).reshape(shape, order="F" if order == "F" else "C")
    return array


def _number(kind: _Type, content: Any) -> Any:
    return _values(content, kind, (), "C").values.item()


def _bytes(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"it has bytes in the encoding {encoding!r}")
    return text.encode("latin-1")


NAMES: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "dtype"): _Type,
    ("numpy", "ndarray"): _Array,
    ("_codecs", "encode"): _bytes,
    **{
        (f"numpy.{core}.{module}", name): stands
        for core in ("core", "_core")
        for module, name, stands in (
            ("multiarray", "_reconstruct", _Array),
            ("multiarray", "scalar", _number),
            ("numeric", "_frombuffer", _values),
        )
    },
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        stands = NAMES.get((module_name, global_name))
        if stands is None:
            raise pickle.UnpicklingError(f"it calls {module_name}.{global_name}, expected plain data alone")
        return stands


def plain(content: bytes, files: Files, path: Path, folder: str = "") -> Any:
    """Return the contents of a pickle: numbers, text, bytes, lists, tuples, dictionaries, and arrays of numbers.

    An array is an object whose `values` are its numbers. Raises DataError for a damaged pickle, and for other content.
    """
    try:
        return _PlainUnpickler(io.BytesIO(content), encoding="latin-1").load()
    except READ_ERRORS as error:
        raise files.damaged(path, f"it is no pickle of plain data: {error}", folder) from error
