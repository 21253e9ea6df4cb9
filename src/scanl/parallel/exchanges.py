"""Exchanges by which ranks find the state that enters their stretch, and the gradient of the one that leaves it."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from scanl.ops._frame.summary import Effect
from scanl.parallel.ranks import Ranks


def rounds(size: int) -> list[int]:
    """Return the distances over which pairs (A, b) are exchanged, after the first exchange with the neighbour."""
    distances, reach = [], 1
    while reach < size - 1:
        distances.append(reach)
        reach *= 2
    return distances


def state_before(effect: Effect, ranks: Ranks, carry: Tensor, last: Tensor) -> Tensor | None:
    """Return the state that the ranks before this one leave; None for rank 0."""
    rank, size, distances = ranks.rank, ranks.size, rounds(ranks.size)
    b = ranks.exchange(last, rank + 1, rank - 1, last)
    a = ranks.exchange(carry, rank + 1, rank - 1, carry) if distances else None
    for distance in distances:  # among the ranks from 1 on
        to, source = (rank + distance, rank - distance) if rank > 0 else (size, -1)
        source = source if source > 0 else -1
        more_b, more_a = ranks.exchange(b, to, source, last), ranks.exchange(a, to, source, carry)
        if more_b is not None and more_a is not None:
            assert a is not None
            assert b is not None
            a, b = effect.follow(more_a, a), effect.after(a, b, more_b)
    return b


def gradient_after(effect: Effect, ranks: Ranks, carry: Tensor, d_entering: Tensor) -> Tensor | None:
    """Return the gradient of the state that this rank leaves, from the ranks after it; None for the last rank."""
    rank, size = ranks.rank, ranks.size
    a, d = carry, d_entering
    for distance in rounds(size):
        to, source = (rank - distance, rank + distance) if rank > 0 else (-1, size)
        to = to if to > 0 else -1
        more_d, more_a = ranks.exchange(d, to, source, d), ranks.exchange(a, to, source, carry)
        if more_d is not None and more_a is not None:
            a, d = effect.follow(a, more_a), d + _pulled(effect, a, more_d)
    return ranks.exchange(d, rank - 1, rank + 1, d)


def _pulled(effect: Effect, carry: Tensor, gradient: Tensor) -> Tensor:
    """Return A^T times the gradient of a state."""
    with torch.enable_grad():
        state = torch.zeros_like(gradient).requires_grad_()
        (pulled,) = torch.autograd.grad(effect.after(carry, torch.zeros_like(gradient), state), state, gradient)
    return pulled


def tied(y: Tensor, others: Any) -> Tensor:
    """Return y, whose backward pass reaches other tensors even where y does not depend on them: ranks wait for that."""
    learned = [leaf for leaf in pytree.tree_leaves(others) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return TiedOutputs.apply(y, *learned) if learned else y


class TiedOutputs(torch.autograd.Function):
    """y; the other tensors have no gradient of it, and their backward passes run all the same."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *others: Tensor) -> Tensor:
        ctx.count = len(others)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return d_y, *[None] * ctx.count
