r"""Gated recurrent unit.

.. math:: n_t = \tanh(W x_t + b + r_t \odot (U h_{t-1} + b')), \; h_t = (1 - z_t) \odot n_t + z_t \odot h_{t-1}
"""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from scanl.layers.base import register
from scanl.layers.parts.chrono import check_memory, init_memory
from scanl.layers.rnn._base import TorchCell
from scanl.layers.state import Device, DType
from scanl.ops import gru


@register("gru")
class GRU(TorchCell):
    """Gated recurrent unit with the reset gate after the recurrent product.

    Args:
        dim: D, inputs and state.
        bias: two biases, as PyTorch has them.
        t_max: use chrono initialisation for memories of up to T_max steps: b_z = ln U(1, T_max - 1). In the paper the
            gate multiplies the new input, so b_z has the opposite sign.

    Parameters as in `torch.nn.GRU`, gates in the order r, z, n: weight_ih_l0, weight_hh_l0 (3D, D), bias_ih_l0,
    bias_hh_l0 (3D).
    Initialisation as there: U(±1/sqrt(D)).
    State: (B, D).
    As in PyTorch, the reset gate multiplies U h. In the paper it multiplies h itself. z is the weight of the old state,
    as in eq. (7).
    """

    id = "S-gru"
    equation = "n_t = tanh(W x_t + b + r_t * (U h_{t-1} + b')),  h_t = (1 - z_t) * n_t + z_t * h_{t-1}"
    source = (
        'Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder", arXiv:1406.1078, eq. (5) to (8); '
        "chrono start: Tallec and Ollivier, arXiv:1804.11188"
    )
    op = "gru"
    cell, gates = gru, 3

    def __init__(self, dim: int, bias: bool = True, t_max: int | None = None) -> None:
        check_memory("gru", bias, None, t_max)
        super().__init__(dim, bias)
        if bias:
            init_memory((self.bias_ih_l0, self.bias_hh_l0), slice(dim, 2 * dim), None, None, t_max)

    @staticmethod
    def operands(x: Tensor, w: Tensor, u: Tensor, *biases: Tensor) -> Sequence[Tensor | None]:
        b, recurrent = biases or (None, None)
        x = F.linear(x, w, b).unflatten(-1, (3, -1))
        return x, u.unflatten(0, (3, -1)), None if recurrent is None else recurrent.unflatten(0, (3, -1))

    def _kernel(self) -> str:
        return "gru"

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        return self._initial(batch_size, device, dtype)

    def forward(
        self, x: Tensor, state: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        y, (h,) = self._scan(x, state, cu_seqlens)
        return y, h
