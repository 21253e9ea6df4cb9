"""The last few inputs side by side, for layers whose projections read a window of steps."""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from scanl.layers.initial_state import StateAxes
from scanl.ops import short_convolution

Inputs = Tensor | tuple[()]  # the last W-1 inputs (B, W-1, D), oldest first; () for a window of one step


class WindowState(NamedTuple):
    """State of a recurrence that reads a window. `past`, an attribute of the layer, is W-1."""

    recurrent: Annotated[Tensor, StateAxes("dim")]
    inputs: Annotated[Inputs, StateAxes("past, dim", "the last inputs", when="past")]


def windows(x: Tensor, size: int, state: Inputs | None, *, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Inputs]:
    """Return x_t, x_{t-1}, ..., x_{t-W+1} side by side, (B, T, W D), and the last W-1 inputs.

    size: W.   state: the last W-1 inputs; None for zeros.
    """
    if size == 1:
        return x, ()
    assert not isinstance(state, tuple)
    taken = torch.eye(size, device=x.device, dtype=x.dtype).flip(0)[:, None].expand(size, x.shape[2], size)
    shifted = [short_convolution(x, weight, None, state, cu_seqlens=cu_seqlens) for weight in taken]
    return torch.cat([inputs for inputs, _ in shifted], -1), shifted[0][1]
