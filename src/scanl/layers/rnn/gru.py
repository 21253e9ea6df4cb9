"""Gated recurrent unit."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from torch import Tensor
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers import options, registry
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.chrono import LongestMemory, init_memory
from scanl.layers.parts.limit_cycle import init_limit_cycles
from scanl.layers.rnn._base import TorchCell
from scanl.ops import gru


@registry.register("gru")
class GRU(TorchCell):
    """Gated recurrent unit with the reset gate after the recurrent product.

    Parameters as in `torch.nn.GRU`, gates in the order r, z, n: weight_ih_l0, weight_hh_l0 (3D, D), bias_ih_l0,
    bias_hh_l0 (3D).
    Initialisation as in that code: U(±1/sqrt(D)). As in PyTorch, the reset gate multiplies U h. In the paper it
    multiplies h itself. z is the weight of the old state, as in eq. (7).
    """

    id = "S-gru"
    aliases = ("gated_recurrent_unit",)
    equation = "n_t = tanh(W x_t + b + r_t * (U h_{t-1} + b')),  h_t = (1 - z_t) * n_t + z_t * h_{t-1}"
    source = (
        'Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder", arXiv:1406.1078, eq. (5) to (8); '
        "chrono start: Tallec and Ollivier, arXiv:1804.11188; limit cycles: Park, Ságodi and Sokół, arXiv:2308.12585"
    )
    op = "gru"
    cell, gates, kernel = gru, 3, "gru"
    state: ClassVar = StateAxes("width")

    def __init__(
        self,
        dim: options.Dim,
        bias: Annotated[options.Bias, "two biases, as PyTorch has them"] = True,
        t_max: Annotated[
            LongestMemory | None,
            "T_max, the longest memory in steps, for chrono initialisation: b_z = ln U(1, T_max - 1), of the opposite "
            "sign to the paper's, whose gate multiplies the new input; None for PyTorch's initial values",
        ] = None,
        init: Annotated[
            Literal["uniform", "limit_cycle"],
            'initial weights; "limit_cycle", for an even D: the gates are half open and pairs of units turn for ever',
        ] = "uniform",
    ) -> None:
        super().__init__(dim, bias, dim)
        if init == "limit_cycle":
            if t_max is not None:
                raise ConfigError(f'gru: t_max is {t_max}, expected None because init="limit_cycle" has biases of 0')
            biases = (self.bias_ih_l0, self.bias_hh_l0) if bias else ()
            init_limit_cycles("gru", self.weight_ih_l0, self.weight_hh_l0, biases, 3, gain=3.0)
        elif bias:
            init_memory((self.bias_ih_l0, self.bias_hh_l0), slice(dim, 2 * dim), None, None, t_max)

    @staticmethod
    def operands(x: Tensor, w: Tensor, u: Tensor, *biases: Tensor) -> Sequence[Tensor | None]:
        b, recurrent = biases or (None, None)
        x = F.linear(x, w, b).unflatten(-1, (3, -1))
        return x, u.unflatten(0, (3, -1)), None if recurrent is None else recurrent.unflatten(0, (3, -1))

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.result(*self._scan(x, state, cu_seqlens))
