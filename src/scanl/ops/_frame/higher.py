"""Ops whose arguments are functions, or tensors in any structure: there are no operands to declare.

With its functions given, such an op is an op like any other. `@NAME.instance` declares one: its reference is a plain
loop, and its backend calls NAME. The laws run over the instances.
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
    """An op that takes functions. It is called as it was written; what the registry knows of it stands beside it.

    It is plain torch on any device, which the registry calls "parallel".   instances: ops made of it, by name.
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
        """Declare the decorated reference an instance, NAME.reference; `declared` as in `Op`."""

        def add(reference: Callable[..., Any]) -> Op[..., Any]:
            own = {"id": self.id, "equation": self.equation, "source": self.source, "dtypes": self.dtypes}
            made = Op(reference, declaration, **{**own, "neutral": {}, **declared})
            made.name = f"{self.name}.{reference.__name__.strip('_')}"
            self.instances[made.name] = made
            return made

        return add

    def preference(self) -> list[str]:
        """The names of its backends in the order of every op."""
        return dispatch.preference(self.backends)

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """A line for each backend: that it can run tensors such as the first one given, or each reason why not."""
        first = next(value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor))
        return dispatch.explain(self.backends, first.device, first.dtype, {})

    def __repr__(self) -> str:
        return f"<op {self.name}: {', '.join(self.preference())}>"


HIGHER: dict[str, HigherOrder[..., Any]] = {}


def higher_order(**declared: Any) -> Callable[[Callable[P, R]], HigherOrder[P, R]]:
    """Declare the decorated function an op that takes functions, and register it; `declared` as in `HigherOrder`."""

    def register(function: Callable[P, R]) -> HigherOrder[P, R]:
        HIGHER[function.__name__] = made = HigherOrder(function, **declared)
        return made

    return register
