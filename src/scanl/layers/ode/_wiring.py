"""The sparse wiring of neural circuit policies: the connected neurons, and the polarity of each synapse.

Source: Lechner et al., "Neural circuit policies enabling auditable autonomy", Nature Machine Intelligence 2, 2020, with
the numbers of neurons and synapses of `AutoNCP` in PyPI's ncps. The same seed gives the same wiring as there.
"""

from typing import Annotated, NamedTuple

import numpy as np
from numpy import ndarray
from numpy.random import RandomState

from scanl.layers import options
from scanl.options import Range, at_least, below, between

enough_neurons = Range(
    "at least 3 more than dim={dim}", lambda value, options: value >= options["dim"] + 3, relation=True
)
AllNeurons = Annotated[
    Annotated[options.Width, enough_neurons] | None,
    "N, all neurons, at least D + 3; by default 3/2 D. Of those that are not motor neurons, 4 in 10 are command "
    "neurons",
]
Sparsity = Annotated[float, at_least(0), below(1), "share of the synapses between layers that are absent"]
WiringSeed = Annotated[options.Seed, between(0, 2**32 - 1), "seed of the wiring"]


class Wiring(NamedTuple):
    """Synapses from rows to columns: +1 excites, -1 inhibits, 0 is none. Neurons: motor, then command, then inter.

    sensory: from inputs to neurons (I, N).   synapses: between neurons (N, N).   motor, command, inter: their numbers.
    """

    sensory: ndarray
    synapses: ndarray
    motor: int
    command: int
    inter: int

    def layers(self) -> list[ndarray]:
        """Return the synapses into inter, command and motor neurons, each from the layer below alone."""
        command, inter = self.motor + self.command, self.motor + self.command + self.inter
        motor = slice(0, self.motor)
        return [
            self.sensory[:, command:inter],
            self.synapses[command:inter, self.motor : command],
            self.synapses[self.motor : command, motor],
        ]


def default_neurons(outputs: int) -> int:
    """Return the usual number of neurons for a number of outputs."""
    return outputs + max(3, outputs // 2)


def neural_circuit_policy(inputs: int, neurons: int, outputs: int, sparsity: float, seed: int) -> Wiring:
    """Draw a wiring: inputs feed inter neurons, these feed command neurons, which also feed each other, and the
    outputs."""
    random = RandomState(seed)
    command_count = max(int(0.4 * (neurons - outputs)), 1)
    inter_count = neurons - outputs - command_count
    few, dense = max(int(command_count * (1 - sparsity)), 1), 1 - sparsity
    command = np.arange(outputs, outputs + command_count)
    inter = np.arange(outputs + command_count, neurons)
    sensory, synapses = np.zeros((inputs, neurons)), np.zeros((neurons, neurons))
    _connect(sensory, np.arange(inputs), inter, max(int(inter_count * dense), 1), random)
    _connect(synapses, inter, command, few, random)
    for _ in range(max(int(command_count * dense * 2), 1)):
        source, target = random.choice(command), random.choice(command)
        synapses[source, target] = random.choice([-1, 1])
    _connect(synapses.T, np.arange(outputs), command, few, random)
    return Wiring(sensory, synapses, outputs, command_count, inter_count)


def _connect(matrix: ndarray, ends: ndarray, others: ndarray, count: int, random: RandomState) -> None:
    """Connect each end with `count` others, then each other that is left alone with as many ends as is usual."""
    reached = np.zeros(matrix.shape[1], dtype=bool)
    for end in ends:
        chosen = random.choice(others, size=count, replace=False)
        matrix[end, chosen] = random.choice([-1, 1], size=count)
        reached[chosen] = True
    usual = min(max(len(ends) * count // len(others), 1), len(ends))
    for other in others[~reached[others]]:
        chosen = random.choice(ends, size=usual, replace=False)
        matrix[chosen, other] = random.choice([-1, 1], size=usual)
