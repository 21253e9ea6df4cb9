"""S5: one diagonal state space model with many inputs and outputs."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Hint, Layer, widen
from scanl.layers.channelwise import ChannelwiseLayer, Drive
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.hippo import diagonal_legs
from scanl.layers.parts.time_step import log_uniform
from scanl.ops import discretize, linear_scan
from scanl.ops._frame.context import times
from scanl.options import at_least, one_of

INITS = ("trunc_standard_normal", "lecun_normal", "complex_normal")
ACTIVATIONS = ("full_glu", "half_glu1", "half_glu2", "gelu", "none")

Activation = Annotated[
    options.Activation,
    one_of(ACTIVATIONS),
    'what y passes through, with g the GELU: "gelu", g(y); "half_glu1", g(y) σ(W g(y)); "half_glu2", y σ(W g(y)); '
    '"full_glu", V g(y) σ(W g(y)); or "none"',
]


class MIMORecurrence(Layer):
    """One complex diagonal recurrence for all channels: B x in, C s out, then an activation.

    A subclass says how long a step is in `_make_steps` and `_discrete`.
    """

    op = "linear_scan"
    state: ClassVar = StateAxes("modes", dtype=torch.complex64)
    hints: ClassVar = dict.fromkeys(("Lambda_re", "Lambda_im", "B"), Hint(weight_decay=False, lr="lr"))

    def __init__(
        self,
        dim: options.Dim,
        state_dim: Annotated[options.StateDim | None, "real numbers in the state; by default D"] = None,
        blocks: Annotated[int, at_least(1), "J, HiPPO-LegS blocks on the diagonal of the initial matrix"] = 1,
        conj_sym: Annotated[
            bool, "one eigenvalue of each conjugate pair, P = state_dim/2; otherwise P = state_dim, and y = Re(C s)"
        ] = True,
        init: Annotated[
            options.Init, one_of(INITS), 'C: "trunc_standard_normal", "lecun_normal" or "complex_normal"'
        ] = "trunc_standard_normal",
        discretization: options.Discretization = "zoh",
        dt_min: options.StepMin = 0.001,
        dt_max: options.StepMax = 0.1,
        clip_eigs: Annotated[bool, "clip Re Λ to at most -1e-4"] = False,
        activation: Activation = "half_glu1",
        lr: Annotated[options.LearningRate, "learning rate of Λ, B and Δ; None for the optimizer's"] = 1e-3,
    ) -> None:
        super().__init__()
        size, unit = state_dim or dim, blocks * (1 + conj_sym)
        if size % unit:
            self._refuse("state_dim", size, f"a multiple of {unit} because of blocks={blocks} and conj_sym={conj_sym}")
        self.dim, self.lr = dim, lr
        self.state_dim, self.modes = size, size // (1 + conj_sym)
        self.conj_sym, self.clip_eigs = conj_sym, clip_eigs
        self.discretization, self.activation = discretization, activation
        block = diagonal_legs(size // blocks)
        count = self.modes // blocks
        V = torch.block_diag(*[block.V[:, :count]] * blocks)
        Lambda = block.Lambda[:count].repeat(blocks)
        self.Lambda_re = _parameter(Lambda.real)
        self.Lambda_im = _parameter(Lambda.imag)
        B = V.mH @ _cut_normal(size, dim, variance=1 / size).to(V.dtype)
        self.B = _parameter(torch.view_as_real(B.resolve_conj()))
        if init == "complex_normal":
            C = torch.randn(dim, self.modes, 2) * math.sqrt(0.5)
        else:
            variance = 1 / size if init == "trunc_standard_normal" else 1 / (dim * size)
            C = torch.view_as_real(torch.view_as_complex(_cut_normal(dim, size, 2, variance=variance)) @ V)
        self.C = _parameter(C)
        self.D = nn.Parameter(torch.randn(dim))
        self.out1 = nn.Linear(dim, dim) if activation == "full_glu" else None
        self.out2 = nn.Linear(dim, dim) if "glu" in activation else None
        self._make_steps(dt_min, dt_max)

    def run(
        self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, timespans: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        a, b = self._discrete(self._eigenvalues(), x, timespans)
        # Real and imaginary parts are adjacent, so one real matrix product makes complex numbers and one reads them.
        into, constant = widen(self.B), b.ndim == 1
        if constant:  # a gain that is the same at every step is one of the matrix
            into = torch.view_as_real(b[:, None] * torch.view_as_complex(into))
        u = torch.view_as_complex(widen(x @ into.transpose(1, 2).flatten(0, 1).t().to(x.dtype)).unflatten(-1, (-1, 2)))
        if constant:
            s, last = self._scan(u, x, into, a, state, cu_seqlens)
        else:
            s, last = linear_scan(times(b, u), a, state, cu_seqlens=cu_seqlens)
        out_of = torch.stack([self.C[..., 0], -self.C[..., 1]], -1).flatten(1) * (1 + self.conj_sym)
        y = torch.addcmul(torch.view_as_real(s).flatten(-2).to(x.dtype) @ out_of.t(), x, self.D)
        return self._activate(y), last

    def _scan(
        self, u: Tensor, x: Tensor, into: Tensor, a: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Scan u = x intoᵀ with the same decay at every step."""
        return linear_scan(u, a, state, cu_seqlens=cu_seqlens)

    def _eigenvalues(self) -> Tensor:
        """Return Λ (P)."""
        real = widen(self.Lambda_re)
        return torch.complex(real.clamp(max=-1e-4) if self.clip_eigs else real, widen(self.Lambda_im))

    def _make_steps(self, dt_min: float, dt_max: float) -> None:
        """Make the parameters of the steps' length, initially between dt_min and dt_max."""
        raise NotImplementedError

    def _discrete(self, Lambda: Tensor, x: Tensor, timespans: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the factors of the state and of B x in one step: each (P), or (B, T, P)."""
        raise NotImplementedError

    def _activate(self, y: Tensor) -> Tensor:
        if self.activation == "none":
            return y
        g = F.gelu(y, approximate="tanh")  # jax.nn.gelu, which the authors' program uses
        if self.out2 is None:
            return g
        gate = self.out2(g).sigmoid()
        if self.out1 is not None:
            return self.out1(g) * gate
        return (y if self.activation == "half_glu2" else g) * gate


@registry.register("s5")
class S5(ChannelwiseLayer, MIMORecurrence):
    """S5: a complex diagonal recurrence with dense input and output matrices, then a gated activation.

    Parameters as in the authors' program: Lambda_re, Lambda_im (P); B (P, D, 2) and C (D, P, 2) as pairs of real
    numbers; D (D); log_step (P, 1); out1, out2 (D, D), the linear maps V and W of the activation. Λ, B and Δ have no
    weight decay. In the s5-pytorch package Λ and C are complex; `Module.to(dtype)` would make them real.
    Initialisation: Λ and V are the eigenvalues and eigenvectors of the normal part of HiPPO-LegS, in J blocks; with
    conj_sym only those with negative imaginary parts. B = V* B' and C = C' V. B' is normal, cut at two standard
    deviations, of variance 1/state_dim; the parts of C' likewise, for lecun_normal of variance 1/(D state_dim). For
    complex_normal C itself is complex N(0, 1). D N(0, 1); Δ log-uniform in [dt_min, dt_max]; the linear maps as in
    PyTorch.
    """

    id = "S-s5"
    aliases = ("simplified_state_space",)
    equation = (
        "s_t = exp(Delta Lambda) * s_{t-1} + (exp(Delta Lambda) - 1)/Lambda * (B x_t),  y_t = 2 Re(C s_t) + D * x_t"
    )
    source = (
        'Smith, Warrington and Linderman, "Simplified State Space Layers for Sequence Modeling", arXiv:2208.04933, '
        "eq. (4) to (6)"
    )
    sample: ClassVar = {"state_dim": 8, "blocks": 2}
    hints: ClassVar = {"log_step": Hint(weight_decay=False, lr="lr")}

    def _make_steps(self, dt_min: float, dt_max: float) -> None:
        self.log_step = nn.Parameter(log_uniform(self.modes, dt_min, dt_max)[:, None])

    def _scan(
        self, u: Tensor, x: Tensor, into: Tensor, a: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        drive = Drive(u, x, lambda: torch.view_as_complex(into).t())
        s, (last,) = self.advance([drive], [a], [state], cu_seqlens)
        return s, last

    def recur(
        self, p: Sequence[Tensor], v: Sequence[Tensor], states: Sequence[Tensor | None], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        s, last = linear_scan(p[0], v[0], states[0], cu_seqlens=cu_seqlens)
        return s, [last]

    def _discrete(self, Lambda: Tensor, x: Tensor, timespans: Tensor | None) -> tuple[Tensor, Tensor]:
        steps = widen(self.log_step).exp().t()
        if timespans is not None:
            steps = timespans.to(steps.dtype).reshape(-1, 1) * steps
        a, b = discretize(Lambda, torch.ones_like(Lambda), steps, self.discretization)
        return (a[0], b[0]) if timespans is None else (a.unflatten(0, x.shape[:2]), b.unflatten(0, x.shape[:2]))


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.to(torch.get_default_dtype()).contiguous())


def _cut_normal(*shape: int, variance: float) -> Tensor:
    """Draw normal numbers cut at two standard deviations; `variance` is the variance after the cut."""
    std = math.sqrt(variance) / 0.87962566103423978
    return nn.init.trunc_normal_(torch.empty(shape, dtype=torch.float64), std=std, a=-2 * std, b=2 * std)
