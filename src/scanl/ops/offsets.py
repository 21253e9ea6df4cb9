"""`cu_seqlens`, the offsets of packed sequences, and `starts`, steps where the state begins anew; with their checks.

Rows that `starts` cuts into pieces are packed sequences: `cut` makes offsets from it. So what reads packed sequences
needs no more for it.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

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
    elif getattr(cu_seqlens, "_scanl_checked", None) != (cu_seqlens._version, steps):
        offsets(cu_seqlens, steps, who)
        _note_checked(cu_seqlens, steps)


def _note_checked(cu_seqlens: Tensor, steps: int) -> None:
    if not (cu_seqlens.is_inference() or torch.compiler.is_compiling()):
        cu_seqlens._scanl_checked = (cu_seqlens._version, steps)  # pyright: ignore[reportAttributeAccessIssue]


def offsets(cu_seqlens: Tensor, steps: int, who: str) -> tuple[int, ...]:
    """Return the offsets as ints. Raises ShapeError unless they rise from 0 to `steps`; neighbours may be equal."""
    bounds = tuple(cu_seqlens.tolist())
    if bounds[0] != 0 or bounds[-1] != steps or any(b < a for a, b in itertools.pairwise(bounds)):
        raise ShapeError(f"{who}: cu_seqlens is {list(bounds)}, expected offsets that rise from 0 to T={steps}")
    return bounds


class CutRows(NamedTuple):
    """Rows (B, T), or sequences packed in a row, that are cut into pieces: how to call what reads packed sequences.

    shape: (B, T).   cu_seqlens: the offsets of the call.   begins: (N,), whether the first piece of each of the N rows
    or sequences begins anew; None where no piece does.   entered, left: (N,), the pieces of each that its state enters,
    and that it leaves; None where nothing is cut, so that the call has the rows and sequences as they are.
    """

    shape: tuple[int, int]
    cu_seqlens: Tensor | None
    begins: Tensor | None = None
    entered: Tensor | None = None
    left: Tensor | None = None

    def packed(self, x: Tensor) -> Tensor:
        """Return x (B, T, ...) as the call reads it."""
        return x if self.entered is None else x.flatten(0, 1)[None]

    def unpacked(self, y: Tensor) -> Tensor:
        """Return an output of the call as (B, T, ...)."""
        return y if self.entered is None else y.squeeze(0).unflatten(0, self.shape)

    def enter(self, state: Tensor, initial: Tensor) -> Tensor:
        """Return a tensor of the state of the call. initial: the same of rows, one for each of the call, before any
        input."""
        assert self.begins is not None
        kind = torch.promote_types(state.dtype, initial.dtype)
        state, initial = state.to(kind), initial.to(kind)
        begins = self.begins.view(-1, *[1] * (state.ndim - 1))
        first = torch.where(begins, initial[: len(state)], state)
        return first if self.entered is None else initial.index_copy(0, self.entered, first)

    def leave(self, last: Tensor) -> Tensor:
        """Return a tensor of the state after each row or sequence.

        last: the same of the state of the call, or of the last pieces of rows alone, which are fewer.
        """
        return last if self.left is None or len(last) == len(self.left) else last[self.left]


class RowEnds(NamedTuple):
    """The first and the last piece of each of the rows that `starts` cut. Only the last states of these last are read:
    what reads packed sequences may return them alone."""

    first: Tensor
    last: Tensor


def row_ends(cu_seqlens: Tensor | None) -> RowEnds | None:
    """Return the ends of rows of which the packed sequences are pieces; None where they are no pieces."""
    return None if torch.compiler.is_compiling() else getattr(cu_seqlens, "_scanl_row_ends", None)


def check_starts(who: str, starts: Tensor | None, x: Tensor) -> None:
    """Check that starts, if it is not None, has a truth for each row and step of x. Raises ShapeError."""
    if starts is None:
        return
    if not isinstance(starts, Tensor) or starts.dtype != torch.bool or starts.shape != x.shape[:2]:
        actual = f"{starts.dtype} {tuple(starts.shape)}" if isinstance(starts, Tensor) else f"a {type(starts).__name__}"
        raise ShapeError(f"{who}: starts is {actual}, expected torch.bool {tuple(x.shape[:2])}, a truth for each step")
    if starts.device != x.device:
        raise ShapeError(f"{who}: starts is on {starts.device}, expected {x.device} of the steps")


def cut(who: str, starts: Tensor, x: Tensor, cu_seqlens: Tensor | None, reverse: bool = False) -> CutRows:
    """Cut rows, or sequences packed in a row, at the steps where `starts` (B, T) is True: a piece begins there.

    who: the op or layer that was called.   x: (B, T, ...), its first argument.   cu_seqlens: checked offsets.
    reverse: the steps are read backwards, so a piece begins at its last step in time. Raises ShapeError.
    """
    check_starts(who, starts, x)
    batch, steps = x.shape[:2]
    single = cu_seqlens is None and steps <= 1
    looks = not torch.compiler.is_compiling() and (starts.device.type == "cpu" or not single)  # a GPU waits for a look
    if looks and not starts.any():
        return CutRows((batch, steps), cu_seqlens)
    if single:  # nothing to cut
        return CutRows((batch, steps), None, starts.any(1))
    rows = cu_seqlens
    if rows is None:
        rows = torch.arange(0, batch * steps + 1, steps, device=x.device)
    # A True at i, of 0 to B T, cuts before step i.
    cuts = F.pad(starts.flatten(), (1, 0) if reverse else (0, 1))
    begins = cuts[rows[1:] if reverse else rows[:-1]] & (rows.diff() > 0)
    cuts = cuts.index_fill(0, rows.long(), False)
    inside = cuts.nonzero()[:, 0]
    if len(inside) == 0:
        return CutRows((batch, steps), cu_seqlens, begins)
    before = cuts.cumsum(0)[rows] + torch.arange(len(rows), device=x.device)
    pieces = torch.cat([rows, inside.to(rows.dtype)]).sort().values
    _note_checked(pieces, batch * steps)
    first, last = before[:-1], before[1:] - 1
    if not (reverse or torch.compiler.is_compiling()):
        pieces._scanl_row_ends = RowEnds(first, last)  # pyright: ignore[reportAttributeAccessIssue]
    return CutRows((batch, steps), pieces, begins, *((last, first) if reverse else (first, last)))
