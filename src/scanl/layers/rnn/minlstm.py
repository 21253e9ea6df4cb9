"""Minimal long short-term memory."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from scanl.layers import registry
from scanl.layers.rnn._minimal import MinimalLayer


@registry.register("minlstm")
class MinLSTM(MinimalLayer):
    """minLSTM: an LSTM whose gates do not depend on the state and sum to 1, so a scan computes it.

    The quotients are sigmoids of the difference of the logarithms of both gates, as in the paper's program in log
    space: they stay accurate where both gates are near 0. The paper scans logarithms too, for which g has to be
    positive. The plain scan here gives the same numbers.

    Parameters as in the program minGRU-pytorch: to_hidden_and_f_i_gate (3E, D), hidden first, then f and i; to_out
    (D, E).
    Initialisation: as in PyTorch.
    """

    id = "S-minlstm"
    aliases = ("minimal_lstm",)
    equation = (
        "h_t = f'_t * h_{t-1} + i'_t * g(W_h x_t),  f'_t = f_t / (f_t + i_t),  i'_t = i_t / (f_t + i_t),  "
        "f_t = sigmoid(W_f x_t),  i_t = sigmoid(W_i x_t),  g(v) = v + 1/2 if v >= 0 else sigmoid(v)"
    )
    source = 'Feng et al., "Were RNNs All We Needed?", arXiv:2410.01201, sec. 3.2 and appendix B'
    projection = "to_hidden_and_f_i_gate"
    num_gates = 2

    def weights(self, gates: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        forget, write = gates
        ratio = F.logsigmoid(forget) - F.logsigmoid(write)  # log f / i
        return ratio.sigmoid(), (-ratio).sigmoid()
