"""S7 with all of its system depending on the input, as its paper writes it."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.ssm.s7 import S7
from scanl.ops import linear_scan


@registry.register("s7_full")
class S7Full(Layer):
    """S7 of the paper's text: decay, input and output matrices, skip and bias are functions of the input.

    The decay is stable for any A_t: it is in [-1, 1). `s7` is the form of the authors' program, in which only Δ_t
    depends on the input. This form is not discretized, so it takes no `timespans`. The matrices of all steps are in
    memory, 2 B T D N numbers.

    Parameters: base (N), a; x_proj (2 N + 2 D N + D, D), without bias, to A_t - a, B_t (D, N), C_t (D, N), D_t and b_t
    in this order; gate_proj (D, D), without bias. All names except `base` are those of the lrnnx package. Its first map
    of the input, and its sum with the input, are left out.
    Initialisation as in that code: a = -1/2, the real part of HiPPO's eigenvalues; x_proj N(0, 0.02²); gate_proj as in
    PyTorch.
    """

    id = "S-s7"
    equation = (
        "s_t = (1 - 1/(A_t^2 + 1/2)) * s_{t-1} + B_t x_t + b_t,  z_t = C_t s_t + D_t * x_t,  "
        "y_t = z_t * sigmoid(W GELU(z_t)),  [A_t - a; B_t; C_t; D_t; b_t] = W_x x_t"
    )
    source = S7.source
    op = "linear_scan"
    state: ClassVar = StateAxes("state_dim")
    sample: ClassVar = {"state_dim": 3}
    excused: ClassVar = {
        "default_sizes_are_in_proportion": "each of the 2 N D numbers of B and C is a map of the input"
    }

    def __init__(self, dim: options.Dim, state_dim: options.StateDim = 16) -> None:
        super().__init__()
        self.dim, self.state_dim = dim, state_dim
        self.base = nn.Parameter(torch.full((state_dim,), -0.5))
        self.x_proj = nn.Linear(dim, 2 * state_dim + 2 * dim * state_dim + dim, bias=False)
        self.gate_proj = nn.Linear(dim, dim, bias=False)
        nn.init.normal_(self.x_proj.weight, std=0.02)

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        N, matrix = self.state_dim, (self.dim, self.state_dim)
        sizes = [N, self.dim * N, self.dim * N, self.dim, N]
        A, B, C, D, bias = widen(self.x_proj(x)).split(sizes, -1)
        u = widen(x)
        decay = 1 - 1 / ((A + widen(self.base)).square() + 0.5)
        written = torch.einsum("btdn,btd->btn", B.unflatten(-1, matrix), u) + bias
        s, last = linear_scan(written, decay, state, cu_seqlens=cu_seqlens)
        z = (torch.einsum("btdn,btn->btd", C.unflatten(-1, matrix), s) + D * u).to(x.dtype)
        return z * self.gate_proj(F.gelu(z)).sigmoid(), last
