"""Minimal gated recurrent unit."""

from collections.abc import Sequence

from torch import Tensor

from scanl.layers import registry
from scanl.layers.rnn._minimal import MinimalLayer


@registry.register("mingru")
class MinGRU(MinimalLayer):
    """minGRU: a gated recurrence whose gates do not depend on the state, so a scan computes it.

    The authors' program scans logarithms, for which g has to be positive. The plain scan here gives the same numbers.

    Parameters as in the authors' program: to_hidden_and_gate (2E, D), hidden first; to_out (D, E).
    Initialisation: as in PyTorch, also in the authors' program.
    """

    id = "S-mingru"
    aliases = ("minimal_gru",)
    equation = (
        "h_t = (1 - z_t) * h_{t-1} + z_t * g(W_h x_t),  z_t = sigmoid(W_z x_t),  "
        "g(v) = v + 1/2 if v >= 0 else sigmoid(v)"
    )
    source = 'Feng et al., "Were RNNs All We Needed?", arXiv:2410.01201, sec. 3.1 and appendix B'
    projection = "to_hidden_and_gate"
    num_gates = 1

    def weights(self, gates: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        (gate,) = gates
        return (-gate).sigmoid(), gate.sigmoid()
