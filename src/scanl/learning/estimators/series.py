"""Series as scikit-learn gives them: their form and their weights, checked."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.errors import DataError


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
