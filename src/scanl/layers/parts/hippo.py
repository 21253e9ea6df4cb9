"""HiPPO-LegS, the initial system of state space models. Its state is the best polynomial approximation of the past.

Source: Gu et al., "HiPPO: Recurrent Memory with Optimal Polynomial Projections", arXiv:2008.07669, theorem 2; as the
sum of a diagonal and a rank-one matrix: Gu, Goel and Ré, arXiv:2111.00396, theorem 1.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

STARTS = ("lin", "inv", "legs", "real")


class DiagonalLegS(NamedTuple):
    """A = V (diag(Lambda) - P P*) V* and B = V B~, in complex128. Lambda is sorted by imaginary part."""

    Lambda: Tensor  # (N,): conjugate pairs with real part -1/2
    P: Tensor  # (N,)
    B: Tensor  # (N,): B~
    V: Tensor  # (N, N), unitary


def diagonal_legs(size: int) -> DiagonalLegS:
    """Return HiPPO-LegS with `size` states.

    A_nk = -sqrt((2n+1)(2k+1)) below the diagonal and -(n+1) on it; B_n = sqrt(2n+1). With P_n = sqrt(n + 1/2),
    A + P P^T is -1/2 times the identity plus a skew-symmetric matrix, whose eigenvectors are V.
    """
    n = torch.arange(size, dtype=torch.float64)
    B, P = (2 * n + 1).sqrt(), (n + 0.5).sqrt()
    below = torch.tril(B[:, None] * B, -1)
    skew = (below.T - below) / 2
    frequencies, V = torch.linalg.eigh(-1j * skew)
    Lambda = torch.complex(torch.full_like(frequencies, -0.5), frequencies)
    return DiagonalLegS(Lambda, V.mH @ P.to(V.dtype), V.mH @ B.to(V.dtype), V)


def diagonal_start(name: str, size: int) -> tuple[Tensor, Tensor]:
    """Return Λ and B (size/2,), complex128, of a diagonal system with `size` real states: one of each conjugate pair.

    Source: Gu, Gupta, Goel and Ré, arXiv:2206.11893, section 4. For "legs" Im B is clipped to ±2, as in the released
    code.
    """
    n = torch.arange(size // 2, dtype=torch.float64)
    decay, B = torch.full_like(n, 0.5), torch.ones_like(n).to(torch.complex128)
    if name == "lin":
        frequency = math.pi * n
    elif name == "inv":
        frequency = size / math.pi * (size / (2 * n + 1) - 1)
    elif name == "legs":
        start = diagonal_legs(size)
        frequency, B = start.Lambda.imag[size // 2 :], start.B[size // 2 :]
        B = torch.complex(B.real, B.imag.clamp(-2, 2))
    else:
        decay, frequency = n + 1, torch.zeros_like(n)
    return torch.complex(-decay, frequency), B
