"""Ops that take functions, or tensors in any structure, and so declare no operands.

With particular functions, such an op becomes an ordinary op, an instance. `@NAME.instance` declares one: its reference
is a plain loop, and its backend calls NAME. The tests cover the instances.
"""

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scanl.ops._frame import dispatch
from scanl.ops._frame.dispatch import Backend
from scanl.ops._frame.op import Op

P = ParamSpec("P")
R = TypeVar("R")


class HigherOrder(Generic[P, R]):
    """An op that takes functions, with the metadata of the registry. A call runs the decorated function unchanged.

    It is plain PyTorch for any device; the registry lists it as "parallel".   instances: its instances, by name.
    """

    def __init__(
        self,
        function: Callable[P, R],
        *,
        id: str | None,
        equation: str,
        source: str,
        dtypes: tuple[torch.dtype, ...],
    ):
        functools.update_wrapper(self, function)
        self.name: str = function.__name__
        self.id, self.equation, self.source, self.dtypes = id, equation, source, dtypes
        run: Callable[..., Any] = function
        self.backends = {"parallel": Backend("parallel", run, dtypes=dtypes)}
        self.instances: dict[str, Op[..., Any]] = {}
        self._function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def instance(self, declaration: str, **declared: Any) -> Callable[[Callable[..., Any]], Op[..., Any]]:
        """Declare the decorated reference as an instance; `declared` as in `OpSpec`."""

        def add(reference: Callable[..., Any]) -> Op[..., Any]:
            defaults = {"id": self.id, "equation": self.equation, "source": self.source, "dtypes": self.dtypes}
            new_op = Op(reference, declaration, **{**defaults, "neutral": {}, **declared})
            new_op.name = f"{self.name}.{reference.__name__.strip('_')}"
            self.instances[new_op.name] = new_op
            return new_op

        return add

    def preference(self) -> list[str]:
        """Return the names of its backends."""
        return dispatch.preference(self.backends)

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Return one line per backend: that it can run tensors like the first one given, or why not."""
        first = next(value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor))
        return dispatch.explain(self.backends, first.device, first.dtype, {})

    def __repr__(self) -> str:
        return f"<op {self.name}: {', '.join(self.preference())}>"


HIGHER: dict[str, HigherOrder[..., Any]] = {}


def higher_order(**declared: Any) -> Callable[[Callable[P, R]], HigherOrder[P, R]]:
    """Declare the decorated function as an op that takes functions and register it; `declared` as in `HigherOrder`."""

    def register(function: Callable[P, R]) -> HigherOrder[P, R]:
        HIGHER[function.__name__] = instance = HigherOrder(function, **declared)
        return instance

    return register
