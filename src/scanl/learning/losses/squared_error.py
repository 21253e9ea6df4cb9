r"""Squared error of numbers.

.. math:: \ell = (z - y)^2
"""

from torch import Tensor
from torch.nn import functional as F

from scanl.learning.losses.base import loss


@loss("squared_error")
def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses (n,) of numbers (n,) for the right ones (n,)."""
    return F.mse_loss(outputs, targets, reduction="none")
