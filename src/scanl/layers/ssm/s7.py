r"""S7: S5 whose steps depend on the input.

.. math:: \Delta_t = \mathrm{softplus}(W x_t + b), \quad
          s_t = e^{\Delta_t \Lambda} \odot s_{t-1} + \frac{e^{\Delta_t \Lambda} - 1}{\Lambda} \odot B x_t, \quad
          y_t = 2\,\mathrm{Re}(C s_t) + D \odot x_t
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.base import Hint, register, widen
from scanl.layers.parts.time_step import check_step_range, time_step_bias
from scanl.layers.parts.timespans import durations
from scanl.layers.ssm.s5 import SharedState
from scanl.ops import discretize
from scanl.ops.ssm_kernels import DISCRETIZATIONS


@register("s7")
class S7(SharedState):
    """S7: S5 with a step size for each number of the state that depends on the input, so it selects what it keeps.

    Differs: in the paper's text Λ, B, C and D depend on the input too, as in `s7_full`. In the authors' program, and
    here, only Δ depends on it.

    Args:
        dim: D, model width.
        state_dim, blocks, conj_sym, C_init, clip_eigs: as of `s5`; `clip_eigs` is refused with `stable`.
        discretization: "zoh", "bilinear", "dirac", or "async", for events: the time since the last event lengthens the
            decay alone, and B x is written as after one unit. Without timespans "async" is "zoh".
        dt_min, dt_max: range of the initial Δ at x = 0, in units of Λ's time.
        activation: as of `s5`.
        lr: learning rate of Λ and B; None for the optimiser's own.
        stable: Λ = -1/(w² + 1/2) with w = Lambda_re + i Lambda_im, so that a step of gradient descent changes large and
            small eigenvalues in proportion (StableSSM). The state decays while Re w² > -1/2. The authors' program does
            not invert this map for the initial values, so its Λ starts from other numbers than intended. Here the map
            is inverted.

    `forward` also takes `timespans` (B, T), the duration of each step in units of the usual one. It multiplies Δ,
    except for "async" (see above).

    Parameters: as of `s5` without log_step; step_size, the linear map to Δ (P, D) with its bias. Λ, B and the map to Δ
    have no weight decay.
    Initialisation: as of `s5`; step_size.weight uniform in ±1/sqrt(R) with R = D/16, rounded up; its bias such that Δ
    is log-uniform in [dt_min, dt_max].
    State: (B, P) complex.
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
        dim: int,
        state_dim: int | None = None,
        blocks: int = 1,
        conj_sym: bool = True,
        C_init: str = "trunc_standard_normal",
        discretization: str = "zoh",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        clip_eigs: bool = False,
        activation: str = "half_glu2",
        lr: float | None = 1e-3,
        stable: bool = False,
    ) -> None:
        known = (*DISCRETIZATIONS, "async")
        if stable and clip_eigs:
            raise ConfigError("s7: clip_eigs is True, expected False because stable is True")
        super().__init__(dim, state_dim, blocks, conj_sym, C_init, discretization, known, clip_eigs, activation, lr)
        check_step_range("s7", dt_min, dt_max)
        self.stable = stable
        if stable:
            with torch.no_grad():
                w = torch.sqrt(-1 / torch.complex(self.Lambda_re, self.Lambda_im) - 0.5)
                self.Lambda_re.copy_(w.real)
                self.Lambda_im.copy_(w.imag)
        self.step_size = nn.Linear(dim, self.state_dim)
        limit = 1 / math.sqrt(-(-dim // 16))
        with torch.no_grad():
            self.step_size.weight.uniform_(-limit, limit)
            self.step_size.bias.copy_(time_step_bias(self.state_dim, dt_min, dt_max))

    def _eigenvalues(self) -> Tensor:
        Lambda = super()._eigenvalues()
        return -1 / (Lambda.square() + 0.5) if self.stable else Lambda

    def _discrete(self, Lambda: Tensor, x: Tensor, timespans: Tensor | None) -> tuple[Tensor, Tensor]:
        one = F.softplus(widen(self.step_size(x)))
        held, events = one * durations("s7", timespans, x), self.discretization == "async"
        method = "zoh" if events else self.discretization
        a, b = discretize(Lambda, torch.ones_like(Lambda), held.flatten(0, 1), method)
        if events:
            b = discretize(Lambda, torch.ones_like(Lambda), one.flatten(0, 1))[1]
        return a.unflatten(0, x.shape[:2]), b.unflatten(0, x.shape[:2])
