"""The registered ops, for the command line, the docs and the tests. Importing `scanl.ops` registers all of them."""

from scanl.errors import nearest
from scanl.ops._frame.declaration import HALF as HALF
from scanl.ops._frame.declaration import Operand as Operand
from scanl.ops._frame.declaration import Sample as Sample
from scanl.ops._frame.dispatch import ORDER as ORDER
from scanl.ops._frame.dispatch import Backend as Backend
from scanl.ops._frame.op import REGISTRY
from scanl.ops._frame.op import Op as Op


def names() -> list[str]:
    """The names of all ops, sorted."""
    return sorted(REGISTRY)


def get(name: str) -> Op:
    """The op of a name; ConfigError with the nearest known one for any other.

    >>> get("linear_scan")
    <op linear_scan: triton, cpu, parallel, reference>
    """
    if name not in REGISTRY:
        raise nearest("op", name, names())
    return REGISTRY[name]


def every() -> list[Op]:
    """All ops, in the order of their names."""
    return [REGISTRY[name] for name in names()]
