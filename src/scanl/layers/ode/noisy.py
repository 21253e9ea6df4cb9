"""Noisy recurrent network: a Lipschitz network whose steps are disturbed in training."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.ode._timed import TimedCell, part_skew, square_normal
from scanl.layers.parts.cell_cases import cases
from scanl.ops.cell import cell
from scanl.options import Range, at_least, between


@cell(
    "x: B T D, dt: B T D, a: D D, w: D D, noise?: B T D, state: B D -> B T D",
    equation="h_t = h_{t-1} + dt_t * (A h_{t-1} + tanh(W h_{t-1} + x_t)) + noise_t",
    source='Lim, Erichson, Hodgkinson and Mahoney, "Noisy Recurrent Neural Networks", arXiv:2102.04877',
)
def noisy_cell(x, dt, a, w, noise, state):
    """Move h by one Euler step of length dt, (B, T, D), and add noise, (B, T, D); None for no noise.

    x: the projected input, bias included, (B, T, D).   a, w: weights of the linear and of the nonlinear part, (D, D).
    state: h, (B, D).
    """
    h = state + dt * (state @ a.T + torch.tanh(state @ w.T + x))
    h = h if noise is None else h + noise
    return h, h


cases(
    noisy_cell,
    "D=3",
    "dt has shape (2, 5, 1), expected (B, T, D) with",
    "w is missing, expected a tensor (D, D)",
    dt=lambda dt: dt.abs() / 2,
)


def _pair(gamma: float | Sequence[float]) -> Sequence[float]:
    return gamma if isinstance(gamma, Sequence) else (gamma, gamma)


dampings = Range("at least 0", lambda gamma, _: min(_pair(gamma)) >= 0)


@registry.register("noisy")
class NoisyRNN(TimedCell):
    """NoisyRNN: a Lipschitz RNN with noise in training, and with a learned step for each unit.

    Noise is drawn afresh for each step and unit in
    training mode. In evaluation mode there is none. By default both levels are 0; the authors set them for each run.

    Parameters as in the authors' program: B, C (D, D); d (D), the lengths of steps; E (D, D) with bias. A and W
    multiply a row h from the right, as in that code.
    Initialisation: B and C N(0, (init_std / D)²); d = dt; E as in PyTorch.
    """

    id = "S-noisy"
    equation = "h_t = h_{t-1} + d * mu_t * (alpha A h_{t-1} + tanh(W h_{t-1} + E x_t + b)) + nu_t"
    cell = noisy_cell

    def __init__(
        self,
        dim: options.Dim,
        dt: Annotated[options.TimeStep, "initial length of a step"] = 0.1,
        beta: Annotated[float, between(0, 1), "β, skew-symmetric share of A and W, from 0 (symmetric) to 1"] = 0.75,
        gamma: Annotated[
            float | tuple[float, float],
            dampings,
            "γ, damping, subtracted from the diagonals of A and W; or a pair, of A and of W",
        ] = 0.001,
        alpha: Annotated[float, "α, factor of A"] = 1.0,
        add_noise: Annotated[float, at_least(0), "standard deviation of ν, normal numbers added to the state"] = 0.0,
        mult_noise: Annotated[
            float, between(0, 1), "m from 0 to 1; each step is multiplied by μ, uniform between 1 - m and 1"
        ] = 0.0,
        init_std: Annotated[options.InitStd, "scale of the initial B and C"] = 0.1,
    ) -> None:
        super().__init__()
        self.dim, self.beta, self.alpha, self.gamma = dim, beta, alpha, gamma
        self.add_noise, self.mult_noise = add_noise, mult_noise
        self.E = nn.Linear(dim, dim)
        self.B, self.C = square_normal(dim, init_std), square_normal(dim, init_std)
        self.d = nn.Parameter(torch.full((dim,), dt))

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor | None]:
        a, w = (part_skew(m, self.beta, gamma).T for m, gamma in zip((self.B, self.C), _pair(self.gamma), strict=True))
        step, noise = self.d * spans, None
        if self.training and self.mult_noise:
            step = step * (1 - self.mult_noise * torch.rand_like(step))
        if self.training and self.add_noise:
            noise = self.add_noise * torch.randn_like(step)
        return [self.E(x), step, self.alpha * a, w, noise]
