r"""Cross entropy of answers of yes and no, in nats.

.. math:: \ell = -y \log \sigma(z) - (1 - y) \log(1 - \sigma(z))
"""

from torch import Tensor
from torch.nn import functional as F

from scanl.learning.losses.base import loss


@loss("binary_cross_entropy")
def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses (n,) of logits (n,) for answers 1 and 0, (n,)."""
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
