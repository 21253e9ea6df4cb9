"""UnICORNN: undamped oscillators that are not coupled with each other, so no state grows or fades."""

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.initial_state import StateAxes
from scanl.layers.ode._timed import TimedCell
from scanl.layers.parts.cell_cases import cases
from scanl.ops.cell import cell
from scanl.options import at_least


@cell(
    "x: B T D, dt: B T 1, w: D, c: D, state: B 2 D -> B T D",
    equation="z_t = z_{t-1} - dt c * (tanh(w * y_{t-1} + x_t) + alpha y_{t-1}), y_t = y_{t-1} + dt c * z_t",
    source='Rusch and Mishra, "UnICORNN: A recurrent model for learning very long time dependencies", arXiv:2103.05487',
)
def unicornn_cell(x, dt, w, c, state, *, alpha: float = 30.65):
    """Move independent oscillators by one symplectic Euler step of length dt c.

    x: the projected input, bias included, (B, T, D).   dt: (B, T, 1).   w: weight of y, (D).   c: share of the step
    that each oscillator makes, in (0, 1), (D).   state: y and z, (B, 2, D).
    """
    y, z = state.unbind(1)
    step = dt * c
    z = z - step * (torch.tanh(w * y + x) + alpha * y)
    y = y + step * z
    return y, torch.stack([y, z], 1)


cases(
    unicornn_cell,
    "D=3",
    "w has shape (2,), expected (D,) with D=3 from x",
    "c is missing, expected a tensor (D,)",
    options=[{"alpha": 2.0}],
    dt=lambda dt: dt.abs() / 4,
    c=Tensor.sigmoid,
)


@registry.register("unicornn")
class UnICORNN(TimedCell):
    """One level of UnICORNN: independent oscillators without damping, whose displacements y are the output.

    The authors' levels are a stack of these layers, and
    their dropout is the dropout of the stack.

    Parameters as in the authors' program: fc (D, D) with bias; weight_hh, c_ (D).
    Initialisation: fc Kaiming uniform with a = 8, bias 0; weight_hh U(0, 1); c_ U(±0.1). The defaults of dt and alpha
    are the authors' for psMNIST.
    """

    id = "S-unicornn"
    aliases = ("undamped_independent_controlled_oscillatory_rnn",)
    equation = (
        "z_t = z_{t-1} - dt sigmoid(c) * (tanh(w * y_{t-1} + V x_t + b) + alpha y_{t-1}),  "
        "y_t = y_{t-1} + dt sigmoid(c) * z_t"
    )
    cell = unicornn_cell
    state: ClassVar = StateAxes("2, dim", "y and z")

    def __init__(
        self,
        dim: options.Dim,
        dt: Annotated[options.TimeStep, "Δt, the longest step; oscillator j makes steps of Δt σ(c_j)"] = 0.19,
        alpha: Annotated[float, at_least(0), "α, stiffness of an oscillator without its nonlinearity"] = 30.65,
    ) -> None:
        super().__init__()
        self.dim, self.dt, self.alpha = dim, dt, alpha
        self.fc = nn.Linear(dim, dim)
        nn.init.kaiming_uniform_(self.fc.weight, a=8)
        nn.init.zeros_(self.fc.bias)
        self.weight_hh = nn.Parameter(torch.rand(dim))
        self.c_ = nn.Parameter(torch.empty(dim).uniform_(-0.1, 0.1))

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor]:
        return [self.fc(x), self.dt * spans, self.weight_hh, self.c_.sigmoid()]
