"""DSS: state space models with a diagonal matrix, in place of S4's."""

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.module import Module
from scanl.layers.parts.hippo import diagonal_start
from scanl.layers.parts.time_step import log_uniform
from scanl.layers.ssm._base import DiagonalLayer
from scanl.options import at_least

EPSILON = 1e-7  # bounds the reciprocals, as in the released code
SOURCE = 'Gupta, Gu and Berant, "Diagonal State Spaces are as Effective as Structured State Spaces", arXiv:2203.14343, '


class DSSKernel(Module):
    """Parameters of DSS's systems.

    log_dt (D, 2), for real and imaginary parts, or (D); W (1, D, N, 2) as pairs of real numbers. Without max_length
    Lambda_log_neg_re, Lambda_im (N); with it Lambda (N, 2).
    """

    def __init__(
        self,
        dim: int,
        state_dim: int,
        max_length: int | None,
        init: str,
        sep_dt_re_im: bool,
        dt_min: float,
        dt_max: float,
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.discretization = "zoh" if max_length is None else "dirac"
        Lambda = diagonal_start(init, 2 * state_dim)[0]
        real = torch.get_default_dtype()
        log_dt = log_uniform(dim, dt_min, dt_max)
        self.log_dt = nn.Parameter(log_dt[:, None].repeat(1, 2) if sep_dt_re_im else log_dt)
        if max_length is None:
            self.Lambda_log_neg_re = nn.Parameter((-Lambda.real).log().to(real))
            self.Lambda_im = nn.Parameter(Lambda.imag.to(real))
        else:
            self.Lambda = nn.Parameter(torch.view_as_real(Lambda).to(real))
        self.W = nn.Parameter(torch.randn(1, dim, state_dim, 2))

    def system(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return A = λ Δ, B, C (D, N), and steps of 1: Δ is in A, for it may differ between real and imaginary parts.

        They are computed in double, because the error of an angle grows with the length of the softmax.
        """
        if self.max_length is None:
            Lambda = torch.complex(-self.Lambda_log_neg_re.double().exp(), self.Lambda_im.double())
        else:
            Lambda = torch.view_as_complex(self.Lambda.double())
        dt = self.log_dt.double().exp()
        for_real, for_imag = (dt, dt) if dt.ndim == 1 else dt.unbind(1)
        A = torch.complex(for_real[:, None] * Lambda.real, for_imag[:, None] * Lambda.imag)
        if self.max_length is None:
            B = A * Lambda.conj() / Lambda.abs().square().clamp(min=EPSILON)
        else:
            B = self._softmax(A, Lambda, self.max_length)
        W = torch.view_as_complex(widen(self.W[0]))
        return A.to(W.dtype), B.to(W.dtype), W / 2, torch.ones_like(W.real[:, 0])

    def _softmax(self, A: Tensor, Lambda: Tensor, length: int) -> Tensor:
        """Return 1/λ divided by the sum of e^{A r} over r < length, and by e^{A (length - 1)} where A grows.

        With z = -A where A grows, and A elsewhere, the sum is (e^{z length} - 1)/(e^z - 1) times that power.
        """
        grows = Lambda.real > 0
        z = torch.where(grows, -A, A)
        below = ((z * length).exp() - 1) * Lambda
        scale = torch.where(grows, z * (length - 1), 0).exp()
        return scale * (z.exp() - 1) * below.conj() / (below.abs().square() + EPSILON)


@registry.register("dss")
class DSS(DiagonalLayer):
    """DSS: N complex numbers for each channel, with one spectrum for all channels, then GELU and a linear map.

    The system's input is held over a step, as in `s4d`, and Re λ < 0: the DSS-exp of the paper. With `max_length` the
    layer is DSS-softmax: λ is free, and the contribution of a mode is divided by the sum of its powers over
    `max_length` steps, so the kernel is Re Σ_m w_m/λ_m softmax_j(λ_m Δ j). It is meant for sequences of at most
    `max_length` steps; beyond them modes with Re λ > 0 grow.

    A long sequence is computed as a convolution, a few steps as the recurrence. Both give the same
    function. Modes are not paired with their conjugates: the kernel is Re Σ, not 2 Re Σ.

    As in the released code a reciprocal 1/x is bounded: DSS-exp divides by λ as conj(λ)/max(|λ|², 1e-7), and
    DSS-softmax divides by x, λ times the sum of powers times (e^{λΔ} - 1), as conj(x)/(|x|² + 1e-7).

    Differs: the released softmax has as many steps as each input. Where Re λ > 0, its gradient leaves out that the
    largest power depends on λ Δ. Here gradients are exact.

    With `timespans` the
    sum of the softmax stays that of usual steps.

    Parameters as in the released code: D (1, D); kernel: log_dt (D, 2), or (D) without sep_dt_re_im, W (1, D, N, 2) as
    pairs of real numbers, Lambda_log_neg_re and Lambda_im (N), or for DSS-softmax Lambda (N, 2); output_linear (D, D),
    there `output_linear.0`. Those of the kernel have no weight decay.
    Initialisation: Δ log-uniform in [dt_min, dt_max], the same for both parts; λ as in `s4d` with 2N real states, by
    default -Re λ = 1/2 and Im λ that of the eigenvalues of HiPPO-LegS without its rank-one part; w and D N(0, 1) in
    each part; the linear map as in PyTorch.
    """

    id = "S-dss"
    aliases = ("diagonal_state_space",)
    equation = (
        "s_t = exp(Delta lambda) * s_{t-1} + (exp(Delta lambda) - 1)/lambda * u_t,  y = W GELU(Re(w s) + D * u) + b"
    )
    source = SOURCE + "prop. 1 and eq. (8), and its code"
    sample: ClassVar = {"state_dim": 3}

    def __init__(
        self,
        dim: options.Dim,
        state_dim: Annotated[options.StateDim, "N, complex modes of each channel"] = 64,
        max_length: Annotated[int | None, at_least(1), "steps of the softmax; None for DSS-exp, which has none"] = None,
        init: Annotated[
            options.DiagonalInit, 'imaginary parts of λ: "legs", "lin", "inv"; or "real", λ = -1, -2, ...'
        ] = "legs",
        sep_dt_re_im: Annotated[bool, "a Δ for the real part of λ and another for the imaginary part"] = True,
        dt_min: Annotated[
            options.StepMin, "lower end of the range of the initial step Δ, in units of λ's time"
        ] = 0.001,
        dt_max: options.StepMax = 0.1,
        lr: Annotated[options.LearningRate, "learning rate of λ, Δ and w; None for the optimizer's"] = 1e-3,
    ) -> None:
        super().__init__()
        self.dim, self.state_dim, self.lr = dim, state_dim, lr
        self.kernel = DSSKernel(dim, state_dim, max_length, init, sep_dt_re_im, dt_min, dt_max)
        self._end()


@registry.preset("dss_softmax", max_length=1024)
class DSSSoftmax(DSS):
    """DSS-softmax: the kernel of each mode is a softmax over 1,024 steps, so Re λ may have any sign.

    Set `max_length` to the longest sequence.
    """

    equation = (
        "y = W GELU(K conv u + D * u) + b,  "
        "K_j = Re sum_m w_m/lambda_m exp(lambda_m Delta j) / sum_{r<max_length} exp(lambda_m Delta r)"
    )
    source = SOURCE + "prop. 1 and eq. (9)"
