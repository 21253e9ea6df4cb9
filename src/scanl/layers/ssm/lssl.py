"""LSSL: linear state space layer, with the full matrix of HiPPO, fixed or learned."""

from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Hint, Layer, as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.packing import each_alone
from scanl.layers.parts.dense_ssm import dense_scan
from scanl.layers.parts.polynomial_memory import transition
from scanl.layers.parts.time_step import log_uniform
from scanl.layers.ssm._base import BY_CONVOLUTION


@registry.register("lssl")
class LSSL(Layer):
    """LSSL: a system with a full matrix for each channel, by the bilinear rule, then GELU and a linear map.

    The matrix starts as HiPPO-LegS's. It is quasi-separable: a product of diagonal matrices and the inverse of a
    tridiagonal one, which learning keeps. A long sequence is computed as a convolution, a few steps as the recurrence.
    Both give the same function. `s4` is the successor that costs O(N) a step rather than O(N²).

    With `timespans` each step solves a system, O(N³).

    Parameters: P, Q, d (1 or D, N) and T (1 or D, 3, N), the tridiagonal matrix below, on and above its diagonal, of
    which the first number below and the last above are not read; log_dt (D); C (D, N); skip, the D of the equation (D);
    output_linear (D, D). A and Δ have no weight decay; with learn=0 they are buffers. B_n = sqrt(2n+1), HiPPO-LegS's,
    is a buffer of all channels: it starts equal to P, and stays when P is learned.
    Differs from the authors' code, github.com/state-spaces/s4: there B = P b, where b starts as ones and is learned
    with A, so B moves with P; Δ is learned by an option of its own, which is off; several outputs a channel, a bias
    before the GELU, dropout after it, noise, and other measures than LegS can be chosen.
    Initialisation: P = Q = sqrt(2n+1), d = -n/(2n+1), T = I minus ones below the diagonal, so -A is HiPPO-LegS; Δ
    log-uniform in [dt_min, dt_max]; C and skip N(0, 1); the linear map as in PyTorch.
    """

    id = "S-lssl"
    cost = ("T log T", "1")
    aliases = ("linear_state_space",)
    equation = (
        "s_t = (I + Delta A/2)^-1 ((I - Delta A/2) s_{t-1} + Delta B x_t),  A = P (diag(d) + T^-1) Q,  "
        "y = W GELU(C s_t + D * x_t) + b"
    )
    source = (
        'Gu et al., "Combining Recurrent, Convolutional, and Continuous-time Models with Linear State-Space Layers", '
        "arXiv:2110.13985, sec. 3 and 4"
    )
    op = None
    state: ClassVar = StateAxes("dim, state_dim")
    excused: ClassVar = BY_CONVOLUTION
    sample: ClassVar = {"state_dim": 4, "learn": 1}
    hints: ClassVar = {
        **dict.fromkeys(("P", "Q", "d", "T"), Hint(weight_decay=False, lr="lr")),
        "log_dt": Hint(weight_decay=False, lr=1e-3),
    }

    P: Tensor
    Q: Tensor
    d: Tensor
    T: Tensor
    B: Tensor
    log_dt: Tensor

    def __init__(
        self,
        dim: options.Dim,
        state_dim: options.StateDim = 64,
        learn: Annotated[
            Literal[0, 1, 2],
            "what is learned of A and Δ: 0, nothing; 1, one A for all channels, and Δ; 2, an A for each, and Δ",
        ] = 1,
        dt_min: options.StepMin = 0.001,
        dt_max: options.StepMax = 0.1,
        lr: Annotated[options.LearningRate, "learning rate of A; None for the optimizer's"] = 1e-4,
    ) -> None:
        super().__init__()
        self.dim, self.state_dim, self.learn, self.lr = dim, state_dim, learn, lr
        n = torch.arange(state_dim, dtype=torch.get_default_dtype())
        root, rows = (2 * n + 1).sqrt(), dim if learn == 2 else 1
        tridiagonal = torch.stack([-torch.ones_like(n), torch.ones_like(n), torch.zeros_like(n)])
        start = {"P": root, "Q": root, "d": -n / (2 * n + 1), "T": tridiagonal}
        start = {name: value.repeat(rows, *[1] * value.ndim) for name, value in start.items()}
        for name, value in {**start, "log_dt": log_uniform(dim, dt_min, dt_max)}.items():
            if learn:
                setattr(self, name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)
        if not learn:
            vars(self)["hints"] = {}  # hints are for parameters
        self.register_buffer("B", transition("legs", state_dim)[1].to(n.dtype))
        self.C = nn.Parameter(torch.randn(dim, state_dim))
        self.skip = nn.Parameter(torch.randn(dim))
        self.output_linear = nn.Linear(dim, dim)

    def continuous(self) -> Tensor:
        """Return A (D or 1, N, N) in double."""
        P, Q, d, T = (tensor.double() for tensor in (self.P, self.Q, self.d, self.T))
        below, on, above = T.unbind(1)
        matrix = torch.diag_embed(on) + torch.diag_embed(below[:, 1:], -1) + torch.diag_embed(above[:, :-1], 1)
        return P[..., None] * (torch.diag_embed(d) + torch.linalg.inv(matrix)) * Q[:, None]

    def system(self) -> tuple[Tensor, Tensor]:
        """Return the discrete Ā (D, N, N) and B̄ (D, N) in double, since many powers of Ā are taken."""
        A = self.continuous()
        dt = self.log_dt.double().exp()[:, None, None]
        eye = torch.eye(self.state_dim, dtype=A.dtype, device=A.device)
        right = torch.cat([eye - dt / 2 * A, dt * self.B.double()[:, None]], -1)
        both = torch.linalg.solve(eye + dt / 2 * A, right)
        return both[..., :-1], both[..., -1]

    def run(
        self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, timespans: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        u = widen(x)
        with as_widened(x):
            C, entering = self.C.double(), u
            if timespans is None:
                run = partial(_held_scan, *self.system(), C)
            else:  # the durations as one channel more, so that packed sequences are cut in one place
                run = partial(_timed_scan, self.continuous(), self.B.double(), C, self.log_dt.double().exp())
                entering = torch.cat([u, timespans[..., None].to(u.dtype)], -1)
            if cu_seqlens is None:
                y, last = run(entering, state)
            else:
                y, last = each_alone(run, entering, state, cu_seqlens, after_zeros=64)
        return self.output_linear(F.gelu(torch.addcmul(y, u, widen(self.skip))).to(x.dtype)), last


def _held_scan(A: Tensor, B: Tensor, C: Tensor, u: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    return dense_scan(u, A, B, C, state)


def _timed_scan(
    A: Tensor, B: Tensor, C: Tensor, dt: Tensor, entering: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence in double. entering: x and, as the last channel, how long each step lasts (B, T, D + 1)."""
    u, spans = entering.double().split([entering.shape[-1] - 1, 1], -1)
    s = u.new_zeros(u.shape[0], *C.shape) if state is None else state.double()
    eye, ys = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device), []
    for x, span in zip(u.unbind(1), spans.unbind(1), strict=True):
        steps = (span * dt)[..., None]
        half = steps[..., None] / 2 * A
        right = ((eye - half) @ s[..., None])[..., 0] + steps * B * x[..., None]
        s = torch.linalg.solve(eye + half, right)
        ys.append((C * s).sum(-1))
    # The backward pass needs the last state, and a caller may change what is returned in place.
    return (torch.stack(ys, 1) if ys else u).to(entering.dtype), s.to(entering.dtype, copy=True)
