"""Linear time-invariant recurrence, with a diagonal transition."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import UNDECAYED_HINT, Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.ops import linear_scan
from scanl.options import above, below


@registry.register("linrnn_lti")
class LinRNNLTI(Layer):
    """Linear RNN: a plain linear system. A dense one with A = P Λ P⁻¹ is the same with B̄ = P⁻¹ B and C̄ = C P.

    It is also the convolution with the kernel K_j = Re(C̄ Λ^j B̄), plus D at j = 0. Λ is trained directly, so nothing
    keeps it inside the unit circle. The parametrization of `lru` does.

    Parameters: lambda_re, lambda_im (E), without weight decay; B_re, B_im (E, D); C_re, C_im (D, E); D (D).
    Initialisation: B N(0, 1/(2D)) in each part, C N(0, 1/E), D N(0, 1), as in `lru`.
    """

    id = "S-linrnn-lti"
    equation = "s_t = Lambda * s_{t-1} + B x_t,  y_t = Re(C s_t) + D * x_t"
    source = (
        'Kailath, "Linear Systems", 1980; diagonal form: Gupta, Gu and Berant, "Diagonal State Spaces are as Effective '
        'as Structured State Spaces", arXiv:2203.14343, sec. 2'
    )
    op = "linear_scan"
    state: ClassVar = StateAxes("state_dim", dtype=torch.complex64)
    sample: ClassVar = {"state_dim": 6}
    hints: ClassVar = {"lambda_re": UNDECAYED_HINT, "lambda_im": UNDECAYED_HINT}

    def __init__(
        self,
        dim: options.Dim,
        state_dim: Annotated[options.StateDim | None, "E, complex numbers in the state; by default D"] = None,
        r_max: Annotated[float, above(0), below(1), "Λ starts uniform over the disc of this radius"] = 0.99,
    ) -> None:
        super().__init__()
        size = dim if state_dim is None else state_dim
        self.dim, self.state_dim = dim, size
        radius, phase = r_max * torch.rand(size).sqrt(), 2 * math.pi * torch.rand(size)
        self.lambda_re, self.lambda_im = nn.Parameter(radius * phase.cos()), nn.Parameter(radius * phase.sin())
        self.B_re, self.B_im = (nn.Parameter(torch.randn(size, dim) / math.sqrt(2 * dim)) for _ in range(2))
        self.C_re, self.C_im = (nn.Parameter(torch.randn(dim, size) / math.sqrt(size)) for _ in range(2))
        self.D = nn.Parameter(torch.randn(dim))

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        # Real and imaginary parts are adjacent, so one real matrix product makes complex numbers and one reads them.
        into = torch.stack([self.B_re, self.B_im], 1).flatten(0, 1)
        out_of = torch.stack([self.C_re, -self.C_im], 2).flatten(1)
        u = torch.view_as_complex(widen(x @ into.t()).unflatten(-1, (-1, 2)))
        eigenvalues = torch.complex(widen(self.lambda_re), widen(self.lambda_im))
        s, last = linear_scan(u, eigenvalues, state, cu_seqlens=cu_seqlens)
        y = torch.view_as_real(s).flatten(-2).to(x.dtype) @ out_of.t()
        return torch.addcmul(y, x, self.D), last
