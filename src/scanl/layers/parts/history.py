"""A long convolution that continues from the inputs that it still needs."""

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.ops import long_convolution
from scanl.ops._frame.opaque import opaque


def _shapes(v: Tensor, history: Tensor | None, kernel: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), v.new_empty(v.shape[0], kernel.shape[1] - 1, v.shape[2])


@opaque("with_history(Tensor v, Tensor? history, Tensor kernel) -> (Tensor, Tensor)", _shapes)
def with_history(v: Tensor, history: Tensor | None, kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve v (B, T, D) with kernel (D, L), after the L-1 inputs of the history. Return y and the history after v.

    The state of `long_convolution` would make steps cheaper. It is not used, because the same past can have several
    such states.
    """
    steps, lags = v.shape[1], kernel.shape[1] - 1
    y, _ = long_convolution(v, kernel[:, : max(steps, 1)])
    if history is None:
        return y, F.pad(v, (0, 0, max(0, lags - steps), 0))[:, max(0, steps - lags) :]
    if steps == 1:
        y = y + (history * kernel.T[1:].flip(0).contiguous()).sum(1, keepdim=True)
    elif steps and lags:
        reached = min(steps, lags)
        echo, _ = long_convolution(F.pad(history, (0, 0, 0, reached)), kernel)
        y = y + F.pad(echo[:, lags:], (0, 0, 0, steps - reached))
    return y, torch.cat([history[:, steps:], v[:, max(0, steps - lags) :]], 1)
