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
        dim: D, inputs and state.
        nonlinearity: "tanh" or "relu".
        bias: two biases, as PyTorch has them.
        recurrent_init: initial U: "uniform"; "identity" with biases 0 (the IRNN, meant for "relu"); or "orthogonal".

    Parameters as in `torch.nn.RNN`: weight_ih_l0, weight_hh_l0 (D, D), bias_ih_l0, bias_hh_l0 (D).
    Initialisation as there: U(±1/sqrt(D)).
    State: (B, D). The output is the state itself.
    """

    id = "S-elman"
    aliases = ("RNN", "vanilla_rnn")
    equation = "h_t = phi(W x_t + U h_{t-1} + b)"
    source = (
        'Elman, "Finding structure in time", Cognitive Science 14, 1990; identity start: Le, Jaitly and Hinton, '
        "arXiv:1504.00941"
    )
    op = "elman"
    cell, gates = elman, 1

    def __init__(
        self, dim: int, nonlinearity: str = "tanh", bias: bool = True, recurrent_init: str = "uniform"
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise nearest("nonlinearity of elman", nonlinearity, ["tanh", "relu"])
        if recurrent_init not in ("uniform", "identity", "orthogonal"):
            raise nearest("recurrent_init of elman", recurrent_init, ["uniform", "identity", "orthogonal"])
        super().__init__(dim, bias)
        self.nonlinearity = nonlinearity
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
        return y, h
