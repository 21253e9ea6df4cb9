"""Parameters and their gradients as parts of one tensor, so that an optimizer makes one step and not one for each."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from scanl.learning.optimizers import Lion

ELEMENTWISE = (torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, Lion)


def flatten(optimizer: torch.optim.Optimizer, used: Sequence[nn.Parameter]) -> list[Tensor] | None:
    """Let the parameters of each group of an optimizer be parts of one tensor, which is the group's only parameter.

    used: parameters that have gradients; the optimizer leaves the others as they are. Return the tensor of the
    gradients of each parameter in `used`; None, and change nothing, where an optimizer is not known to treat
    every number by itself. Call it before the first step.
    """
    if not isinstance(optimizer, ELEMENTWISE) or optimizer.state:
        return None
    learning, gradients = set(used), {}
    for group in optimizer.param_groups:
        members = [parameter for parameter in group["params"] if parameter in learning]
        if not members:
            continue
        together = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in members]))
        together.grad = torch.zeros_like(together)
        group["params"] = [together]
        start = 0
        for parameter in members:
            end = start + parameter.numel()
            parameter.data = together.data[start:end].view(parameter.shape)
            gradients[parameter] = together.grad[start:end].view(parameter.shape)
            start = end
    return [gradients[parameter] for parameter in used]
