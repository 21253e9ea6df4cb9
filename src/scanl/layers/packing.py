"""Sequences of different lengths: packed into one row (`cu_seqlens`), or padded with a mask."""

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.errors import ShapeError
from scanl.layers.state import cat, index
from scanl.ops.offsets import offsets

if TYPE_CHECKING:
    from scanl.layers.base import Layer
    from scanl.layers.state import State


def sequence_index(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return the index (T,) of the sequence that each step of a packed row belongs to."""
    steps = torch.arange(length, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].to(torch.int64).contiguous(), steps, right=True)


def reversed_steps(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return the permutation (T,) of steps that reverses each sequence within a packed row."""
    owner = sequence_index(cu_seqlens, length)
    return cu_seqlens[owner] + cu_seqlens[owner + 1] - 1 - torch.arange(length, device=cu_seqlens.device)


def turned(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Reverse the time of x (B, T, ...), of each packed sequence by itself."""
    return x.flip(1) if cu_seqlens is None else x[:, reversed_steps(cu_seqlens, x.shape[1])]


def pack(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Pack the valid steps of x (B, T, ...). Return (1, total, ...) and the offsets (B+1,)."""
    if mask.dtype != torch.bool or mask.shape != x.shape[:2]:
        raise ShapeError(
            f"padded: mask is {mask.dtype} {tuple(mask.shape)}, expected torch.bool {tuple(x.shape[:2])} because of x"
        )
    return x[mask][None], F.pad(mask.sum(1).cumsum(0), (1, 0))


def unpack(y: Tensor, mask: Tensor) -> Tensor:
    """Invert `pack`: return (B, T, ...) with zeros at padding."""
    padded_y = y.new_zeros(*mask.shape, *y.shape[2:])
    padded_y[mask] = y[0]
    return padded_y


def each_alone(
    run: Callable[..., "tuple[Tensor, State]"], x: Tensor, state: "State", cu_seqlens: Tensor
) -> "tuple[Tensor, State]":
    """Call `run` on each packed sequence separately, for code that depends on the length.

    state: has a row for each sequence.
    """
    bounds = offsets(cu_seqlens, x.shape[1], "each_alone")
    parts = [
        run(x[:, start:end], index(state, slice(n, n + 1))) for n, (start, end) in enumerate(itertools.pairwise(bounds))
    ]
    if not parts:
        return x, state
    return torch.cat([y for y, _ in parts], 1), cat([last for _, last in parts])


def padded(layer: "Layer", x: Tensor, mask: Tensor, state: "State" = None) -> "tuple[Tensor, State]":
    """Run a layer over a batch with padding on the left or right. Each row has the same result as without padding.

    x: (B, T, D).   mask: (B, T) bool, True at valid steps.   Returns y (B, T, D), zero at padding, and the
    state of each row after its last valid step.
    """
    packed, cu_seqlens = pack(x, mask)
    y, state = layer(packed, state, cu_seqlens=cu_seqlens)
    return unpack(y, mask), state
