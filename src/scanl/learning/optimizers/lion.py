r"""Lion: the sign of a momentum.

.. math::
    \theta_t &= (1 - \eta \lambda) \theta_{t-1} - \eta \, \mathrm{sign}(\beta_1 m_{t-1} + (1 - \beta_1) g_t) \\
    m_t &= \beta_2 m_{t-1} + (1 - \beta_2) g_t

Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675, algorithm 2.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from scanl.layers import param_groups
from scanl.learning.optimizers.base import optimizer


@optimizer("lion")
class Lion(torch.optim.Optimizer):
    """Lion with betas (0.9, 0.99). m_0 is 0.

    Every weight moves by the whole learning rate. The source takes a rate 3 to 10 times smaller than AdamW's, and a
    weight decay as many times larger.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float) -> None:
        super().__init__(param_groups(model), {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Callable[[], float | Tensor] | None = None) -> float | Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]: torch overloads it
        """Change every parameter that has a gradient. closure: called before, returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            keep, smooth = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"]
                direction = torch.lerp(parameter.grad, momentum, keep)
                # The sign of each part of a complex number, as if it were two real ones.
                sign = torch.view_as_real(direction).sign() if direction.is_complex() else direction.sign()
                change = torch.view_as_complex(sign) if direction.is_complex() else sign
                # Kernels of a recorded step write to memory by a copy.
                decayed = parameter * (1 - group["lr"] * group["weight_decay"])
                parameter.copy_(decayed.add(change, alpha=-group["lr"]))
                momentum.copy_(momentum.lerp(parameter.grad, 1 - smooth))
        return loss
