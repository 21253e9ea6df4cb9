"""SpaceTime: systems whose matrix is a companion matrix, which contain every autoregression of order N."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.layers import options, registry
from scanl.layers.base import Layer, as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.packing import each_alone
from scanl.layers.parts.dense_ssm import dense_scan
from scanl.layers.ssm._base import BY_CONVOLUTION
from scanl.options import divides

LEAST_NORM = 1e-4  # vectors whose mean norm is below it are not normalized, as in the released code


@registry.register("spacetime")
class SpaceTime(Layer):
    """SpaceTime: a system with a companion matrix for each group of adjacent channels.

    A shifts the state by one index, and adds a times the last number of the state. The column a is divided by the sum
    of its magnitudes, so no eigenvalue is outside the unit circle. A long sequence is computed as a convolution, a few
    steps as the recurrence. Both give the same function.

    With `closed_loop` the layer also has a row K that predicts the next input from the state, u_{t+1} = K s_t. Then
    `forecast` runs the system on its own predictions, s_{t+1} = (A + B K) s_t. With a = 0, B = e_1 and K = C = φ, that
    is the autoregression with coefficients φ. B, C and K are divided by the sum of their magnitudes, and there is no D.

    Differs: in the released closed loop B and K are normalized in the matrix A + B K. They are not normalized where B
    reads the past and where K gives the inputs. Here they are normalized everywhere.

    Parameters as in the released code: a, b, c (groups, N); skip, the D of the equation (D), or k (groups, N) with
    `closed_loop`.
    Initialisation: all N(0, 1), as in the released code, whose network has one or two layers. In a `Stack` c is then
    multiplied by sqrt(2)/N, so that C s is as large as its input; it is N/sqrt(2) times as large otherwise.
    """

    id = "S-spacetime"
    cost = ("T log T", "1")
    equation = "s_t = A s_{t-1} + B u_t,  y_t = C s_t + D * u_t,  A = shift + (a / |a|_1) e_N^T"
    source = (
        'Zhang et al., "Effectively Modeling Time Series with Simple Discrete State Spaces", arXiv:2303.09489, sec. 3, '
        "and its code"
    )
    op = None
    state: ClassVar = StateAxes("dim, state_dim")
    excused: ClassVar = BY_CONVOLUTION
    sample: ClassVar = {"state_dim": 3, "num_groups": 4}

    def __init__(
        self,
        dim: options.Dim,
        state_dim: Annotated[options.StateDim, "N, numbers in the state of each channel"] = 64,
        num_groups: Annotated[
            options.Groups | None,
            divides("dim"),
            "groups of adjacent channels that share a system; by default each channel has its own",
        ] = None,
        closed_loop: Annotated[bool, "the layer can forecast"] = False,
    ) -> None:
        super().__init__()
        groups = dim if num_groups is None else num_groups
        self.dim, self.state_dim, self.num_groups, self.closed_loop = dim, state_dim, groups, closed_loop
        self.a, self.b, self.c = (nn.Parameter(torch.randn(groups, state_dim)) for _ in range(3))
        if closed_loop:
            self.k = nn.Parameter(torch.randn(groups, state_dim))
        else:
            self.skip = nn.Parameter(torch.randn(dim))

    def enter_stack(self, index: int, layers: Sequence[Layer]) -> None:
        if not self.closed_loop:  # which normalizes C
            with torch.no_grad():
                self.c.mul_(2**0.5 / self.state_dim)

    def system(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return A (D, N, N), B and C (D, N), in double, since many powers of A are taken."""
        a, (b, c) = _normed(self.a.double()), (self.b.double(), self.c.double())
        if self.closed_loop:
            b, c = _normed(b), _normed(c)
        column = torch.cat([a.new_zeros(*a.shape, self.state_dim - 1), a[..., None]], -1)
        A = column + torch.diag(a.new_ones(self.state_dim - 1), -1)
        return self._each(A), self._each(b), self._each(c)

    def _each(self, system: Tensor) -> Tensor:
        return system.repeat_interleave(self.dim // self.num_groups, 0)

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        A, B, C = self.system()
        y, last = self._run(x, state, cu_seqlens, A, B, C)
        return (y if self.closed_loop else torch.addcmul(y, widen(x), widen(self.skip))).to(x.dtype), last

    def _run(
        self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, A: Tensor, B: Tensor, C: Tensor
    ) -> tuple[Tensor, Tensor]:
        u = widen(x)
        with as_widened(x):
            if cu_seqlens is None:
                return dense_scan(u, A, B, C, state)
            return each_alone(lambda u, row: dense_scan(u, A, B, C, row), u, state, cu_seqlens, after_zeros=64)

    def next_inputs(self, x: Tensor) -> Tensor:
        """Return the next input that the state predicts after each step, K s_t: (B, T, D). Needs `closed_loop`."""
        A, B, _ = self.system()
        return self._run(x, None, None, A, B, self._closed())[0].to(x.dtype)

    def forecast(self, state: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Return the outputs of the next steps and the inputs that the layer predicts for them: (B, steps, D) each.

        From the state s after the last input, y_h = C (A + B K)^h s and u_h = K (A + B K)^h s, for h = 0, 1, ...
        Raises ConfigError without `closed_loop`.
        """
        A, B, C = self.system()
        K = self._closed()
        moved, s = A + B[..., None] * K[:, None], state.to(A.dtype)
        states = []
        for _ in range(steps):
            states.append(s)
            s = torch.einsum("dnm,bdm->bdn", moved, s)
        all_states = torch.stack(states, 1) if states else s[:, None][:, :0]
        return (all_states * C).sum(-1).to(state.dtype), (all_states * K).sum(-1).to(state.dtype)

    def _closed(self) -> Tensor:
        if not self.closed_loop:
            raise ConfigError(f"{self._who()}: closed_loop is False, expected True because of a forecast")
        return self._each(_normed(self.k.double()))


def _normed(v: Tensor) -> Tensor:
    """Divide each row by the sum of its magnitudes, unless their mean is close to zero."""
    norm = v.abs().sum(-1, keepdim=True)
    return v / torch.where(norm.mean() > LEAST_NORM, norm, 1)
