"""Derivatives of states as vectors, many at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor


def products(outputs: Tensor, inputs: Sequence[Tensor], cotangents: Tensor, *, batched: bool) -> list[Tensor]:
    """Return vector-Jacobian products, (R, *input.shape) for each input; the graph stays.

    cotangents: (R, *outputs.shape).   batched: run one backward pass on all cotangents, which needs a graph of plain
    torch operations; else one pass for each.
    """
    if batched:
        derivatives = torch.autograd.grad(
            outputs, inputs, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
        return [
            cotangents.new_zeros(len(cotangents), *like.shape) if one is None else one
            for one, like in zip(derivatives, inputs, strict=True)
        ]
    passes = [
        torch.autograd.grad(outputs, inputs, cotangent, retain_graph=True, allow_unused=True, materialize_grads=True)
        for cotangent in cotangents
    ]
    return [torch.stack(of_input) for of_input in zip(*passes, strict=True)]
