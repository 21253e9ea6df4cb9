"""Export functions whose loops or branches depend on the sequence's length, each as one operator of torch.

A trace of the function is valid for one length only. An operator, like a compiled kernel, is called when the
exported program runs, so it takes any length. In an exported program it has no gradient; asking for one raises.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def opaque(
    schema: str, shapes: Callable[..., Sequence[Tensor]]
) -> Callable[[Callable[..., Sequence[Tensor]]], Callable[..., Any]]:
    """Register the decorated function as operator `scanl::NAME`. Only `torch.export` calls the operator instead of it.

    schema: "NAME(Tensor x, ...) -> (Tensor, Tensor)".   shapes: a function of the same arguments that returns tensors
    of the results' shapes.
    """
    name, arguments = schema.split("(", 1)

    def wrap(function: Callable[..., Sequence[Tensor]]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            results = [result.clone() for result in function(*args)]  # an operator's results must not alias its inputs
            return results if schema.endswith("[]") else tuple(results)

        operator = torch.library.custom_op(f"scanl::{name}", run, mutates_args=(), schema=f"({arguments}")
        operator.register_fake(shapes)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return operator(*args) if torch.compiler.is_exporting() else function(*args)

        return call

    return wrap
