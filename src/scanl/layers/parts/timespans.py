"""Check of `timespans`, the durations of steps, for layers that discretise a system in continuous time."""

import torch
from torch import Tensor

from scanl.errors import ShapeError


def check_timespans(who: str, timespans: Tensor | None, x: Tensor) -> None:
    """Raise ShapeError unless timespans has a real number for each step of x: (B, T), or (1, T) when packed."""
    if timespans is None:
        return
    shape = tuple(x.shape[:2])
    if not isinstance(timespans, Tensor):
        raise ShapeError(f"{who}: timespans is a {type(timespans).__name__}, expected a tensor {shape} because of x")
    if not timespans.is_floating_point() or timespans.shape != shape:
        kind = f"{timespans.dtype} {tuple(timespans.shape)}"
        raise ShapeError(f"{who}: timespans is {kind}, expected a floating dtype and {shape} because of x")
    if timespans.device != x.device:
        raise ShapeError(f"{who}: timespans is on {timespans.device}, expected {x.device} because of x")


def durations(timespans: Tensor | None, x: Tensor) -> Tensor:
    """Return the duration of each step of x, (B, T, 1) in float32 or wider; 1 without timespans."""
    spans = x.new_ones(x.shape[:2]) if timespans is None else timespans
    return spans.to(torch.promote_types(x.dtype, torch.float32))[..., None]
