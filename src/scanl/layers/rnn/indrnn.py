"""Independently recurrent neural network."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import UNDECAYED_HINT, widen
from scanl.layers.channelwise import ChannelwiseLayer, driven
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_layer import SolvedLayer
from scanl.ops import indrnn
from scanl.ops.indrnn import ACTIVATIONS
from scanl.options import at_least, one_of


@registry.register("indrnn")
class IndRNN(ChannelwiseLayer, SolvedLayer):
    """IndRNN: each channel feeds back only to itself; channels mix in the projection of the next layer.

    Differs: the authors' program clamps the parameter a before each step of training. Here a is clamped where it is
    used. The gradient ignores the clamp, so a clamped channel can come back. Batch norm and dropout between layers are
    left to the model.

    Parameters as in the authors' program: fc (D, D) with a bias; weight_hh (D), which is a, without weight decay.
    Initialisation as in that code: a U(0, γ^(1/n)), or U(0, 1) without max_length; fc.weight U(±sqrt(6 / (65 D))),
    fc.bias 0.
    """

    id = "S-indrnn"
    aliases = ("independently_recurrent", "independently_recurrent_neural_network")
    equation = "s_t = phi(a * s_{t-1} + B x_t + b),  |a| <= gamma^(1/n)"
    source = (
        'Li, Li, Cook, Zhu and Gao, "Independently Recurrent Neural Network (IndRNN): Building A Longer and Deeper '
        'RNN", arXiv:1803.04831, eq. (2)'
    )
    op = "indrnn"
    state: ClassVar = StateAxes("dim")
    hints: ClassVar = {"weight_hh": UNDECAYED_HINT}

    def __init__(
        self,
        dim: options.Dim,
        activation: Annotated[str, one_of(ACTIVATIONS), "φ"] = "relu",
        max_length: Annotated[
            int | None,
            at_least(1),
            "n, steps of a training sequence. |a| is at most γ^(1/n), so over n steps the state grows at most γ-fold; "
            "None for no bound",
        ] = None,
        gamma: Annotated[float, at_least(1), "γ; the authors use 5 for pixels, 2 for characters"] = 2.0,
        init: Annotated[
            Literal["uniform", "long"],
            'a starts in U(0, γ^(1/n)), or, for "long", in U(γ^(-1/n), γ^(1/n)): for the last layer of a model that '
            "reads only the last step",
        ] = "uniform",
    ) -> None:
        super().__init__()
        if init == "long" and max_length is None:
            self._refuse("max_length", max_length, f"a number of steps because of init={init!r}")
        self.dim, self.activation = dim, activation
        self.bound = None if max_length is None else gamma ** (1 / max_length)
        self.fc = nn.Linear(dim, dim)
        nn.init.kaiming_uniform_(self.fc.weight, a=8)
        nn.init.zeros_(self.fc.bias)
        high = 1.0 if self.bound is None else self.bound
        self.weight_hh = nn.Parameter(torch.empty(dim).uniform_(1 / high if init == "long" else 0, high))

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        a = self.weight_hh
        if self.bound is not None:
            a = a + (a.clamp(-self.bound, self.bound) - a).detach()
        _, drive = driven(self.fc, x, lambda rows: rows)
        y, (last,) = self.advance([drive], [a], [state], cu_seqlens)
        return y.to(x.dtype), last

    def recur(
        self, p: Sequence[Tensor], v: Sequence[Tensor], states: Sequence[Tensor | None], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        y, last = self.run_cell(indrnn, widen(p[0]), v[0], states[0], activation=self.activation, cu_seqlens=cu_seqlens)
        return y, [last]
