"""The registered ops, for the command line, the docs and the tests. Importing `scanl.ops` registers all of them."""

from typing import Any

from scanl.errors import nearest
from scanl.ops._frame.compiled import OPERATORS
from scanl.ops._frame.declaration import HALF_DTYPES as HALF_DTYPES
from scanl.ops._frame.declaration import Operand as Operand
from scanl.ops._frame.declaration import OpSample as OpSample
from scanl.ops._frame.dispatch import ORDER as ORDER
from scanl.ops._frame.dispatch import Backend as Backend
from scanl.ops._frame.higher import HIGHER
from scanl.ops._frame.higher import HigherOrder as HigherOrder
from scanl.ops._frame.op import REGISTRY
from scanl.ops._frame.op import Op as Op
from scanl.ops.cell import Cell as Cell


def names() -> list[str]:
    """Return the names of all ops, sorted."""
    return sorted([*REGISTRY, *HIGHER])


def get(name: str) -> Op | HigherOrder:
    """Return the op with this name. Raises ConfigError, with the nearest known name, if there is none.

    >>> get("linear_scan")
    <op linear_scan: triton, cpu, parallel, reference>
    """
    if name not in names():
        raise nearest("op", name, names())
    return REGISTRY[name] if name in REGISTRY else HIGHER[name]


def of_operator(operator: Any) -> Op | None:
    """Return the op whose kernels are this operator of torch, such as `torch.ops.scanl.gru_cpu.default`, or None."""
    return OPERATORS.get(operator.name().removeprefix("scanl::").removesuffix(".default"))


def every() -> list[Op | HigherOrder]:
    """Return all ops, sorted by name."""
    return [get(name) for name in names()]


def declared() -> list[Op]:
    """Return the ops with declared operands, which the tests cover: all except cells and ops that take functions."""
    return [REGISTRY[name] for name in sorted(REGISTRY) if not isinstance(REGISTRY[name], Cell)]


def cells() -> list[Cell]:
    """Return the cells. The layers' cells are registered when the layers are imported: `scanl.layers.names()`."""
    return [op for _, op in sorted(REGISTRY.items()) if isinstance(op, Cell)]


def instances() -> list[Op]:
    """Return the instances: ops that take functions, with the functions given. The tests cover these too."""
    return [op for name in sorted(HIGHER) for op in HIGHER[name].instances.values()]
