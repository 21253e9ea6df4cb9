"""A recurrent network over a window that moves along the sequence."""

from typing import Annotated, ClassVar, Literal

from torch import Tensor

from scanl.layers import options, registry
from scanl.layers.base import Layer
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.window import Inputs, windows
from scanl.layers.rnn.elman import Elman
from scanl.layers.rnn.gru import GRU
from scanl.layers.rnn.lstm import LSTM

NETWORKS = {"gru": GRU, "lstm": LSTM, "elman": Elman}


@registry.register("local_rnn")
class LocalRNN(Layer):
    """LocalRNN of R-Transformer: the last output of a recurrent network that reads the last M steps, from a zero state.

    Steps before the first are zeros, and the network reads them too, as in the authors' program.

    Parameters: rnn, as in the layer `gru`, `lstm` or `elman`.
    Initialisation as in that layer.
    """

    id = "S-rtransformer"
    cost = ("T W", "W")
    equation = "y_t = RNN(x_{t-M+1}, ..., x_t), its last output"
    source = (
        'Wang, Ma, Liu and Tang, "R-Transformer: Recurrent Neural Network Enhanced Transformer", arXiv:1907.05572, '
        "sec. 2.1"
    )
    state: ClassVar = StateAxes("past, dim", "the last inputs", when="past")
    sample: ClassVar = {"window": 3}

    def __init__(
        self,
        dim: options.Dim,
        window: Annotated[options.Window, "M, steps that the network reads"] = 7,
        variant: Annotated[Literal["gru", "lstm", "elman"], "the recurrent network"] = "gru",
    ) -> None:
        super().__init__()
        self.dim, self.past = dim, window - 1
        self.rnn = NETWORKS[variant](dim)

    def run(self, x: Tensor, state: Inputs | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Inputs]:
        newest_first, inputs = windows(x, self.past + 1, state, cu_seqlens=cu_seqlens)
        rows = newest_first.unflatten(-1, (-1, self.dim)).flip(2)
        outputs, _ = self.rnn(rows.flatten(0, 1))
        return outputs[:, -1].view_as(x), inputs
