"""Gated impulse linear recurrence."""

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.ops import linear_scan
from scanl.ops._frame.context import late
from scanl.options import one_of

IMPULSES = {"elu": late(F, "elu"), "tanh": late(torch, "tanh"), "identity": lambda raw: raw}


@registry.register("gilr")
class GILR(Layer):
    """GILR: a running average of impulses, with gates that depend on the input alone.

    Parameters as the matrix of the authors' program, here with rows for outputs: linear (2D, D) with a bias, gate
    before impulse.
    Initialisation as in that code: linear.weight U(±0.05), bias 0.
    """

    id = "S-gilr"
    aliases = ("gated_impulse_linear_recurrence",)
    equation = "s_t = g_t * s_{t-1} + (1 - g_t) * tau(V x_t + b_z),  g_t = sigmoid(U x_t + b_g)"
    source = (
        'Martin and Cundy, "Parallelizing Linear Recurrent Neural Nets Over Sequence Length", '
        "arXiv:1709.04057, sec. 3.1"
    )
    op = "linear_scan"
    state: ClassVar = StateAxes("dim")

    def __init__(
        self, dim: options.Dim, activation: Annotated[str, one_of(IMPULSES), "τ, applied to the impulses"] = "elu"
    ) -> None:
        super().__init__()
        self.dim, self.activation = dim, activation
        self.linear = nn.Linear(dim, 2 * dim)
        nn.init.uniform_(self.linear.weight, -0.05, 0.05)
        nn.init.zeros_(self.linear.bias)

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        gate, impulse = widen(self.linear(x)).chunk(2, -1)
        written = (-gate).sigmoid() * IMPULSES[self.activation](impulse)
        s, last = linear_scan(written, gate.sigmoid(), state, cu_seqlens=cu_seqlens)
        return s.to(x.dtype), last
