"""Series with their targets, and what models make of them."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from scanl.data.series.rows import scale_of
from scanl.models import RandomFilters
from scanl.models.stack import Backbone

ROWS, STEPS = 256, 2**16  # most series, and most steps of all series, that are read at once in a prediction


class Examples(NamedTuple):
    """Series x (n, T, C), their targets (n,) or (n, O), and their weights (n,)."""

    x: Tensor
    targets: Tensor
    weights: NDArray[np.float64]

    def distinct(self) -> "tuple[Examples, Tensor]":
        """Return the different series with their targets, and the sums of their weights, in an order of their own.

        Behind them is the place (n,) of each series among them.

        So a weight of 2 equals the series twice, and no copy of a series is there when it is left out.
        """
        parts = [part.numpy().reshape(len(self.x), -1) for part in (self.x, self.targets)]
        rows = np.ascontiguousarray(np.concatenate(parts, 1, dtype=np.float64))
        _, first, owner = np.unique(rows.view(f"V{rows.shape[1] * 8}")[:, 0], return_index=True, return_inverse=True)
        weights = np.bincount(owner, self.weights).astype(np.float64)
        places = torch.from_numpy(first)
        return Examples(self.x[places], self.targets[places], weights), torch.from_numpy(owner)

    def scales(self) -> list[list[float]]:
        """Return mean and deviation of each channel."""
        return [list(weighted_scale(channel.numpy(), self.weights)) for channel in self.x.unbind(2)]


def are_equal(weights: NDArray[np.float64]) -> bool:
    """Return whether all weights are the same."""
    return bool((weights == weights[0]).all())


def weighted_scale(values: NDArray[np.float64], weights: NDArray[np.float64]) -> tuple[float, float]:
    """Return mean and deviation of the numbers of series (n, T), each of which has a weight."""
    if are_equal(weights):
        return scale_of(values.reshape(-1))
    return scale_of(values.reshape(-1), np.repeat(weights, values.shape[1]))


def rows_at_once(x: Tensor) -> int:
    """Return how many series of x (n, T, C) are read at once."""
    return max(1, min(ROWS, STEPS // x.shape[1]))


@torch.no_grad()
def features_of(model: RandomFilters, x: Tensor) -> Tensor:
    """Return the features of series x (n, T, C)."""
    return torch.cat([model.features(rows)[0] for rows in x.split(rows_at_once(x))])


@torch.no_grad()
def outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Return the outputs of a model for series x (n, T, C), on the processor.

    At most `ROWS` series and `STEPS` steps are read at once. A longer series is read in pieces, with the state between
    them, unless a layer reads future steps.
    """
    device = next(model.parameters()).device
    stack = getattr(model, "stack", None)
    at_once = x.shape[1] if isinstance(stack, Backbone) and stack.bidirectional else STEPS
    answers = []
    for rows in x.split(rows_at_once(x)):
        output, state = None, None
        for piece in rows.split(at_once, 1):
            output, state = model(piece.to(device), state)
        answers.append(output)
    return torch.cat(answers).cpu()
