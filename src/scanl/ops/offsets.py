"""The offsets of packed sequences, `cu_seqlens`: what they must be, for every op, kernel and layer."""

import itertools

import torch
from torch import Tensor

from scanl.errors import ShapeError


def check_offsets(who: str, cu_seqlens: Tensor | None, batch: int, steps: int, *, operand: str = "x") -> None:
    """Refuse what are not offsets of sequences packed in one row of `steps` steps; None is no packing.

    who: the op or layer that is called.   operand: what has that batch and those steps.
    The numbers are read once per tensor, because reading them synchronises a GPU; not at all while a graph is
    compiled. Raises ShapeError.
    """
    if cu_seqlens is None:
        return
    check_kind(who, cu_seqlens)
    if batch != 1:
        raise ShapeError(f"{who}: {operand} has a batch of {batch}, expected 1 because of cu_seqlens")
    if not torch.compiler.is_compiling():
        check_numbers(who, cu_seqlens, steps)


def check_kind(who: str, cu_seqlens: Tensor | None) -> None:
    """Refuse what is not a vector of integers; its numbers are not read."""
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor):
        found = f"a {type(cu_seqlens).__name__}"
    elif cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        found = f"{str(cu_seqlens.dtype).removeprefix('torch.')} of shape {tuple(cu_seqlens.shape)}"
    else:
        return
    raise ShapeError(f"{who}: cu_seqlens is {found}, expected a tensor of int32 or int64 of shape (N+1,)")


def check_numbers(who: str, cu_seqlens: Tensor, steps: int) -> None:
    """As `offsets`, but the numbers of one tensor are read once: a second call with it costs nothing."""
    if cu_seqlens.is_inference():  # such a tensor does not count how often it was written to
        offsets(cu_seqlens, steps, who)
        return
    now = (cu_seqlens._version, steps)
    if getattr(cu_seqlens, "_scanl_checked", None) != now:
        offsets(cu_seqlens, steps, who)
        cu_seqlens._scanl_checked = now  # pyright: ignore[reportAttributeAccessIssue]


def offsets(cu_seqlens: Tensor, steps: int, who: str) -> tuple[int, ...]:
    """The offsets as numbers. Raises ShapeError unless they rise from 0 to `steps`; equal neighbours are allowed."""
    bounds = tuple(cu_seqlens.tolist())
    if bounds[0] != 0 or bounds[-1] != steps or any(b < a for a, b in itertools.pairwise(bounds)):
        raise ShapeError(f"{who}: cu_seqlens is {list(bounds)}, expected offsets that rise from 0 to T={steps}")
    return bounds
