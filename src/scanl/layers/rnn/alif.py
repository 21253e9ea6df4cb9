"""Adaptive leaky integrate-and-fire neurons."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import CellLayer
from scanl.layers.rnn._spikes import SPIKE_EXCUSES, SURROGATE, Gamma, Tau, init_weights, spike, without_diagonal
from scanl.ops.cell import cell
from scanl.options import at_least, between


@cell(
    "x: B T D, u: D D, state: B 2 D -> B T D",
    equation="v_t = alpha v_{t-1} + x_t + U z_{t-1} - z_{t-1}, a_t = rho a_{t-1} + z_{t-1}, "
    "z_t = H(v_t - 1 - beta a_t)",
    source='Bellec et al., "A solution to the learning dilemma for recurrent networks of spiking neurons", Nature '
    "Communications 11:3625, 2020, Methods",
    excused=SURROGATE,
)
def alif_cell(
    x: Tensor,
    u: Tensor,
    state: Tensor,
    *,
    leak: float = 0.95,
    decay: float = 0.995,
    beta: float = 0.1,
    gamma: float = 0.3,
) -> tuple[Tensor, Tensor]:
    """Take one step of leaky integrate-and-fire neurons, whose threshold 1 + β a grows with their own spikes.

    x: the current, (B, T, D).   u: recurrent weights.   leak: α.   decay: ρ.   gamma: γ, see `spike`.
    state: v and a, (B, 2, D). No gradient goes through the reset of v; one goes from a spike to a.
    """
    v, a = state.unbind(1)
    z = spike(v - 1 - beta * a, gamma)
    v = leak * v + x + z @ u.T - z.detach()
    a = decay * a + z
    return spike(v - 1 - beta * a, gamma), torch.stack([v, a], 1)


cases(
    alif_cell,
    "D=3",
    "u has shape (2, 3), expected (D, D) with D=3 from x",
    "state has shape (2, 3), expected (B, 2, D)",
    options=[{"leak": 0.75, "decay": 0.875}],
    x=lambda x: x + 0.5,
)


@registry.register("alif")
class ALIF(CellLayer):
    """Adaptive leaky integrate-and-fire neurons: `lif` with a threshold that rises after a spike and decays slowly.

    The adaptation is a memory over seconds, in which learning rules can find what a spike long ago has caused. Else all
    is as in `lif`.

    Parameters and initialisation: as in `lif`.
    """

    id = "S-alif"
    equation = (
        "v_t = alpha v_{t-1} + W x_t + b + U z_{t-1} - z_{t-1},  a_t = rho a_{t-1} + z_{t-1},  "
        "z_t = H(v_t - 1 - beta a_t),  alpha = exp(-1/tau),  rho = decay"
    )
    cell = alif_cell
    state: ClassVar = StateAxes("2, dim", "v and a")
    excused: ClassVar = SPIKE_EXCUSES
    added: ClassVar = {}  # the Newton methods need derivatives, not pseudo-derivatives
    sample: ClassVar = {"tau": 2.0, "decay": 0.9}

    def __init__(
        self,
        dim: options.Dim,
        tau: Tau = 20.0,
        decay: Annotated[float, between(0, 1), "ρ, factor of the adaptation in a step; exp(-1/200) by default"] = 0.995,
        beta: Annotated[float, at_least(0), "β, by how much a raises the threshold"] = 0.1,
        gamma: Gamma = 0.3,
    ) -> None:
        super().__init__()
        self.dim, self.beta, self.gamma = dim, beta, gamma
        self.leak, self.decay = math.exp(-1 / tau), decay
        self.weight_ih = nn.Parameter(torch.empty(dim, dim))
        self.weight_hh = nn.Parameter(torch.empty(dim, dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        init_weights(self.weight_ih, self.weight_hh, self.leak)

    def operands(self, x: Tensor) -> list[Tensor]:
        return [F.linear(x, self.weight_ih, self.bias), without_diagonal(self.weight_hh)]
