"""Jordan network: the output is fed back."""

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import CellLayer
from scanl.ops import cell
from scanl.ops._frame.context import late
from scanl.options import at_least, below, one_of

ACTIVATIONS = {"tanh": late(torch, "tanh"), "sigmoid": late(torch, "sigmoid"), "identity": lambda raw: raw}


@cell(
    "x: B T E, a: E D, c: D E, d: D, state: B D -> B T D",
    equation="s_t = tanh(A u_t + B x_t + b),  y_t = phi(C s_t + d),  u_{t+1} = alpha u_t + y_t",
    source='Jordan, "Serial Order: A Parallel Distributed Processing Approach", ICS report 8604, 1986; reprinted in '
    "Advances "
    "in Psychology 121, 1997",
)
def jordan_cell(
    x: Tensor, a: Tensor, c: Tensor, d: Tensor, state: Tensor, *, alpha: float = 0.0, activation: str = "tanh"
) -> tuple[Tensor, Tensor]:
    """Step a network whose output y, remembered in u, is its only memory.

    x: the projected input, b included.   a, c, d: A, C and d.   alpha: how much of u stays.
    activation: φ, "tanh", "sigmoid" or "identity".   state: u.
    """
    s = torch.tanh(x + state @ a.T)
    y = ACTIVATIONS[activation](s @ c.T + d)
    return y, alpha * state + y


cases(
    jordan_cell,
    "D=3 E=5",
    "c has shape (5, 3), expected (D, E) with D=3 from a, E=5 from x",
    "a has shape (3, 5), expected (E, D) with E=5 from x",
    options=[{"alpha": 0.5, "activation": "sigmoid"}],
)


@registry.register("jordan")
class Jordan(CellLayer):
    """Jordan network: the output is fed back, one to one, and not the hidden units.

    Parameters: A (E, D); B (E, D) and C (D, E), each with a bias.
    Initialisation: weights Xavier uniform, of A with gain 0.1; biases 0. The paper has none.
    """

    id = "S-jordan"
    cell = jordan_cell
    state: ClassVar = StateAxes("dim", "u")
    reads: ClassVar = {"C": nn.Linear}
    sample: ClassVar = {"hidden_dim": 9, "alpha": 0.4}

    def __init__(
        self,
        dim: options.Dim,
        hidden_dim: Annotated[options.HiddenDim | None, "E, hidden units; by default D"] = None,
        alpha: Annotated[
            float, at_least(0), below(1), "α, how much of the state u stays; with 0 the state is the last output"
        ] = 0.0,
        activation: Annotated[str, one_of(ACTIVATIONS), "φ, applied to the output"] = "tanh",
    ) -> None:
        super().__init__()
        hidden_dim = dim if hidden_dim is None else hidden_dim
        self.dim, self.hidden_dim, self.alpha, self.activation = dim, hidden_dim, alpha, activation
        self.A = nn.Parameter(torch.empty(hidden_dim, dim))
        self.B, self.C = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim)
        for weight, gain in ((self.A, 0.1), (self.B.weight, 1.0), (self.C.weight, 1.0)):
            nn.init.xavier_uniform_(weight, gain)
        nn.init.zeros_(self.B.bias)
        nn.init.zeros_(self.C.bias)

    def operands(self, x: Tensor) -> list[Tensor]:
        return [self.B(x), self.A, self.C.weight, self.C.bias]
