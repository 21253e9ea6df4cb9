"""S7: S5 whose steps depend on the input."""

import math
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Hint, widen
from scanl.layers.parts.time_step import time_step_bias
from scanl.layers.parts.timespans import durations
from scanl.layers.ssm.s5 import Activation, MIMORecurrence
from scanl.ops import discretize
from scanl.ops.ssm_kernels import DISCRETIZATIONS
from scanl.options import one_of


@registry.register("s7")
class S7(MIMORecurrence):
    """S7: S5 with a step size for each number of the state that depends on the input, so it selects what it keeps.

    Differs: in the paper's text Λ, B, C and D depend on the input too, as in `s7_full`. In the authors' program, and
    here, only Δ depends on it.

    With `stable` a step of gradient descent changes large and small eigenvalues in proportion (StableSSM). The state
    decays while Re w² > -1/2. The authors' program does not invert the map from w for the initial values, so its Λ
    starts from other numbers than intended. Here the map is inverted.

    With "async", for events, the time since the last event lengthens the decay alone, and B x is written as after one
    unit. Without timespans "async" is "zoh".

    Parameters: as in `s5` without log_step; step_size, the linear map to Δ (P, D) with its bias. Λ, B and the map to Δ
    have no weight decay.
    Initialisation: as in `s5`; step_size.weight uniform in ±1/sqrt(R) with R = D/16, rounded up; its bias such that Δ
    is log-uniform in [dt_min, dt_max].
    """

    id = "S-s7"
    equation = (
        "Delta_t = softplus(W x_t + b),  s_t = exp(Delta_t Lambda) * s_{t-1} + (exp(Delta_t Lambda) - 1)/Lambda * "
        "(B x_t),  y_t = 2 Re(C s_t) + D * x_t"
    )
    source = (
        'Soydan, Zubić, Messikommer, Mishra and Scaramuzza, "S7: Selective and Simplified State Space Layers for '
        'Sequence Modeling", arXiv:2410.03464, sec. 3'
    )
    sample: ClassVar = {"state_dim": 8, "blocks": 2}
    hints: ClassVar = {"step_size": Hint(weight_decay=False)}

    def __init__(
        self,
        dim: options.Dim,
        state_dim: Annotated[options.StateDim | None, "real numbers in the state; by default D"] = None,
        *,
        discretization: Annotated[
            str, one_of((*DISCRETIZATIONS, "async")), '"zoh", "bilinear", "dirac"; or "async", for events'
        ] = "zoh",
        activation: Activation = "half_glu2",
        stable: Annotated[bool, "Λ = -1/(w² + 1/2) with w = Lambda_re + i Lambda_im; not with clip_eigs"] = False,
        **system: Any,
    ) -> None:
        if stable and system.get("clip_eigs"):
            self._refuse("clip_eigs", True, "False because stable is True")
        super().__init__(dim, state_dim, discretization=discretization, activation=activation, **system)
        self.stable = stable
        if stable:
            with torch.no_grad():
                w = torch.sqrt(-1 / torch.complex(self.Lambda_re, self.Lambda_im) - 0.5)
                self.Lambda_re.copy_(w.real)
                self.Lambda_im.copy_(w.imag)

    def _make_steps(self, dt_min: float, dt_max: float) -> None:
        self.step_size = nn.Linear(self.dim, self.modes)
        limit = 1 / math.sqrt(-(-self.dim // 16))
        with torch.no_grad():
            self.step_size.weight.uniform_(-limit, limit)
            self.step_size.bias.copy_(time_step_bias(self.modes, dt_min, dt_max))

    def _eigenvalues(self) -> Tensor:
        Lambda = super()._eigenvalues()
        return -1 / (Lambda.square() + 0.5) if self.stable else Lambda

    def _discrete(self, Lambda: Tensor, x: Tensor, timespans: Tensor | None) -> tuple[Tensor, Tensor]:
        one = F.softplus(widen(self.step_size(x)))
        held, events = one * durations(timespans, x), self.discretization == "async"
        method = "zoh" if events else self.discretization
        a, b = discretize(Lambda, torch.ones_like(Lambda), held.flatten(0, 1), method)
        if events:
            b = discretize(Lambda, torch.ones_like(Lambda), one.flatten(0, 1))[1]
        return a.unflatten(0, x.shape[:2]), b.unflatten(0, x.shape[:2])
