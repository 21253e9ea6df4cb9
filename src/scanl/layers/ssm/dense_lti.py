"""Linear time-invariant recurrence with a dense transition."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.layers import options, registry
from scanl.layers.base import UNDECAYED_HINT, Layer, as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_cases import cases
from scanl.layers.ssm.linrnn_lti import LinRNNLTI
from scanl.ops.cell import cell
from scanl.options import above, below

SOURCE = 'Kailath, "Linear Systems", 1980, sec. 2.3'


@cell("x: B T E, a: E E, state: B E -> B T E", equation="s_t = A s_{t-1} + x_t", source=SOURCE)
def dense_lti_cell(x: Tensor, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Scan s_t = A s_{t-1} + x_t.   x: (B, T, E).   a: A (E, E), (outputs, inputs).   state: s_0 (B, E).

    Returns s of every step in x's dtype, and the last one, in float32 or wider. Half precision is computed in float32.
    Raises ShapeError for a wrong shape, dtype or device.

    >>> a = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> dense_lti_cell(torch.tensor([[[1.0, 2.0], [0.0, 0.0]]]), a)[0].tolist()
    [[[1.0, 2.0], [2.0, 1.0]]]
    """
    s = x + state @ a.T
    return s, s


cases(
    dense_lti_cell,
    "E=3",
    "a has shape (3, 4), expected (E, E) with E=3 from x",
    "state has shape (2, 4), expected (B, E)",
    "a is missing, expected a tensor (E, E)",
    a=lambda a: a / 2,
)


@registry.register("dense_lti")
class DenseLTI(Layer):
    """Linear time-invariant system with a dense transition: the plain linear RNN of the textbooks.

    It is also the convolution with the kernel K_j = C A^j B, plus D at j = 0 (`kernel`). If A has E independent
    eigenvectors, A = P Λ P⁻¹, it is the diagonal system `linrnn_lti` with B̄ = P⁻¹ B and C̄ = C P (`diagonal`). Nothing
    keeps the eigenvalues of A inside the unit circle.

    Parameters: A (E, E), without weight decay; B (E, D); C (D, E); D (D).
    Initialisation: A is `r_max` times a random orthogonal matrix, B N(0, 1/D), C N(0, 1/E), D N(0, 1).
    """

    id = "S-linrnn-lti"
    aliases = ("dense_ssm", "LTI", "LTI_system", "SSM", "linear_state_space_model")
    equation = "s_t = A s_{t-1} + B x_t,  y_t = C s_t + D * x_t"
    source = SOURCE
    op = "dense_lti_cell"
    state: ClassVar = StateAxes("state_dim")
    sample: ClassVar = {"state_dim": 6}
    hints: ClassVar = {"A": UNDECAYED_HINT}

    def __init__(
        self,
        dim: options.Dim,
        state_dim: Annotated[options.StateDim | None, "E, numbers in the state; by default D"] = None,
        r_max: Annotated[float, above(0), below(1), "modulus of all eigenvalues of A at the start"] = 0.99,
    ) -> None:
        super().__init__()
        size = dim if state_dim is None else state_dim
        self.dim, self.state_dim = dim, size
        self.A = nn.Parameter(r_max * nn.init.orthogonal_(torch.empty(size, size)))
        self.B = nn.Parameter(torch.randn(size, dim) / math.sqrt(dim))
        self.C = nn.Parameter(torch.randn(dim, size) / math.sqrt(size))
        self.D = nn.Parameter(torch.randn(dim))

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        u = widen(x @ self.B.t())
        with as_widened(x):
            s, last = dense_lti_cell(u, widen(self.A), state, cu_seqlens=cu_seqlens)
        return torch.addcmul(s.to(x.dtype) @ self.C.t(), x, self.D), last

    def kernel(self, length: int) -> Tensor:
        """Return K (length, D, D), (outputs, inputs): y_t = Σ_j K_j x_{t-j} from the state 0, for T <= length."""
        if length < 1:
            raise ConfigError(f"{self._who()}: length is {length}, expected at least 1")
        powers = [widen(self.B)]
        for _ in range(length - 1):
            powers.append(widen(self.A) @ powers[-1])
        kernel = widen(self.C) @ torch.stack(powers)
        return torch.cat([kernel[:1] + widen(self.D).diag(), kernel[1:]])

    @torch.no_grad()
    def diagonal(self) -> LinRNNLTI:
        """Return the same system in the coordinates of A's eigenvectors, computed in float64.

        Raises ConfigError if A is not diagonalizable to the accuracy of its dtype.
        """
        eigenvalues, vectors = torch.linalg.eig(self.A.double())
        if torch.linalg.cond(vectors) * torch.finfo(self.A.dtype).eps > 1:
            raise ConfigError(f"{self._who()}: A has no complete set of eigenvectors, expected a diagonalizable matrix")
        layer = LinRNNLTI(self.dim, self.state_dim).to(self.A)
        into = torch.linalg.solve(vectors, self.B.to(vectors.dtype))
        out_of = self.C.to(vectors.dtype) @ vectors
        for name, value in (("lambda", eigenvalues), ("B", into), ("C", out_of)):
            layer.get_parameter(f"{name}_re").copy_(value.real)
            layer.get_parameter(f"{name}_im").copy_(value.imag)
        layer.D.copy_(self.D)
        return layer
