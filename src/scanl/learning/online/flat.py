"""Parameters and their gradients as parts of one tensor, so that an optimizer makes one step and not one for each."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scanl.learning.optimizers import Lion

ELEMENTWISE = (torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, Lion)


class Flat:
    """An optimizer whose groups have one parameter each: all parameters of the group, one after the other.

    used: the parameters that have gradients. The optimizer leaves the others as they are.   gradients: where the
    gradient of each of them is written.   `undo` gives the optimizer its parameters back, with their state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, used: Sequence[nn.Parameter]) -> None:
        """Change the groups of an optimizer that `can_be_flat`; another one gets tensors for the gradients alone."""
        self.optimizer, self.gradients = optimizer, dict[nn.Parameter, Tensor]()
        self.groups: list[tuple[dict[str, Any], list[nn.Parameter], list[nn.Parameter]]] = []
        self.used = learning = set(used)
        for group in optimizer.param_groups if can_be_flat(optimizer) else []:
            every = group["params"]
            members = [parameter for parameter in every if parameter in learning]
            if not members:
                continue
            together = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in members]))
            together.grad = torch.zeros_like(together)
            group["params"] = [together]
            self.groups.append((group, every, members))
            for parameter, values, gradient in zip(
                members, *_split(members, together.data, together.grad), strict=True
            ):
                parameter.data, self.gradients[parameter] = values, gradient
        for parameter in learning - self.gradients.keys():
            parameter.grad = self.gradients[parameter] = torch.zeros_like(parameter)

    def undo(self) -> None:
        """Give the optimizer the parameters as they were, each with its part of the state."""
        for group, every, members in self.groups:
            (together,) = group["params"]
            group["params"] = every
            for name, value in self.optimizer.state.pop(together, {}).items():
                by_number = isinstance(value, Tensor) and value.shape == together.shape
                values = _split(members, value)[0] if by_number else [value] * len(members)
                for parameter, moment in zip(members, values, strict=True):
                    self.optimizer.state[parameter][name] = moment.clone() if isinstance(moment, Tensor) else moment
        self.groups = []


def can_be_flat(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer treats every number by itself, made no step yet, and has one dtype in each group."""
    kinds = [{(p.dtype, p.device) for p in group["params"]} for group in optimizer.param_groups]
    return isinstance(optimizer, ELEMENTWISE) and not optimizer.state and all(len(kind) <= 1 for kind in kinds)


def _split(members: Sequence[nn.Parameter], *together: Tensor) -> list[list[Tensor]]:
    """Return the part of each parameter in tensors (n,)."""
    sizes = [parameter.numel() for parameter in members]
    return [
        [values.view(parameter.shape) for values, parameter in zip(one.split(sizes), members, strict=True)]
        for one in together
    ]
