"""The registry of optimizers: how the weights change, given their gradients.

A new optimizer is one new file. It defines a subclass of `torch.optim.Optimizer` that takes the model, the learning
rate and the weight decay, registers it by name, and is imported in the `__init__` of this folder.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import nn


class MakesOptimizer(Protocol):
    """A class of optimizers. The groups of `scanl.layers.param_groups` are respected: their rates and decays."""

    def __call__(self, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer: ...


OPTIMIZERS: dict[str, MakesOptimizer] = {}
M = TypeVar("M", bound=MakesOptimizer)


def optimizer(name: str) -> Callable[[M], M]:
    """Decorator: register a class of optimizers under `name`."""

    def add(cls: M) -> M:
        OPTIMIZERS[name] = cls
        return cls

    return add
