"""The state as one vector a row, and the derivatives of such vectors, many at a time."""

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from scanl.layers.state import State, leaves, map_leaves


def flatten(state: State) -> Tensor:
    """Return the numbers of a state, (B, e). A complex number is two; integers, such as positions, are left out."""
    parts = [_real(leaf).reshape(len(leaf), -1) for leaf in _floating(state)]
    return torch.cat(parts, 1) if parts else torch.zeros(0, 0)


def unflatten(flat: Tensor, like: State) -> State:
    """Return a state of the form of `like` with the numbers of `flatten`, and the integers of `like`."""
    sizes = iter(flat.split([prod(_real(leaf).shape[1:]) for leaf in _floating(like)], 1))

    def part(leaf: Tensor) -> Tensor:
        if not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        real = _real(leaf)
        values = next(sizes).reshape(-1, *real.shape[1:]).to(real.dtype)
        return torch.view_as_complex(values) if leaf.is_complex() else values

    return map_leaves(part, like)


def complex_parts(state: State) -> Tensor:
    """Return (e, e), True where two numbers of `flatten` are one number or the parts of one complex number."""
    places: list[int] = []
    for leaf in _floating(state):
        width = 2 if leaf.is_complex() else 1
        first = places[-1] + 1 if places else 0
        places += [first + i // width for i in range(prod(_real(leaf).shape[1:]))]
    at = torch.tensor(places)
    return at[:, None] == at


def _floating(state: State) -> Iterator[Tensor]:
    yield from (leaf for _, leaf in leaves(state) if leaf.is_floating_point() or leaf.is_complex())


def _real(leaf: Tensor) -> Tensor:
    return torch.view_as_real(leaf) if leaf.is_complex() else leaf


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
