"""Leaky integrate-and-fire neurons."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import CellLayer
from scanl.layers.rnn._spikes import SPIKE_EXCUSES, SURROGATE, Gamma, Tau, init_weights, spike, without_diagonal
from scanl.ops.cell import cell


@cell(
    "x: B T D, u: D D, state: B D -> B T D",
    equation="v_t = alpha v_{t-1} + x_t + U z_{t-1} - z_{t-1}, z_t = H(v_t - 1)",
    source='Bellec et al., "A solution to the learning dilemma for recurrent networks of spiking neurons", Nature '
    "Communications 11:3625, 2020, Methods",
    excused=SURROGATE,
)
def lif_cell(x: Tensor, u: Tensor, state: Tensor, *, leak: float = 0.95, gamma: float = 0.3) -> tuple[Tensor, Tensor]:
    """Take one step of leaky integrate-and-fire neurons with the threshold 1.

    x: the current, (B, T, D).   u: recurrent weights.   leak: α.   gamma: γ, see `spike`.   state: v. The spikes of
    the step before follow from it. No gradient goes through the reset.
    """
    z = spike(state - 1, gamma)
    v = leak * state + x + z @ u.T - z.detach()
    return spike(v - 1, gamma), v


cases(
    lif_cell,
    "D=3",
    "u has shape (2, 3), expected (D, D) with D=3 from x",
    "u is missing, expected a tensor (D, D)",
    options=[{"leak": 0.75}],
    x=lambda x: x + 0.5,
)


@registry.register("lif")
class LIF(CellLayer):
    """Leaky integrate-and-fire neurons, which see each other's spikes. The output is the spikes, 0 or 1.

    v is in units of the threshold. A spike takes 1 from it in the next step. H has the pseudo-derivative
    γ max(0, 1 - |v - 1|), and no gradient goes through the reset, as in the paper.

    Differs: there is no refractory period and no delay of the connections beyond one step.

    Parameters: weight_ih, weight_hh (D, D), bias (D). The diagonal of weight_hh is not read: no neuron sees its own
    spikes.
    Initialisation: weight_hh N(0, 1/D), as in the authors' program; weight_ih N(0, (1 - α²)/D), so that inputs of
    variance 1 give v a variance of 1; bias 0.
    """

    id = "S-lif"
    equation = "v_t = alpha v_{t-1} + W x_t + b + U z_{t-1} - z_{t-1},  z_t = H(v_t - 1),  alpha = exp(-1/tau)"
    cell = lif_cell
    state: ClassVar = StateAxes("dim", "v")
    excused: ClassVar = {
        **SPIKE_EXCUSES,
        "the_future_changes_nothing_before_it": "not every change of an input changes a spike",
    }
    added: ClassVar = {}  # the Newton methods need derivatives, not pseudo-derivatives
    sample: ClassVar = {"tau": 2.0}

    def __init__(self, dim: options.Dim, tau: Tau = 20.0, gamma: Gamma = 0.3) -> None:
        super().__init__()
        self.dim, self.gamma, self.leak = dim, gamma, math.exp(-1 / tau)
        self.weight_ih = nn.Parameter(torch.empty(dim, dim))
        self.weight_hh = nn.Parameter(torch.empty(dim, dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        init_weights(self.weight_ih, self.weight_hh, self.leak)

    def operands(self, x: Tensor) -> list[Tensor]:
        return [F.linear(x, self.weight_ih, self.bias), without_diagonal(self.weight_hh)]
