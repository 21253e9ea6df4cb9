"""Series as scikit-learn gives them: their weights and scales, and what models make of them."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from scanl.data.series.rows import scale_of
from scanl.errors import DataError
from scanl.models import RandomFilters
from scanl.models.stack import Backbone

ROWS, STEPS = 256, 2**16  # most series, and most steps of all series, that are read at once in a prediction


class Examples(NamedTuple):
    """Series x (n, T, C), their targets (n,) or (n, O), and their weights (n,)."""

    x: Tensor
    targets: Tensor
    weights: NDArray[np.float64]

    def distinct(self) -> "Examples":
        """Return the different series with their targets, and the sums of their weights, in an order of their own.

        So a weight of 2 equals the series twice, and no copy of a series is there when it is left out.
        """
        parts = [part.numpy().reshape(len(self.x), -1) for part in (self.x, self.targets)]
        rows = np.ascontiguousarray(np.concatenate(parts, 1, dtype=np.float64))
        _, first, owner = np.unique(rows.view(f"V{rows.shape[1] * 8}")[:, 0], return_index=True, return_inverse=True)
        weights = np.bincount(owner, self.weights).astype(np.float64)
        return Examples(self.x[torch.from_numpy(first)], self.targets[torch.from_numpy(first)], weights)


def refuse_unequal(who: str, X: Any) -> None:
    """Raise DataError for a list of series that do not have one shape."""
    if not isinstance(X, list | tuple):
        return
    try:
        shapes = {np.shape(series) for series in X}
    except ValueError:
        raise DataError(f"{who}: a series of X has steps of different channels, expected (T,) or (T, C)") from None
    if len(shapes) > 1:
        steps = sorted(shape[0] if shape else 1 for shape in shapes)
        raise DataError(
            f"{who}: X has series of {steps[0]} to {steps[-1]} steps, expected one shape, not {len(shapes)}; let the "
            "shorter ones begin with NaN"
        )


def weights_of(who: str, sample_weight: Any, n: int) -> NDArray[np.float64]:
    """Return the weight of each series, (n,), of which a positive one exists."""
    weights = np.asarray(1.0 if sample_weight is None else sample_weight, np.float64)
    if weights.ndim == 0:
        weights = np.full(n, weights)
    if weights.shape != (n,):
        raise DataError(f"{who}: sample_weight has shape {weights.shape}, expected {(n,)} because of X")
    if not np.isfinite(weights).all() or (weights < 0).any():
        smallest, largest = weights.min(), weights.max()
        raise DataError(
            f"{who}: sample_weight is from {smallest:g} to {largest:g}, expected finite numbers of at least 0"
        )
    if not weights.any():
        raise DataError(f"{who}: sample_weight is zero for every series, expected one weight above zero")
    return weights


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
