r"""Independently recurrent neural network.

.. math:: s_t = \phi(a \odot s_{t-1} + B x_t + b)
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.layers.base import UNDECAYED, register, widen
from scanl.layers.parts.cell_layer import SolvedLayer
from scanl.layers.state import Device, DType
from scanl.ops import indrnn
from scanl.ops.indrnn import check_activation


@register("indrnn")
class IndRNN(SolvedLayer):
    """IndRNN: each channel feeds back only to itself; channels mix in the projection of the next layer.

    Differs: the authors' program clamps the parameter a before each step of training. Here a is clamped where it is
    used. The gradient ignores the clamp, so a clamped channel can come back. Batch norm and dropout between layers are
    left to the model.

    Args:
        dim: D, inputs and state.
        activation: φ, "relu", "tanh" or "identity".
        seq_len: n, steps of a training sequence. With it |a| is at most γ^(1/n), so over n steps the state grows at
            most γ-fold; None for no bound.
        gamma: γ; the authors use 5 for pixels, 2 for characters.
        long_memory: a starts in U(γ^(-1/n), γ^(1/n)), for the last layer of a model that reads only the last step.

    Parameters as in the authors' program: fc (D, D) with a bias; weight_hh (D), which is a, without weight decay.
    Initialisation as there: a U(0, γ^(1/n)), or U(0, 1) without seq_len; fc.weight U(±sqrt(6 / (65 D))), fc.bias 0.
    State: (B, D). The output is the state itself.
    """

    id = "S-indrnn"
    aliases = ("independently_recurrent",)
    equation = "s_t = phi(a * s_{t-1} + B x_t + b),  |a| <= gamma^(1/n)"
    source = (
        'Li, Li, Cook, Zhu and Gao, "Independently Recurrent Neural Network (IndRNN): Building A Longer and Deeper '
        'RNN", arXiv:1803.04831, eq. (2)'
    )
    op = "indrnn"
    hints: ClassVar = {"weight_hh": UNDECAYED}

    def __init__(
        self,
        dim: int,
        activation: str = "relu",
        seq_len: int | None = None,
        gamma: float = 2.0,
        long_memory: bool = False,
    ) -> None:
        super().__init__()
        if dim < 1:
            raise ConfigError(f"indrnn: dim is {dim}, expected at least 1")
        check_activation(activation)
        if seq_len is not None and seq_len < 1:
            raise ConfigError(f"indrnn: seq_len is {seq_len}, expected at least 1")
        if gamma < 1:
            raise ConfigError(f"indrnn: gamma is {gamma}, expected at least 1")
        if long_memory and seq_len is None:
            raise ConfigError("indrnn: seq_len is None, expected a number of steps because of long_memory")
        self.dim, self.activation = dim, activation
        self.bound = None if seq_len is None else gamma ** (1 / seq_len)
        self.fc = nn.Linear(dim, dim)
        nn.init.kaiming_uniform_(self.fc.weight, a=8)
        nn.init.zeros_(self.fc.bias)
        high = 1.0 if self.bound is None else self.bound
        self.weight_hh = nn.Parameter(torch.empty(dim).uniform_(1 / high if long_memory else 0, high))

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        return self._zeros(batch_size, self.dim, device=device, dtype=dtype, at_least=torch.float32)

    def forward(
        self, x: Tensor, state: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self._check(x, state, cu_seqlens)
        a = self.weight_hh
        if self.bound is not None:
            a = a + (a.clamp(-self.bound, self.bound) - a).detach()
        y, last = self.run_cell(indrnn, widen(self.fc(x)), a, state, activation=self.activation, cu_seqlens=cu_seqlens)
        return y.to(x.dtype), last
