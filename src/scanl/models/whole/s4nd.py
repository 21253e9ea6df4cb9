r"""S4ND: a convolution over several axes whose kernel is a product of one kernel for each axis.

.. math:: y = \frac1R \sum_{r=1}^R K^{(1,r)} *_1 \cdots *_{A-1} K^{(A,r)} *_A u + D u, \quad
          K^{(a,r)}_j = 2\,\mathrm{Re}\, C \bar A^j \bar B
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError, ShapeError
from scanl.layers import options
from scanl.layers.base import Hint, widen
from scanl.layers.module import Module
from scanl.layers.parts.diagonal_ssm import diagonal_ssm
from scanl.layers.ssm.s4d import S4DKernel
from scanl.models.presets import whole
from scanl.options import ConfiguredMeta, above, at_least, refuse


class AxisKernel(S4DKernel):
    """Systems along one axis: a `S4DKernel` with C_back (D, N/2, 2), which reads the same systems backwards."""

    hints: ClassVar = dict.fromkeys(("log_dt", "log_A_real", "A_imag"), Hint(weight_decay=False, lr="lr"))

    def __init__(
        self, dim: int, state_dim: int, init: str, dt_min: float, dt_max: float, both: bool, lr: float | None
    ) -> None:
        super().__init__(dim, state_dim, init, dt_min, dt_max)
        self.lr = lr
        back = S4DKernel(dim, state_dim, init, dt_min, dt_max).C if both else None
        self.C_back = back

    def forward(self, u: Tensor, axis: int, rate: float, bandlimit: float | None, discretization: str) -> Tensor:
        """Convolve u (B, ..., D) along an axis. rate: duration of its steps."""
        A, C, dt = self.system()
        in_band = None if bandlimit is None else A.imag.abs() * dt[:, None] / (2 * torch.pi) < bandlimit / 2
        lines = u.movedim(axis, -2)
        flat = lines.flatten(0, -3)

        def run(x: Tensor, C: Tensor) -> Tensor:
            C = C if in_band is None else torch.where(in_band, C, 0)
            return diagonal_ssm(x, A, torch.ones_like(A), C, rate * dt, None, discretization=discretization)[0]

        y = run(flat, C)
        if self.C_back is not None:
            # Backwards from the next step on, so that the lag of 0 is counted once.
            later = run(flat.flip(1), torch.view_as_complex(widen(self.C_back))).flip(1)
            y = y + F.pad(later[:, 1:], (0, 0, 0, 1))
        return y.view(lines.shape).movedim(-2, axis)


@whole("s4nd")
class S4ND(Module, metaclass=ConfiguredMeta):
    """S4ND: images, volumes and video as signals on a grid, by systems along each axis; then GELU and a gated map.

    This is a module for grids (B, L_1, ..., L_A, D), not one of the layers for sequences: it reads the whole grid, and
    has no state. The kernel is separable, so one axis is convolved after the other, each as `s4d` convolves time. Along
    `causal` axes an output reads only earlier inputs. Along the others the same systems are read in both directions,
    with two C.

    The systems are in continuous units. So a model that is trained on grids of one resolution can run at another one:
    at twice the resolution a step lasts `rate` 1/2. `bandlimit` removes the modes that the coarse grid cannot
    represent.

    Parameters: kernels.(a R + r): C, C_back (D, N/2, 2), log_dt (D), log_A_real, A_imag (D, N/2); D (D); output_linear
    (2D, D). A and Δ have no weight decay.
    Initialisation: each kernel as in `s4d`; D N(0, 1); the linear map as in PyTorch.

    Source: Nguyen et al., "S4ND: Modeling Images and Videos as Multidimensional Signals Using State Spaces",
    arXiv:2210.06583, sec. 4. Differs: the systems are diagonal, as in S4D; in the released code S4's are the
    default.
    """

    name: ClassVar = "s4nd"
    id = "S-s4nd"

    def __init__(
        self,
        dim: options.Dim,
        axes: Annotated[int, at_least(1), "A, axes of the grid"] = 2,
        state_dim: Annotated[
            options.EvenStateDim, "N, real numbers in the state of each channel, axis and rank, even"
        ] = 64,
        rank: Annotated[options.Rank, "R, products in the sum"] = 1,
        causal: Annotated[Sequence[bool] | None, "whether each axis looks back alone; by default none does"] = None,
        bandlimit: Annotated[
            float | None,
            above(0),
            "modes of at least half as many turns a step at rate 1 are not read; None for all modes",
        ] = None,
        init: options.DiagonalInit = "legs",
        dt_min: options.StepMin = 0.001,
        dt_max: options.StepMax = 0.1,
        discretization: options.Discretization = "zoh",
        lr: Annotated[options.LearningRate, "learning rate of A and Δ; None for the optimizer's"] = 1e-3,
    ) -> None:
        super().__init__()
        causal = (False,) * axes if causal is None else tuple(causal)
        if len(causal) != axes:
            refuse(type(self), "causal", causal, f"{axes} truth values because of axes={axes}")
        self.dim, self.axes, self.rank, self.bandlimit, self.discretization = dim, axes, rank, bandlimit, discretization
        self.kernels = nn.ModuleList(
            AxisKernel(dim, state_dim, init, dt_min, dt_max, not back, lr) for back in causal for _ in range(rank)
        )
        self.D = nn.Parameter(torch.randn(dim))
        self.output_linear = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GLU(-1))

    def forward(self, x: Tensor, *, rate: float | Sequence[float] = 1.0) -> Tensor:
        """Map x (B, L_1, ..., L_A, D) to the same shape.

        rate: how long a step lasts, in units of the steps that the model was trained on; one number for each axis, or
        one for all. Raises ShapeError for a wrong shape, ConfigError for a wrong count of rates.
        """
        if x.ndim != self.axes + 2 or x.shape[-1] != self.dim:
            axes = ", ".join(f"L_{axis + 1}" for axis in range(self.axes))
            raise ShapeError(f"{self.name}: x has shape {tuple(x.shape)}, expected (B, {axes}, {self.dim})")
        rates = [float(rate)] * self.axes if isinstance(rate, int | float) else list(rate)
        if len(rates) != self.axes or min(rates) <= 0:
            raise ConfigError(f"{self.name}: rate is {rate}, expected {self.axes} numbers above 0 because of axes")
        u = widen(x)
        total = torch.zeros_like(u)
        for r in range(self.rank):
            y = u
            for axis, step in enumerate(rates):
                kernel = cast(AxisKernel, self.kernels[axis * self.rank + r])
                y = kernel(y, axis + 1, step, self.bandlimit, self.discretization)
            total = total + y
        return self.output_linear(F.gelu(torch.addcmul(total / self.rank, u, widen(self.D))).to(x.dtype))
