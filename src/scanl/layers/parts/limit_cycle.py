r"""Initial weights with which pairs of units turn in a stable limit cycle.

.. math:: W = \bigoplus_i g \begin{pmatrix} \cos\omega_i & -\sin\omega_i \\ \sin\omega_i & \cos\omega_i \end{pmatrix},
    \quad \omega_i \sim U(\pi/21, \pi/3.8)

Without input the phase of a pair neither decays nor grows, so a gradient along it lasts as long as the sequence. For
s <- tanh(g R s) with g = 1.5 the cycle ends in fixed points where ω is below about π/21.25.

Source: Park, Ságodi and Sokół, "Persistent Learning Signals and Working Memory without Continuous Attractors",
arXiv:2308.12585; g and the range of ω as in the third author's program, whose networks are in continuous time, where
the cycle also needs g cos ω > 1. Differs: its states start at U(-1, 1). A state of 0 is an unstable fixed point, which
the first input leaves.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError

SLOWEST, FASTEST = math.pi / 21, math.pi / 3.8  # radians a step


def rotations(frequencies: Tensor, gain: float) -> Tensor:
    """Return g R, (2 N, 2 N), of N pairs of units that turn by `frequencies` (N,), in radians a step."""
    cos, sin = gain * frequencies.cos(), gain * frequencies.sin()
    return torch.block_diag(*torch.stack([cos, -sin, sin, cos], 1).view(-1, 2, 2))


@torch.no_grad()
def init_limit_cycles(
    who: str, inputs: Tensor, recurrent: Tensor, biases: Sequence[Tensor], gates: int, gain: float
) -> None:
    """Set the weights of a cell whose last gate is the candidate; the recurrent weights of the other gates are 0.

    inputs: (gates E, D), normal as Kaiming has them.   recurrent: (gates E, E).   biases: set to 0.   gain: g.
    Raises ConfigError unless E is even.
    """
    units = recurrent.shape[1]
    if units % 2:
        raise ConfigError(
            f'{who}: init is "limit_cycle" with {units} units, expected an even number: they turn in pairs'
        )
    nn.init.kaiming_normal_(inputs)
    frequencies = torch.empty(units // 2, dtype=recurrent.dtype, device=recurrent.device).uniform_(SLOWEST, FASTEST)
    nn.init.zeros_(recurrent)
    recurrent[(gates - 1) * units :] = rotations(frequencies, gain)
    for bias in biases:
        nn.init.zeros_(bias)
