"""Echo state network: a fixed random recurrence, of which only the readout is fitted."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import CellLayer
from scanl.ops import cell
from scanl.options import above, at_least, between

EQUATION = "s_t = (1 - alpha) s_{t-1} + alpha tanh(W s_{t-1} + W_in x_t + b)"
SOURCE = (
    'Jaeger, "The echo state approach to analysing and training recurrent neural networks", GMD report 148, 2001; '
    "Lukosevicius and Jaeger, Computer Science Review 3, 2009"
)


MAX_DENSE_UNITS = 512  # most units whose eigenvalues are computed


@cell("x: B T E, w: E E, state: B E -> B T E", equation=EQUATION, source=SOURCE)
def esn_cell(x: Tensor, w: Tensor, state: Tensor, *, leak: float = 1.0) -> tuple[Tensor, Tensor]:
    """Step a leaky reservoir.

    x: the projected input, b included.   w: W.   leak: α, the part of a unit that is new.   state: s.
    """
    s = (1 - leak) * state + leak * torch.tanh(x + state @ w.T)
    return s, s


cases(
    esn_cell,
    "E=5",
    "w is missing, expected a tensor (E, E)",
    "w has shape (3, 4), expected (E, E) with E=5 from x",
    options=[{"leak": 0.3}],
)


@registry.register("esn")
class ESN(CellLayer):
    """Echo state network: a sparse random reservoir and a linear readout.

    The reservoir is not trained. `scanl.learning.forecasting.readout.fit_readout` fits the readout by ridge regression;
    gradient descent can train it too. In a stack, or in `bidirectional`, the readouts inside start as random
    projections.

    Buffers as in PyPI's reservoirpy: W (E, E), Win (E, D), bias (E). Parameters: readout (D, E) with a bias.
    Initialisation as in that code: W normal, then scaled to the spectral radius, to about 1 % for more than 512 units;
    Win and bias with random signs. The readout as in PyTorch.
    """

    id = "S-esn"
    aliases = ("echo_state_network", "echo_state")
    equation = f"{EQUATION},  y_t = C s_t + d"
    cell = esn_cell
    state: ClassVar = StateAxes("width")
    sample: ClassVar = {"width": 20, "connectivity": 0.3, "input_connectivity": 0.5}
    residual_out = "readout"

    W: Tensor
    Win: Tensor
    bias: Tensor

    def __init__(
        self,
        dim: options.Dim,
        width: Annotated[options.Width | None, "E, units of the reservoir; by default 4 D"] = None,
        spectral_radius: Annotated[float, at_least(0), "largest absolute eigenvalue of W, usually 0.8 to 1.25"] = 1.0,
        leak: Annotated[float, above(0), between(0, 1), "α, the part of a unit that is new in each step"] = 1.0,
        connectivity: Annotated[float, above(0), between(0, 1), "share of the weights of W that are not 0"] = 0.1,
        input_connectivity: Annotated[
            float, above(0), between(0, 1), "share of the weights of W_in that are not 0"
        ] = 0.1,
        input_scaling: Annotated[float, "size of the weights of W_in"] = 1.0,
        bias_scaling: Annotated[float, "size of b"] = 0.0,
    ) -> None:
        super().__init__()
        width = 4 * dim if width is None else width
        self.dim, self.width, self.leak = dim, width, leak
        W = torch.randn(width, width) * _present(connectivity, width, width)
        self.register_buffer("W", W * (spectral_radius / _spectral_radius(W)))
        self.register_buffer("Win", input_scaling * _signs(width, dim) * _present(input_connectivity, width, dim))
        self.register_buffer("bias", bias_scaling * _signs(width))
        self.readout = nn.Linear(width, dim)

    def operands(self, x: Tensor) -> list[Tensor]:
        return [F.linear(x, self.Win, self.bias), self.W]

    def output(self, h: Tensor) -> Tensor:
        return self.readout(h)


def _spectral_radius(W: Tensor) -> float:
    """Return the largest absolute eigenvalue; for more than EXACT units the growth of random vectors, to about 1 %."""
    if W.is_meta:
        return 1.0
    if len(W) <= MAX_DENSE_UNITS:
        return max(float(torch.linalg.eigvals(W.double()).abs().max()), 1e-8)
    v, steps, growth = torch.randn(len(W), 1), 64, 0.0
    for step in range(2 * steps):  # log ‖W^2k v‖ - log ‖W^k v‖ = k log ρ
        v = W @ v
        size = float(v.norm())
        if size == 0:
            return 1e-8
        v, growth = v / size, growth + (math.log(size) if step >= steps else 0)
    return math.exp(growth / steps)


def _present(connectivity: float, *shape: int) -> Tensor:
    """Return 1 with probability `connectivity`, else 0."""
    return (torch.rand(shape) < connectivity).to(torch.get_default_dtype())


def _signs(*shape: int) -> Tensor:
    return 2 * _present(0.5, *shape) - 1
