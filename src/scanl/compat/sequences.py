"""Sequences that lie one after the other in the rows of a batch, as `seq_idx` numbers them."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.errors import ShapeError


class Sequences(NamedTuple):
    """The sequences of a batch of rows, as packed sequences of one row.

    cu_seqlens: their offsets in the rows, joined.   first, last: the number of the first and last sequence of each row.
    """

    cu_seqlens: Tensor
    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, who: str, seq_idx: Tensor, x: Tensor) -> "Sequences":
        """Find where seq_idx (B, T) changes. who: the function that was called.   x: a tensor (B, T, ...).

        Reading seq_idx synchronizes a GPU. Raises ShapeError.
        """
        if seq_idx.shape != x.shape[:2]:
            raise ShapeError(
                f"{who}: seq_idx has shape {tuple(seq_idx.shape)}, expected (B, T) with B={x.shape[0]}, T={x.shape[1]}"
            )
        begins = torch.ones_like(seq_idx, dtype=torch.bool)
        begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
        number = begins.flatten().cumsum(0).view_as(seq_idx) - 1
        starts = begins.flatten().nonzero()[:, 0]
        return cls(F.pad(starts, (0, 1), value=seq_idx.numel()), number[:, 0], number[:, -1])


def joined(x: Tensor) -> Tensor:
    """Return the rows of x (B, T, ...) one after the other, (1, B T, ...)."""
    return x.flatten(0, 1).unsqueeze(0)
