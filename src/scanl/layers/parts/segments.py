"""A call that is cut where the segments of its rows end, for layers that act at the ends of segments.

A call may begin in the middle of a segment, each row at another step of it. The state then holds what the layer needs
of the present segment.
"""

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor

from scanl.ops._frame.nonfinite import readable


class SegmentPiece:
    """Steps of one call that lie in one segment of their row. There are `width` slots, some of them without a step.

    begin: place of the first step in its segment.   count: number of steps.   Numbers where all rows have the same,
    which makes copies of slices; else tensors (B,), which cost a gather.   size: S, steps of a segment.
    ends: whether the last step ends the segment; a bool or (B,).
    """

    def __init__(self, begin: int | Tensor, count: int | Tensor, width: int, size: int) -> None:
        self.begin, self.count, self.width, self.size = begin, count, width, size
        self.ends = (begin + count == size) & (count > 0)

    def places(self, like: Tensor) -> Tensor:
        """Return (1 or B, width): the place in its segment of each slot, at most S - 1."""
        slots = torch.arange(self.width, device=like.device)[None]
        if isinstance(self.begin, int):
            return self.begin + slots
        return (self.begin[:, None] + slots).clamp(max=self.size - 1)

    def write(self, cache: Tensor, new: Tensor) -> Tensor:
        """Return the cache (B, S, ...) of the segment with the new steps (B, width, ...) in their places."""
        if isinstance(self.begin, int):
            if new.shape[1] == self.size:
                return new
            assert isinstance(self.count, int)
            return torch.cat([cache[:, : self.begin], new, cache[:, self.begin + self.count :]], 1)
        assert isinstance(self.count, Tensor)
        slots = torch.arange(self.size, device=new.device)
        offset = slots - self.begin[:, None]
        index = torch.where((offset >= 0) & (offset < self.count[:, None]), self.size + offset, slots)
        return gathered(torch.cat([cache, new], 1), index)

    def last(self, past: Tensor, new: Tensor) -> Tensor:
        """Return the last rows after the piece, as many as `past` (B, N, ...) has: of `past`, then `new`."""
        rows, both = past.shape[1], torch.cat([past, new], 1)
        if isinstance(self.count, int):
            return both[:, both.shape[1] - rows :]
        return gathered(both, self.count[:, None] + torch.arange(rows, device=new.device))

    def at_end(self, after: Callable[[], Sequence[Tensor]], otherwise: Sequence[Tensor]) -> list[Tensor]:
        """Return `after()` for rows whose segment ends, and `otherwise` for others."""
        return chosen(self.ends, after, otherwise)

    def at_begin(self, new: Callable[[], Sequence[Tensor]], otherwise: Sequence[Tensor]) -> list[Tensor]:
        """Return `new()` for rows that begin a segment, and `otherwise` for others."""
        return chosen((self.begin == 0) & (self.count > 0), new, otherwise)


def chosen(where: bool | Tensor, new: Callable[[], Sequence[Tensor]], otherwise: Sequence[Tensor]) -> list[Tensor]:
    """Return `new()` in rows where `where`, (B,), holds. For a bool, `new` is called only if it is True."""
    if isinstance(where, bool):
        return list(new() if where else otherwise)
    pairs = zip(new(), otherwise, strict=True)
    return [torch.where(where.view(-1, *(1,) * (a.ndim - 1)), a, b) for a, b in pairs]


def gathered(rows: Tensor, index: Tensor) -> Tensor:
    """Return rows[b, index[b, n]] of rows (B, R, ...) for index (B, N)."""
    return rows.gather(1, index.view(*index.shape, *(1,) * (rows.ndim - 2)).expand(-1, -1, *rows.shape[2:]))


class CallSegments:
    """The pieces of one call.

    steps: T, at least 1.   past: (B,) int64, steps read before, one number for each row; None for 0.   size: S.
    pieces: in the order of time.   longest: the most steps that a row has read before; None where it is not known.
    """

    def __init__(self, steps: int, past: Tensor | None, size: int) -> None:
        self.steps, self.past, self.size = steps, past, size
        self.longest: int | None = None
        begin = self._begin()
        if begin is not None:
            ends = range(size - begin, steps, size)
            bounds = [0, *ends, steps]
            self.lengths = [stop - start for start, stop in pairwise(bounds)]
            begins = [begin, *(0 for _ in ends)]
            self.pieces = [
                SegmentPiece(first, count, count, size) for first, count in zip(begins, self.lengths, strict=True)
            ]
            return
        assert past is not None
        self.lengths = None
        width, filled = min(size, steps), past % size
        # Of each piece and row, (P, B): the first step of its segment in the call, below 0 where that came earlier.
        starts = size * torch.arange(-(-(steps + size - 1) // size), device=past.device)[:, None] - filled
        self.firsts = starts.clamp(min=0)
        self.counts = ((starts + size).clamp(max=steps) - self.firsts).clamp(min=0)
        self.pieces = [
            SegmentPiece(first - start, count, width, size)
            for first, start, count in zip(self.firsts, starts, self.counts, strict=True)
        ]

    @property
    def ends(self) -> range | None:
        """The steps at which segments end; None where rows differ."""
        piece = self.pieces[0]
        return range(piece.size - piece.begin - 1, self.steps, piece.size) if isinstance(piece.begin, int) else None

    def _begin(self) -> int | None:
        """Return the place in its segment at which every row begins; None where rows differ, or it is not known."""
        if self.past is None:
            self.longest = 0
            return 0
        if not readable(self.past) or (self.steps == 1 and self.past.device.type != "cpu"):  # it would synchronize
            return None
        counts = self.past.tolist()
        self.longest = max(counts, default=0)
        begins = {count % self.size for count in counts}
        return None if len(begins) > 1 else begins.pop() if begins else 0

    def cut(self, x: Tensor) -> Sequence[Tensor]:
        """Cut x (B, T, ...) into the slots of the pieces, (B, width, ...) each; zeros where no step is."""
        if self.lengths is not None:
            return x.split(self.lengths, 1)
        pieces, width = len(self.pieces), self.pieces[0].width
        slots = self.firsts.T[..., None] + torch.arange(width, device=x.device)
        rows = gathered(x, slots.clamp(max=self.steps - 1).flatten(1)).unflatten(1, (pieces, width))
        present = torch.arange(width, device=x.device) < self.counts.T[..., None]
        rows = torch.where(present.view(*present.shape, *(1,) * (x.ndim - 2)), rows, 0)
        return rows.unbind(1)  # at once: the gradient of an index is as large as all pieces

    def runs(self) -> list[tuple[slice, SegmentPiece]]:
        """Return the pieces in runs, for what no earlier piece changes: a run has (B · pieces) rows of one piece.

        Where all rows begin at the same place, a run is of whole segments, or of one piece; else all pieces are one.
        """
        if self.lengths is None:
            begin, count = (
                torch.stack([getattr(piece, name) for piece in self.pieces], 1).flatten() for name in ("begin", "count")
            )
            return [(slice(0, len(self.pieces)), SegmentPiece(begin, count, self.pieces[0].width, self.size))]
        runs: list[slice] = []
        for whole, pairs in groupby(enumerate(self.lengths), lambda pair: pair[1] == self.size):
            indices = [index for index, _ in pairs]
            runs += [slice(indices[0], indices[-1] + 1)] if whole else [slice(index, index + 1) for index in indices]
        return [(run, self.pieces[run.start]) for run in runs]

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Invert `cut`."""
        if self.lengths is not None:
            return torch.cat(list(pieces), 1)
        assert self.past is not None
        time = torch.arange(self.steps, device=self.past.device)
        filled = (self.past % self.size)[:, None]
        piece = (filled + time) // self.size
        slot = time - (piece * self.size - filled).clamp(min=0)
        return gathered(torch.cat(list(pieces), 1), piece * self.pieces[0].width + slot)


def behind_horizon(tensors: Sequence[Tensor], segments: Tensor, horizon: int | None) -> list[Tensor]:
    """Return the tensors, detached where the number of segments that their rows have read is a multiple of `horizon`.

    segments: (B,).   horizon: a gradient stops after this number of segments; None for no stop.
    """
    if horizon is None:
        return list(tensors)
    if horizon == 1:
        return [tensor.detach() for tensor in tensors]
    return chosen(segments % horizon == 0, lambda: [tensor.detach() for tensor in tensors], tensors)
