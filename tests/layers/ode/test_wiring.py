"""Neural circuit policies: the counts of synapses that ncps gives."""

import numpy as np
import pytest

from scanl.layers.ode._wiring import neural_circuit_policy

pytestmark = pytest.mark.cells_by_loop


WIRINGS = {  # (inputs, units, outputs, sparsity, seed)
    (4, 10, 3, 0.5, 22222): [10, 4, 228, 8, -2, -16],
    (20, 28, 8, 0.5, 22222): [88, -12, -3372, 120, 6, 2735],
    (8, 50, 8, 0.9, 3): [47, 3, 5048, 29, -3, -586],
}


def test_a_wiring_is_that_of_ncps():
    """Numbers of synapses, sums of their signs, and sums weighted by the place, of ncps 1.0.1 for the same seeds."""
    for arguments, expected in WIRINGS.items():
        wiring = neural_circuit_policy(*arguments)
        found = []
        for matrix in (wiring.synapses, wiring.sensory):
            place = np.arange(matrix.size).reshape(matrix.shape)
            found += [abs(matrix).sum(), matrix.sum(), (matrix * place).sum()]
        assert found == expected
        inter, command, motor = wiring.layers()
        assert abs(inter).sum() == found[3]
        recurrent = wiring.synapses[wiring.motor : wiring.motor + wiring.command]
        recurrent = recurrent[:, wiring.motor : wiring.motor + wiring.command]
        assert abs(command).sum() + abs(motor).sum() + abs(recurrent).sum() == found[0]
