r"""LSSL: linear state space layer, with the full matrix of HiPPO, fixed or learned.

.. math:: \dot s = -A s + B x, \; y = C s + D x, \quad A = P\,(\mathrm{diag}(d) + T^{-1})\,Q
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.base import Hint, Layer, as_widened, register, widen
from scanl.layers.packing import each_alone
from scanl.layers.parts.dense_ssm import dense_scan
from scanl.layers.parts.polynomial_memory import transition
from scanl.layers.parts.time_step import check_step_range, log_uniform
from scanl.layers.ssm._base import BY_CONVOLUTION
from scanl.layers.state import Device, DType


@register("lssl")
class LSSL(Layer):
    """LSSL: a system with a full matrix for each channel, by the bilinear rule, then GELU and a linear map.

    The matrix starts as HiPPO-LegS's. It is quasi-separable: a product of diagonal matrices and the inverse of a
    tridiagonal one, which learning keeps. A long sequence is computed as a convolution, a few steps as the recurrence.
    Both give the same function. `s4` is the successor that costs O(N) a step rather than O(N²).

    Args:
        dim: D, model width.
        d_state: N, numbers of state per channel.
        learn: what is learned of A and Δ: 0, nothing; 1, one A for all channels, and Δ; 2, an A for each, and Δ.
        dt_min, dt_max: range of the initial step Δ, in units of A's time.
        lr: learning rate of A; None for the optimiser's own.
        lr_dt: learning rate of Δ; None for the optimiser's own.

    Parameters: P, Q, d (1 or D, N) and T (1 or D, 3, N), the tridiagonal matrix below, on and above its diagonal, of
    which the first number below and the last above are not read; log_dt (D); C (D, N); skip, the D of the equation (D);
    output_linear (D, D). A and Δ have no weight decay; with learn=0 they are buffers. B, a buffer, stays as P starts.
    Initialisation: P = Q = sqrt(2n+1), d = -n/(2n+1), T = I minus ones below the diagonal, so -A is HiPPO-LegS; Δ
    log-uniform in [dt_min, dt_max]; C and skip N(0, 1); the linear map as in PyTorch.
    State: s (B, D, N).
    """

    id = "S-lssl"
    equation = (
        "s_t = (I + Delta A/2)^-1 ((I - Delta A/2) s_{t-1} + Delta B x_t),  A = P (diag(d) + T^-1) Q,  "
        "y = W GELU(C s_t + D * x_t) + b"
    )
    source = (
        'Gu et al., "Combining Recurrent, Convolutional, and Continuous-time Models with Linear State-Space Layers", '
        "arXiv:2110.13985, sec. 3 and 4"
    )
    op = None
    excused: ClassVar = BY_CONVOLUTION
    sample: ClassVar = {"d_state": 4, "learn": 1}
    hints: ClassVar = {
        **dict.fromkeys(("P", "Q", "d", "T"), Hint(weight_decay=False, lr="lr")),
        "log_dt": Hint(weight_decay=False, lr="lr_dt"),
    }

    P: Tensor
    Q: Tensor
    d: Tensor
    T: Tensor
    B: Tensor
    log_dt: Tensor

    def __init__(
        self,
        dim: int,
        d_state: int = 64,
        learn: int = 1,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        lr: float | None = 1e-4,
        lr_dt: float | None = 1e-3,
    ) -> None:
        super().__init__()
        if d_state < 1:
            raise ConfigError(f"lssl: d_state is {d_state}, expected at least 1")
        if learn not in (0, 1, 2):
            raise ConfigError(f"lssl: learn is {learn}, expected 0, 1 or 2")
        check_step_range("lssl", dt_min, dt_max)
        self.dim, self.d_state, self.learn, self.lr, self.lr_dt = dim, d_state, learn, lr, lr_dt
        n = torch.arange(d_state, dtype=torch.get_default_dtype())
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
        self.register_buffer("B", transition("legs", d_state)[1].to(n.dtype))
        self.C = nn.Parameter(torch.randn(dim, d_state))
        self.skip = nn.Parameter(torch.randn(dim))
        self.output_linear = nn.Linear(dim, dim)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        return self._zeros(batch_size, self.dim, self.d_state, device=device, dtype=dtype, at_least=torch.float32)

    def system(self) -> tuple[Tensor, Tensor]:
        """Return the discrete Ā (D, N, N) and B̄ (D, N) in double, since many powers of Ā are taken."""
        P, Q, d, T = (each.double() for each in (self.P, self.Q, self.d, self.T))
        below, on, above = T.unbind(1)
        matrix = torch.diag_embed(on) + torch.diag_embed(below[:, 1:], -1) + torch.diag_embed(above[:, :-1], 1)
        A = P[..., None] * (torch.diag_embed(d) + torch.linalg.inv(matrix)) * Q[:, None]
        dt = self.log_dt.double().exp()[:, None, None]
        eye = torch.eye(self.d_state, dtype=A.dtype, device=A.device)
        right = torch.cat([eye - dt / 2 * A, dt * self.B.double()[:, None]], -1)
        both = torch.linalg.solve(eye + dt / 2 * A, right)
        return both[..., :-1], both[..., -1]

    def forward(
        self, x: Tensor, state: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self._check(x, state, cu_seqlens)
        u = widen(x)
        with as_widened(x):
            (A, B), C = self.system(), self.C.double()
            if cu_seqlens is None:
                y, last = dense_scan(u, A, B, C, state)
            else:
                rows = self.init_state(cu_seqlens.shape[0] - 1) if state is None else state
                y, last = each_alone(lambda u, row: dense_scan(u, A, B, C, row), u, rows, cu_seqlens)
        return self.output_linear(F.gelu(torch.addcmul(y, u, widen(self.skip))).to(x.dtype)), last
