"""Export functions whose loops or branches depend on the sequence's length, each as one operator of torch.

A trace of such a function holds for one length only. An operator is called when the exported program runs, as compiled
kernels are, and so takes any length. It has no gradient there; asking for one raises.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def opaque(
    schema: str, shapes: Callable[..., Sequence[Tensor]]
) -> Callable[[Callable[..., Sequence[Tensor]]], Callable[..., Any]]:
    """Make `scanl::NAME` of the decorated function, called in its place by `torch.export`, and by that alone.

    schema: "NAME(Tensor x, ...) -> (Tensor, Tensor)".   shapes: the same call, giving tensors of the results' shapes.
    """
    name, arguments = schema.split("(", 1)

    def wrap(function: Callable[..., Sequence[Tensor]]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            results = [
                each.clone() for each in function(*args)
            ]  # an operator's results share no memory with its inputs
            return results if schema.endswith("[]") else tuple(results)

        operator = torch.library.custom_op(f"scanl::{name}", run, mutates_args=(), schema=f"({arguments}")
        operator.register_fake(shapes)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return operator(*args) if torch.compiler.is_exporting() else function(*args)

        return call

    return wrap
