"""Gated linear network: a diagonal recurrence between two gated linear units, which can compute linear attention."""

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.errors import ShapeError
from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.ops import linear_scan


@registry.register("gatedattn")
class GatedAttention(Layer):
    """A diagonal linear recurrence whose input and output are multiplicative gates.

    With D² + D channels it can equal linear attention: D² channels never forget, and hold the products of keys and
    values. The output gate reads only the state, so D channels that keep nothing carry the query to it.

    Parameters: in_m, in_x (N, D) with biases, which stand for the paper's constant input 1; nu_log (N), with
    λ = exp(-exp(nu_log)); out_m, out_x (M, N) without biases; readout (D, M). There is no program of the authors.
    Initialisation: λ ~ U(0, 1); the projections as in PyTorch.
    """

    id = "S-gatedattn"
    aliases = ("gated_linear_rnn", "gated_linear")
    equation = (
        "h_t = lambda * h_{t-1} + (W_in_m x_t) * (W_in_x x_t),  y_t = D ((W_out_m h_t) * (W_out_x h_t)),  "
        "x_t with a 1 appended"
    )
    source = 'Zucchet, Kobayashi, Akram et al., "Gated recurrent neural networks discover attention", arXiv:2309.01775'
    op = "linear_scan"
    state: ClassVar = StateAxes("width")
    sample: ClassVar = {"width": 6, "hidden_dim": 5}
    residual_out = "readout"

    def __init__(
        self,
        dim: options.Dim,
        width: Annotated[options.Width | None, "N, channels of the recurrence; by default D"] = None,
        hidden_dim: Annotated[options.HiddenDim | None, "M, products of the output gate; by default D"] = None,
    ) -> None:
        super().__init__()
        self.dim, self.width, self.hidden_dim = dim, width or dim, hidden_dim or dim
        self.in_m, self.in_x = nn.Linear(dim, self.width), nn.Linear(dim, self.width)
        self.nu_log = nn.Parameter(torch.rand(self.width).clamp(1e-6, 1 - 1e-6).log().neg().log())
        self.out_m = nn.Linear(self.width, self.hidden_dim, bias=False)
        self.out_x = nn.Linear(self.width, self.hidden_dim, bias=False)
        self.readout = nn.Linear(self.hidden_dim, dim, bias=False)

    @torch.no_grad()
    def set_attention(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Make the layer y_t = Σ_{i<=t} v_i (k_i · q_t), with q = query x, k = key x and v = value x, each matrix (D,
        D).

        Raises ConfigError unless width is D² + D and hidden_dim is D², ShapeError for another shape.
        """
        d, n = self.dim, self.dim**2
        for name, size, needed in (("width", self.width, n + d), ("hidden_dim", self.hidden_dim, n)):
            if size != needed:
                self._refuse(name, size, f"{needed} because of dim={d}")
        for name, matrix in (("query", query), ("key", key), ("value", value)):
            if matrix.shape != (d, d):
                raise ShapeError(f"{self._who()}: {name} has shape {tuple(matrix.shape)}, expected ({d}, {d})")
        for parameter in self.parameters():
            parameter.zero_()
        self.in_m.weight.copy_(torch.cat([value.repeat_interleave(d, 0), query]))  # channel i D + j holds v_i k_j
        self.in_x.weight[:n] = key.repeat(d, 1)
        self.in_x.bias[n:] = 1
        self.nu_log[:n], self.nu_log[n:] = -200.0, 10.0  # λ is exactly 1 and 0
        self.out_m.weight[:, :n] = torch.eye(n)
        self.out_x.weight[:, n:] = torch.eye(d).repeat(d, 1)
        self.readout.weight.copy_(torch.eye(d).repeat_interleave(d, 1))

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        written = widen(self.in_m(x)) * widen(self.in_x(x))
        h, last = linear_scan(written, (-widen(self.nu_log).exp()).exp(), state, cu_seqlens=cu_seqlens)
        h = h.to(x.dtype)
        return self.readout(self.out_m(h) * self.out_x(h)), last
