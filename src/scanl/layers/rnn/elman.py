"""Elman network."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers import options, registry
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.limit_cycle import init_limit_cycles
from scanl.layers.rnn._base import TorchCell
from scanl.ops import elman


@registry.register("elman")
class Elman(TorchCell):
    """Elman network: h = φ(W x + U h + b), with φ tanh or ReLU.

    Parameters as in `torch.nn.RNN`: weight_ih_l0 (E, D), weight_hh_l0 (E, E), bias_ih_l0, bias_hh_l0 (E); and readout
    (D, E) with a bias.
    Initialisation as in that code: U(±1/sqrt(E)).
    """

    id = "S-elman"
    aliases = (
        "RNN",
        "vanilla_rnn",
        "vanilla",
        "vanilla_recurrence",
        "recurrent_network",
        "SRN",
        "simple_recurrent_network",
    )
    equation = "h_t = phi(W x_t + U h_{t-1} + b),  y_t = h_t, or C h_t + c"
    source = (
        'Elman, "Finding structure in time", Cognitive Science 14, 1990; identity start: Le, Jaitly and Hinton, '
        "arXiv:1504.00941; limit cycles: Park, Ságodi and Sokół, arXiv:2308.12585"
    )
    op = "elman"
    cell, gates = elman, 1
    state: ClassVar = StateAxes("width")

    def __init__(
        self,
        dim: options.Dim,
        activation: Annotated[Literal["tanh", "relu"], "φ"] = "tanh",
        bias: Annotated[options.Bias, "two biases, as PyTorch has them"] = True,
        init: Annotated[
            Literal["uniform", "identity", "orthogonal", "limit_cycle"],
            'initial U; "identity", with biases 0, is the IRNN, which is meant for "relu"; "limit_cycle", for "tanh" '
            "and an even E: pairs of units turn for ever",
        ] = "uniform",
        width: Annotated[
            options.Width | None,
            "E, channels of the state, which a linear map then reads out; None for D, and the output is the state",
        ] = None,
    ) -> None:
        super().__init__(dim, bias, dim if width is None else width)
        self.activation, self.kernel = activation, f"rnn_{activation}"
        self.readout = None if width is None else nn.Linear(width, dim)
        if init == "orthogonal":
            nn.init.orthogonal_(self.weight_hh_l0)
        elif init == "limit_cycle":
            if activation != "tanh":
                raise ConfigError(
                    f'elman: init is "limit_cycle", expected another one because activation={activation!r}'
                )
            biases = (self.bias_ih_l0, self.bias_hh_l0) if bias else ()
            init_limit_cycles("elman", self.weight_ih_l0, self.weight_hh_l0, biases, 1, gain=1.5)
        elif init == "identity":
            nn.init.eye_(self.weight_hh_l0)
            for vector in (self.bias_ih_l0, self.bias_hh_l0) if bias else ():
                nn.init.zeros_(vector)

    @staticmethod
    def operands(x: Tensor, w: Tensor, u: Tensor, *biases: Tensor) -> Sequence[Tensor | None]:
        return F.linear(x, w, biases[0] + biases[1] if biases else None), u

    def _options(self) -> Mapping[str, Any]:
        return {"nonlinearity": self.activation}

    def result(self, y: Tensor, after: list[Tensor]) -> tuple[Tensor, Tensor]:
        return y if self.readout is None else self.readout(y), after[0]

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.result(*self._scan(x, state, cu_seqlens))
