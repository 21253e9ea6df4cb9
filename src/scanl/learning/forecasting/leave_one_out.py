r"""Ridge regression whose penalty has the smallest error of rows that are left out one by one.

.. math:: C = \arg\min_C \sum_i w_i \|y_i - C s_i - d\|^2 + \lambda \|C\|^2, \quad
   y_i - \hat y_{-i} = \frac{y_i - \hat y_i}{1 - h_i}

Features s are centered and have deviation 1. h is the diagonal of the matrix that maps y to ŷ. So one
eigendecomposition gives the errors of all rows for all penalties (Golub, Heath and Wahba 1979).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PENALTIES = tuple(10.0 ** (k / 2) for k in range(-6, 11))


class Fit(NamedTuple):
    """A regression: weight (O, E) and bias (O,), and the predictions (n, O) of rows that were left out."""

    weight: Tensor
    bias: Tensor
    penalty: float
    predictions: Tensor


def fit_ridge(
    features: Tensor,
    targets: Tensor,
    weights: Tensor,
    penalties: Sequence[float] = PENALTIES,
    counted: Tensor | None = None,
) -> Fit:
    """Fit targets (n, O) by features (n, E), with weights (n,) of the rows, and choose the penalty λ.

    counted: (n,) bool, the rows whose errors count in this choice; None: all. If none counts, the first penalty is
    taken. Computed in float64, in time n E min(n, E).

    >>> x = torch.tensor([[0.0], [1.0], [4.0]])
    >>> fit = fit_ridge(x, 2 * x + 3, torch.ones(3), [0.0])
    >>> [round(number.item(), 9) for number in (fit.weight, fit.bias, fit.predictions[1])]
    [2.0, 3.0, 5.0]
    """
    x, y, w = features.double(), targets.double(), (weights.double() / weights.double().mean())[:, None]
    center, middle = (w * x).sum(0) / w.sum(), (w * y).sum(0) / w.sum()
    x = x - center
    spread = ((w * x * x).sum(0) / w.sum()).sqrt()
    spread = torch.where(spread > 1e-9, spread, torch.inf)  # a constant feature says nothing
    x, y = x.div_(spread).mul_(w.sqrt()), (y - middle) * w.sqrt()
    if len(x) <= x.shape[1]:
        values, u = torch.linalg.eigh(x @ x.T)
    else:
        values, v = torch.linalg.eigh(x.T @ x)
        u = (x @ v) / values.clamp(min=torch.finfo(x.dtype).tiny).sqrt()
    positive = values > max(x.shape) * torch.finfo(x.dtype).eps * values[-1].clamp(min=0)  # smaller ones are rounding
    values, u = values[positive], u[:, positive]
    along, best = u.T @ y, None
    for penalty in penalties:
        shrunk = values / (values + penalty)
        leverage = (u.square() @ shrunk)[:, None] + w / w.sum()
        errors = (y - u @ (shrunk[:, None] * along)) / (1 - leverage).clamp(min=1e-9)
        loss = (errors if counted is None else errors[counted]).square().sum()
        if best is None or loss < best[0]:
            best = loss, penalty, errors
    assert best is not None
    _, penalty, errors = best
    weight = (x.T @ (u @ (along / (values + penalty)[:, None]))).T / spread
    return Fit(weight, middle - weight @ center, penalty, targets.double() - errors / w.sqrt())
