"""A recurrent network over a window that moves along the sequence."""

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.packing import sequence_index
from scanl.layers.parts.window import Inputs
from scanl.layers.rnn.elman import Elman
from scanl.layers.rnn.gru import GRU
from scanl.layers.rnn.lstm import LSTM
from scanl.ops.offsets import sequences

NETWORKS = {"gru": GRU, "lstm": LSTM, "elman": Elman}


@registry.register("local_rnn")
class LocalRNN(Layer):
    """LocalRNN of R-Transformer: the last output of a recurrent network that reads the last M steps, from a zero state.

    Steps before the first are zeros, and the network reads them too, as in the authors' program. A step is projected
    once; the recurrent product is taken M times a step, so with M = 7 a GRU has 3 times the operations of an LSTM.

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
        steps, past = x.shape[1], self.past
        before = self._begin(x, state, cu_seqlens)
        if isinstance(before, tuple):
            before = x.new_zeros(sequences(x, cu_seqlens), 0, self.dim)
        wide = widen(x)
        before = before.to(wide.dtype)
        if cu_seqlens is None:
            rows = torch.cat([before, wide], 1)
            last = rows[:, steps:].clone()
            begins = rows.shape[1] * torch.arange(len(rows), device=x.device)[:, None]
            begins, rows = begins + torch.arange(steps, device=x.device), rows.flatten(0, 1)
        else:  # each sequence behind its last inputs
            owner, behind = sequence_index(cu_seqlens, steps), torch.arange(past, device=x.device)
            sequence = past * torch.arange(len(before), device=x.device)
            begins = torch.arange(steps, device=x.device) + past * owner
            places = torch.cat([((cu_seqlens[:-1] + sequence)[:, None] + behind).flatten(), begins + past])
            rows = wide.new_zeros(len(places), self.dim)
            rows = rows.index_copy(0, places, torch.cat([before.flatten(0, 1), wide[0]]))
            last = rows[(cu_seqlens[1:] + sequence)[:, None] + behind]
        # Windows over the end of a row into the next one are computed too, and not read.
        y = self.rnn.over_windows(rows, past + 1)[begins.flatten()].view_as(x).to(x.dtype) if x.numel() else x
        return y, last if past else ()
