r"""Elman network.

.. math:: h_t = \phi(W x_t + U h_{t-1} + b)
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import nearest
from scanl.layers.base import register
from scanl.layers.rnn._base import TorchCell
from scanl.layers.state import Device, DType
from scanl.ops import elman


@register("elman")
class Elman(TorchCell):
    """Elman network: h = φ(W x + U h + b), with φ tanh or ReLU.

    Args:
        dim: D, inputs and outputs.
        state_dim: E, width of the state. If given, the output is a linear readout of the state; else E = D, and the
            output is the state itself.
        nonlinearity: "tanh" or "relu".
        bias: two biases, as PyTorch has them.
        recurrent_init: initial U: "uniform"; "identity" with biases 0 (the IRNN, meant for "relu"); or "orthogonal".

    Parameters as in `torch.nn.RNN`: weight_ih_l0 (E, D), weight_hh_l0 (E, E), bias_ih_l0, bias_hh_l0 (E); and readout
    (D, E) with a bias.
    Initialisation as there: U(±1/sqrt(E)).
    State: (B, E).
    """

    id = "S-elman"
    aliases = ("RNN", "vanilla_rnn")
    equation = "h_t = phi(W x_t + U h_{t-1} + b),  y_t = h_t, or C h_t + c"
    source = (
        'Elman, "Finding structure in time", Cognitive Science 14, 1990; identity start: Le, Jaitly and Hinton, '
        "arXiv:1504.00941"
    )
    op = "elman"
    cell, gates = elman, 1

    def __init__(
        self,
        dim: int,
        nonlinearity: str = "tanh",
        bias: bool = True,
        recurrent_init: str = "uniform",
        state_dim: int | None = None,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise nearest("nonlinearity of elman", nonlinearity, ["tanh", "relu"])
        if recurrent_init not in ("uniform", "identity", "orthogonal"):
            raise nearest("recurrent_init of elman", recurrent_init, ["uniform", "identity", "orthogonal"])
        super().__init__(dim, bias, state_dim)
        self.nonlinearity = nonlinearity
        self.readout = None if state_dim is None else nn.Linear(state_dim, dim)
        if recurrent_init == "orthogonal":
            nn.init.orthogonal_(self.weight_hh_l0)
        elif recurrent_init == "identity":
            nn.init.eye_(self.weight_hh_l0)
            for vector in (self.bias_ih_l0, self.bias_hh_l0) if bias else ():
                nn.init.zeros_(vector)

    @staticmethod
    def operands(x: Tensor, w: Tensor, u: Tensor, *biases: Tensor) -> Sequence[Tensor | None]:
        return F.linear(x, w, biases[0] + biases[1] if biases else None), u

    def _options(self) -> Mapping[str, Any]:
        return {"nonlinearity": self.nonlinearity}

    def _kernel(self) -> str:
        return f"rnn_{self.nonlinearity}"

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        return self._initial(batch_size, device, dtype)

    def forward(
        self, x: Tensor, state: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        y, (h,) = self._scan(x, state, cu_seqlens)
        return y if self.readout is None else self.readout(y), h
