"""`cu_seqlens`, the offsets of packed sequences, and its checks, for every op, kernel and layer."""

import itertools

import torch
from torch import Tensor

from scanl.errors import ShapeError


def sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Return the number of sequences in x (B, T, ...): its rows, or those that are packed into its one row."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def check_offsets(who: str, cu_seqlens: Tensor | None, batch: int, steps: int, *, operand: str = "x") -> None:
    """Check that cu_seqlens are offsets of sequences packed into one row of `steps` steps; None means no packing.

    who: the op or layer that was called, for the message.   operand: the name of the tensor with this batch and steps.
    The values are checked once per tensor, because reading them synchronises a GPU. While a graph is compiled they are
    not checked. Raises ShapeError.
    """
    if cu_seqlens is None:
        return
    check_kind(who, cu_seqlens)
    if batch != 1:
        raise ShapeError(f"{who}: {operand} has a batch of {batch}, expected 1 because of cu_seqlens")
    if not torch.compiler.is_compiling():
        check_numbers(who, cu_seqlens, steps)


def check_kind(who: str, cu_seqlens: Tensor | None) -> None:
    """Check that cu_seqlens is a vector of integers, without reading its values."""
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor):
        actual = f"a {type(cu_seqlens).__name__}"
    elif cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        actual = f"{str(cu_seqlens.dtype).removeprefix('torch.')} of shape {tuple(cu_seqlens.shape)}"
    else:
        return
    raise ShapeError(f"{who}: cu_seqlens is {actual}, expected a tensor of int32 or int64 of shape (N+1,)")


def check_numbers(who: str, cu_seqlens: Tensor, steps: int) -> None:
    """Check the values like `offsets`, but only once per tensor: a second call with it costs nothing."""
    if cu_seqlens.is_inference():  # an inference tensor has no version counter
        offsets(cu_seqlens, steps, who)
        return
    now = (cu_seqlens._version, steps)
    if getattr(cu_seqlens, "_scanl_checked", None) != now:
        offsets(cu_seqlens, steps, who)
        cu_seqlens._scanl_checked = now  # pyright: ignore[reportAttributeAccessIssue]


def offsets(cu_seqlens: Tensor, steps: int, who: str) -> tuple[int, ...]:
    """Return the offsets as ints. Raises ShapeError unless they rise from 0 to `steps`; neighbours may be equal."""
    bounds = tuple(cu_seqlens.tolist())
    if bounds[0] != 0 or bounds[-1] != steps or any(b < a for a, b in itertools.pairwise(bounds)):
        raise ShapeError(f"{who}: cu_seqlens is {list(bounds)}, expected offsets that rise from 0 to T={steps}")
    return bounds
