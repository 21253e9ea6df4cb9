"""S7: S5 whose steps depend on the input."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.configured import one_of
from scanl.layers import options, registry
from scanl.layers.base import Hint, widen
from scanl.layers.parts.time_step import time_step_bias
from scanl.layers.parts.timespans import durations
from scanl.layers.ssm.s5 import Activation, Blocks, ClipEigs, ConjSym, Init, MIMODiagonal
from scanl.ops import discretize
from scanl.ops.ssm_kernels import DISCRETIZATIONS


@registry.register("s7")
class S7(MIMODiagonal):
    """S7: S5 with a step size for each number of the state that depends on the input, so it selects what it keeps.

    Differs: in the paper's text Λ, B, C and D depend on the input too, as in `s7_full`. In the authors' program, and
    here, only Δ depends on it.

    With `stable` a step of gradient descent changes large and small eigenvalues in proportion (StableSSM). The state
    decays while Re w² > -1/2. The authors' program does not invert the map from w for the initial values, so its Λ
    starts from other numbers than intended. Here the map is inverted.

    With "async", for events, the time since the last event lengthens the decay alone, and B x is written as after one
    unit. Without timespans "async" is "zoh".

    Parameters: as of `s5` without log_step; step_size, the linear map to Δ (P, D) with its bias. Λ, B and the map to Δ
    have no weight decay.
    Initialisation: as of `s5`; step_size.weight uniform in ±1/sqrt(R) with R = D/16, rounded up; its bias such that Δ
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
        blocks: Blocks = 1,
        conj_sym: ConjSym = True,
        init: Init = "trunc_standard_normal",
        discretization: Annotated[
            str, one_of((*DISCRETIZATIONS, "async")), '"zoh", "bilinear", "dirac"; or "async", for events'
        ] = "zoh",
        dt_min: Annotated[options.StepMin, "lower end of the range of the initial Δ at x = 0"] = 0.001,
        dt_max: Annotated[options.StepMax, "upper end of this range"] = 0.1,
        clip_eigs: ClipEigs = False,
        activation: Activation = "half_glu2",
        lr: Annotated[options.LearningRate, "learning rate of Λ and B; None for the optimizer's"] = 1e-3,
        stable: Annotated[bool, "Λ = -1/(w² + 1/2) with w = Lambda_re + i Lambda_im; not with clip_eigs"] = False,
    ) -> None:
        if stable and clip_eigs:
            self._refuse("clip_eigs", clip_eigs, "False because stable is True")
        super().__init__(
            dim=dim,
            state_dim=state_dim,
            blocks=blocks,
            conj_sym=conj_sym,
            init=init,
            discretization=discretization,
            clip_eigs=clip_eigs,
            activation=activation,
            lr=lr,
        )
        self.stable = stable
        if stable:
            with torch.no_grad():
                w = torch.sqrt(-1 / torch.complex(self.Lambda_re, self.Lambda_im) - 0.5)
                self.Lambda_re.copy_(w.real)
                self.Lambda_im.copy_(w.imag)
        self.step_size = nn.Linear(dim, self.modes)
        limit = 1 / math.sqrt(-(-dim // 16))
        with torch.no_grad():
            self.step_size.weight.uniform_(-limit, limit)
            self.step_size.bias.copy_(time_step_bias(self.modes, dt_min, dt_max))

    def _eigenvalues(self) -> Tensor:
        Lambda = super()._eigenvalues()
        return -1 / (Lambda.square() + 0.5) if self.stable else Lambda

    def _discrete(self, Lambda: Tensor, x: Tensor, timespans: Tensor | None) -> tuple[Tensor, Tensor]:
        one = F.softplus(widen(self.step_size(x)))
        held, events = one * durations(self._who(), timespans, x), self.discretization == "async"
        method = "zoh" if events else self.discretization
        a, b = discretize(Lambda, torch.ones_like(Lambda), held.flatten(0, 1), method)
        if events:
            b = discretize(Lambda, torch.ones_like(Lambda), one.flatten(0, 1))[1]
        return a.unflatten(0, x.shape[:2]), b.unflatten(0, x.shape[:2])
