r"""Gated impulse linear recurrence.

.. math:: s_t = g_t \odot s_{t-1} + (1 - g_t) \odot \tau(V x_t + b_z), \quad g_t = \sigma(U x_t + b_g)
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError, nearest
from scanl.layers.base import Layer, register, widen
from scanl.layers.state import Device, DType
from scanl.ops import linear_scan

IMPULSES = {"elu": F.elu, "tanh": torch.tanh, "identity": lambda raw: raw}


@register("gilr")
class GILR(Layer):
    """GILR: a running average of impulses, with gates that depend on the input alone.

    Args:
        dim: D, inputs and state.
        nonlinearity: τ, "elu", "tanh" or "identity".

    Parameters as the matrix of the authors' program, here with rows for outputs: linear (2D, D) with a bias, gate
    before impulse.
    Initialisation as there: linear.weight U(±0.05), bias 0.
    State: (B, D). The output is the state itself.
    """

    id = "S-gilr"
    equation = "s_t = g_t * s_{t-1} + (1 - g_t) * tau(V x_t + b_z),  g_t = sigmoid(U x_t + b_g)"
    source = (
        'Martin and Cundy, "Parallelizing Linear Recurrent Neural Nets Over Sequence Length", '
        "arXiv:1709.04057, sec. 3.1"
    )
    op = "linear_scan"

    def __init__(self, dim: int, nonlinearity: str = "elu") -> None:
        super().__init__()
        if dim < 1:
            raise ConfigError(f"gilr: dim is {dim}, expected at least 1")
        if nonlinearity not in IMPULSES:
            raise nearest("nonlinearity of gilr", nonlinearity, IMPULSES)
        self.dim, self.nonlinearity = dim, nonlinearity
        self.linear = nn.Linear(dim, 2 * dim)
        nn.init.uniform_(self.linear.weight, -0.05, 0.05)
        nn.init.zeros_(self.linear.bias)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        return self._zeros(batch_size, self.dim, device=device, dtype=dtype, at_least=torch.float32)

    def forward(
        self, x: Tensor, state: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self._check(x, state, cu_seqlens)
        gate, impulse = widen(self.linear(x)).chunk(2, -1)
        written = (-gate).sigmoid() * IMPULSES[self.nonlinearity](impulse)
        s, last = linear_scan(written, gate.sigmoid(), state, cu_seqlens=cu_seqlens)
        return s.to(x.dtype), last
