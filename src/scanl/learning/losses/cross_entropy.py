r"""Cross entropy of classes: the negative log-likelihood of the right class, in nats.

.. math:: \ell = -\log \mathrm{softmax}(z)_y
"""

from torch import Tensor
from torch.nn import functional as F

from scanl.learning.losses.base import loss


@loss("cross_entropy")
def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses (n,) of logits (n, V) for classes (n,)."""
    return F.cross_entropy(outputs, targets, reduction="none")
