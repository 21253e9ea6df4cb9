"""S4: a state space model for each channel. Its matrix is a diagonal minus one of rank one, as in HiPPO-LegS."""

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Hint, Layer, as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.module import Module
from scanl.layers.packing import each_alone
from scanl.layers.parts.dense_ssm import dense_ssm
from scanl.layers.parts.hippo import diagonal_legs
from scanl.layers.parts.time_step import log_uniform
from scanl.layers.ssm._base import BY_CONVOLUTION
from scanl.ops import discretize_dplr, long_convolution
from scanl.ops._frame.fused import supported
from scanl.ops._frame.opaque import opaque
from scanl.ops.fused.low_rank_response import low_rank_response

MAX_RECURRENT_STEPS = 16  # up to this many steps the recurrence is used


class LowRankKernel(Module):
    """Parameters of S4's systems.

    inv_dt (D, 1); A_real, A_imag (D, N/2); B, C, P (1, D, N/2, 2) as pairs of real numbers.
    """

    def __init__(self, dim: int, state_dim: int, dt_min: float, dt_max: float) -> None:
        super().__init__()
        half = state_dim // 2
        legs = diagonal_legs(state_dim)
        Lambda, P, B = (tensor[:half] for tensor in legs[:3])
        B = torch.complex(B.real, B.imag.clamp(-2, 2))
        real = torch.get_default_dtype()

        def system(value: Tensor) -> nn.Parameter:
            return nn.Parameter(value.to(real).contiguous())

        def pairs(value: Tensor) -> Tensor:
            return torch.view_as_real(value.resolve_conj()).repeat(1, dim, 1, 1)

        self.inv_dt = system(log_uniform(dim, dt_min, dt_max)[:, None])
        self.A_real = system((-Lambda.real).log().repeat(dim, 1))
        self.A_imag = system((-Lambda.imag).repeat(dim, 1))
        self.B = system(pairs(B))
        self.P = system(pairs(P))
        self.C = nn.Parameter(torch.randn(1, dim, half, 2) * 0.5**0.5)

    def system(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return Λ, P, B, C (D, N/2), complex, and Δ (D), in double: tensors of size D N are cheap."""
        Lambda = torch.complex(-self.A_real.double().exp(), -self.A_imag.double())
        P, B, C = (torch.view_as_complex(tensor[0].double()) for tensor in (self.P, self.B, self.C))
        return Lambda, P, B, C, self.inv_dt[:, 0].double().exp()


class Convolution(Module):
    """Holds `kernel` and the skip connection D (1, D)."""

    def __init__(self, kernel: LowRankKernel, dim: int) -> None:
        super().__init__()
        self.D = nn.Parameter(torch.randn(1, dim))
        self.kernel = kernel


@registry.register("s4")
class S4(Layer):
    """S4: a time-invariant recurrence with a full matrix, by the bilinear rule, then GELU and a gated linear map.

    A long sequence is computed as a convolution, a few steps as the recurrence, in O(N) per step. Both give the same
    function. C is a parameter itself; the released code trains C (I - Ā^L) for a stored length L.

    With `timespans` the whole sequence is computed as the recurrence.

    Parameters as in the released s4.py, less its buffer l_kernel: layer.D (1, D); layer.kernel: inv_dt = ln Δ (D, 1),
    A_real = ln(-Re Λ) and A_imag = -Im Λ (D, N/2), B, C, P (1, D, N/2, 2) as pairs of real numbers; output_linear.0
    (2D, D), a linear map for the gated linear unit. Λ, P, B and Δ have no weight decay.
    Initialisation: Λ, P, B of HiPPO-LegS in the basis of its normal part, one of each conjugate pair, Im B clipped to
    ±2; Δ log-uniform in [dt_min, dt_max]; C complex N(0, 1), D N(0, 1); the linear map as in PyTorch.
    """

    id = "S-s4"
    cost = ("T log T", "1")
    kind: ClassVar = {"elementwise": False}
    aliases = ("structured_state_space",)
    equation = (
        "s_t = (I - Delta A/2)^-1 ((I + Delta A/2) s_{t-1} + Delta B u_t),  A = Lambda - P P*,  "
        "y = GLU(W GELU(2 Re(C s) + D * u))"
    )
    source = (
        'Gu, Goel and Ré, "Efficiently Modeling Long Sequences with Structured State Spaces", arXiv:2111.00396, '
        "eq. (3) to (5), with P = Q as in Goel et al., arXiv:2202.09729, sec. 4.2"
    )
    op = None
    state: ClassVar = StateAxes("dim, state_dim // 2", dtype=torch.complex64)
    excused: ClassVar = BY_CONVOLUTION
    sample: ClassVar = {"state_dim": 4}
    hints: ClassVar = {
        f"layer.kernel.{name}": Hint(weight_decay=False, lr="lr") for name in ("inv_dt", "A_real", "A_imag", "B", "P")
    }

    def __init__(
        self,
        dim: options.Dim,
        state_dim: options.EvenStateDim = 64,
        dt_min: options.StepMin = 0.001,
        dt_max: options.StepMax = 0.1,
        lr: Annotated[options.LearningRate, "learning rate of Λ, P, B and Δ; None for the optimizer's"] = 1e-3,
    ) -> None:
        super().__init__()
        self.dim, self.state_dim, self.lr = dim, state_dim, lr
        self.layer = Convolution(LowRankKernel(dim, state_dim, dt_min, dt_max), dim)
        self.output_linear = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GLU(-1))

    def run(
        self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, timespans: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        u, (*system, dt) = widen(x), self.layer.kernel.system()
        entering = u if timespans is None else torch.cat([u, timespans[..., None].to(u.dtype)], -1)

        def run(entering: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
            if timespans is None:
                return _scan(entering, *system, dt, state)
            tensor, spans = entering.split([self.dim, 1], -1)
            return _scan(tensor, *system, spans.double() * dt, state)

        if cu_seqlens is None:
            y, last = run(entering, state)
        else:
            y, last = each_alone(run, entering, state, cu_seqlens, after_zeros=4)
        y = F.gelu(torch.addcmul(y, u, widen(self.layer.D[0]))).to(x.dtype)
        return self.output_linear(y), last


def _scan_shapes(
    u: Tensor, Lambda: Tensor, P: Tensor, B: Tensor, C: Tensor, dt: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(u), Lambda.new_empty(u.shape[0], *Lambda.shape, dtype=_complex(u))


def _complex(u: Tensor) -> torch.dtype:
    return torch.promote_types(u.dtype, torch.complex64)


@opaque(
    "s4(Tensor u, Tensor Lambda, Tensor P, Tensor B, Tensor C, Tensor dt, Tensor? state) -> (Tensor, Tensor)",
    _scan_shapes,
)
def _scan(
    u: Tensor, Lambda: Tensor, P: Tensor, B: Tensor, C: Tensor, dt: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    if u.shape[1] > MAX_RECURRENT_STEPS and dt.ndim == 1:
        with as_widened(u):
            return _convolution(u, Lambda, P, B, C, dt, state)
    zeros = Lambda.new_zeros(u.shape[0], *Lambda.shape, dtype=_complex(u))
    return _recurrence(u, Lambda, P, B, C, dt, zeros if state is None else state.to(zeros.dtype))


def _recurrence(
    u: Tensor, Lambda: Tensor, P: Tensor, B: Tensor, C: Tensor, dt: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence: each step solves (1 - ΔA/2) s = (1 + ΔA/2) s' + ΔB u for s.

    A = Λ - P P* acts on the state and its complex conjugate. dt: (D), or (B, T, D) where the steps differ.
    """
    half = dt[..., None] / 2
    below = 1 - half * Lambda
    low = half * P / below
    core = 1 + 2 * (P.conj() * low).real.sum(-1, keepdim=True)
    a, b, low, right = (v.to(state.dtype) for v in ((1 + half * Lambda) / below, 2 * half * B / below, low, P.conj()))
    low_after = low / core.to(u.dtype)
    entering = b * u[..., None]
    states = []
    for t in range(u.shape[1]):
        a_t, low_t, after_t = (tensor if dt.ndim == 1 else tensor[:, t] for tensor in (a, low, low_after))
        moved = a_t * state - low_t * (2 * (right * state).real.sum(-1, keepdim=True)) + entering[:, t]
        state = moved - after_t * (2 * (right * moved).real.sum(-1, keepdim=True))
        states.append(state)
    if not states:
        return u, state
    return 2 * (torch.stack(states, 1) * C.to(state.dtype)).real.sum(-1), state


def _convolution(
    u: Tensor, Lambda: Tensor, P: Tensor, B: Tensor, C: Tensor, dt: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the same by convolution with the kernel C Ā^j B̄."""
    if not supported(u):
        return _dense_convolution(u, Lambda, P, B, C, dt, state)
    system, into = _one_step(Lambda, P, B, C, dt)
    begin = into[None] if state is None else torch.cat([into[None], state.to(into.dtype)])
    kernels, ends, driven = low_rank_response(system, begin, u.shape[1], u)
    y, _ = long_convolution(u, kernels[0].to(u.dtype))
    if state is None:
        return y, driven.to(_complex(u))
    later = torch.cat([kernels[1:, :, 1:], 2 * (system[3] * ends[1:]).real.sum(-1, keepdim=True)], -1)
    return y + later.transpose(1, 2).to(u.dtype), (driven + ends[1:]).to(_complex(u))


def _one_step(Lambda: Tensor, P: Tensor, B: Tensor, C: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
    """Return a, l, r, C as `low_rank_response` takes them, and B̄ = ΔB after one solution.

    With X = ΔA/2 and E = 1/(1 - ΔΛ/2), Ā = 2 (I - X)^{-1} - I, where (I - X)^{-1} s = E s - low (2 Re right s).
    """
    half = dt[:, None] / 2
    E = 1 / (1 - half * Lambda)
    right = P.conj() * E
    low = half * P * E / (1 + half * 2 * (P.conj() * P * E).real.sum(-1, keepdim=True))
    into = 2 * half * B
    into = E * into - low * (2 * (right * into).real.sum(-1, keepdim=True))
    return torch.stack([2 * E - 1, 2 * low, right, C]), into


def _dense_convolution(
    u: Tensor, Lambda: Tensor, P: Tensor, B: Tensor, C: Tensor, dt: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the kernel by powers of the dense system, on any device. The real system (real, then imaginary parts)
    takes a quarter of the work.
    """
    dense, into = discretize_dplr(Lambda, P, B, dt)
    plain, other = dense[:, : Lambda.shape[1]].chunk(2, -1)  # s = own s' + other conj(s')
    plus, minus = plain + other, plain - other
    A = torch.cat([torch.cat([plus.real, -minus.imag], -1), torch.cat([plus.imag, minus.real], -1)], 1)
    into = into[:, : Lambda.shape[1]]
    B, C = torch.cat([into.real, into.imag], -1), 2 * torch.cat([C.real, -C.imag], -1)
    y, last = dense_ssm(u, A, B, C, None if state is None else torch.cat([state.real, state.imag], -1))
    return y, torch.complex(*last.chunk(2, -1))
