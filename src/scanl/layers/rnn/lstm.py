"""Long short-term memory."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.chrono import ForgetBias, LongestMemory, init_memory
from scanl.layers.rnn._base import TorchCell
from scanl.ops import lstm


class LSTMState(NamedTuple):
    h: Annotated[Tensor, StateAxes("dim", "the output")]
    c: Annotated[Tensor, StateAxes("dim", "the memory")]


@registry.register("lstm")
class LSTM(TorchCell):
    """Long short-term memory, with a forget gate and without peepholes.

    Parameters as in `torch.nn.LSTM`, gates in the order i, f, g, o: weight_ih_l0, weight_hh_l0 (4D, D), bias_ih_l0,
    bias_hh_l0 (4D).
    Initialisation as in that code: U(±1/sqrt(D)).
    """

    id = "S-lstm"
    aliases = ("long_short_term_memory",)
    equation = "c_t = f_t * c_{t-1} + i_t * tanh(g_t),  h_t = o_t * tanh(c_t)"
    source = (
        'Hochreiter and Schmidhuber, "Long short-term memory", Neural Computation 9, 1997; forget gate: Gers, '
        "Schmidhuber and Cummins, 2000; chrono start: Tallec and Ollivier, arXiv:1804.11188"
    )
    cell, gates, kernel = lstm, 4, "lstm"
    state: ClassVar = LSTMState

    def __init__(
        self,
        dim: options.Dim,
        bias: Annotated[options.Bias, "two biases, as PyTorch has them"] = True,
        forget_bias: ForgetBias | None = None,
        t_max: LongestMemory | None = None,
    ) -> None:
        super().__init__(dim, bias, dim)
        if bias:
            biases = self.bias_ih_l0, self.bias_hh_l0
            init_memory(biases, slice(dim, 2 * dim), slice(0, dim), forget_bias, t_max)

    @staticmethod
    def operands(x: Tensor, w: Tensor, u: Tensor, *biases: Tensor) -> Sequence[Tensor | None]:
        x = F.linear(x, w, biases[0] + biases[1] if biases else None)
        return x.unflatten(-1, (4, -1)), u.unflatten(0, (4, -1))

    def _runs_cell(self, x: Tensor, cu_seqlens: Tensor | None) -> bool:
        return cu_seqlens is not None and cu_seqlens.shape[0] > 2 and super()._runs_cell(x, cu_seqlens)

    def result(self, y: Tensor, after: list[Tensor]) -> tuple[Tensor, LSTMState]:
        return y, LSTMState(*after)

    def run(self, x: Tensor, state: LSTMState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, LSTMState]:
        return self.result(*self._scan(x, state, cu_seqlens))
