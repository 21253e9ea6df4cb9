"""Muon: the momentum of a matrix, made orthogonal."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from scanl.layers import param_groups
from scanl.learning.optimizers.adamw import BETAS
from scanl.learning.optimizers.base import optimizer
from scanl.models import Stack


@optimizer("muon")
class Muon(torch.optim.Optimizer):
    """Muon for the matrices of the linear maps inside the stack, AdamW for all other parameters.

    Muon takes the matrices without a learning rate of their own. Their step has the length that AdamW's usually has, so
    the same rate serves both: 0.2 sqrt(max(rows, columns)) times the orthogonal matrix.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; the length of the step: Liu
    et al., "Muon is Scalable for LLM Training", arXiv:2502.16982.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float) -> None:
        inside = {id(leaf) for stack in model.modules() if isinstance(stack, Stack) for leaf in stack.parameters()}
        matrices: list[Tensor] = []
        others: list[dict[str, Any]] = []
        for group in param_groups(model):
            plain = group.keys() == {"params"}  # linear maps without a rate of their own
            leaves = [leaf for leaf in group["params"] if plain and leaf.ndim == 2 and id(leaf) in inside]
            matrices += leaves
            remaining = [leaf for leaf in group["params"] if not any(leaf is one for one in leaves)]
            others += [{**group, "params": remaining}] if remaining else []
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts.append(torch.optim.Muon(matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw"))
        if others:
            self.parts.append(torch.optim.AdamW(others, lr, BETAS, weight_decay=weight_decay, fused=True))
        self.sizes = [len(optimizer.param_groups) for optimizer in self.parts]
        super().__init__([group for optimizer in self.parts for group in optimizer.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float | Tensor] | None = None) -> float | Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]: torch overloads it
        """Change every parameter that has a gradient. closure: called before, returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = iter(self.param_groups)
        for inner, size in zip(self.parts, self.sizes, strict=True):
            inner.param_groups, inner.state = [next(groups) for _ in range(size)], self.state
            inner.step()
        return loss
