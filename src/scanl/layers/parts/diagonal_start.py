"""Initial diagonal state space models of S4D, H3 and S4ND."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from scanl.layers.parts.hippo import diagonal_start
from scanl.layers.parts.time_step import log_uniform


class DiagonalSystems(NamedTuple):
    """Parameters of S systems: ln(-Re A), Im A (S, N/2); B, C (S, N/2, 2) as pairs of real numbers; ln Δ (S)."""

    log_A_real: Tensor
    A_imag: Tensor
    B: Tensor
    C: Tensor
    log_dt: Tensor


def diagonal_systems(count: int, state_dim: int, init: str, dt_min: float, dt_max: float) -> DiagonalSystems:
    """Make `count` systems with N = state_dim real states: A and B from `diagonal_start`, C complex N(0, 1) times B."""
    A, B = diagonal_start(init, state_dim)
    real = torch.get_default_dtype()
    C = torch.view_as_complex(torch.randn(count, state_dim // 2, 2) * math.sqrt(0.5)) * B
    return DiagonalSystems(
        log_A_real=(-A.real).log().to(real).repeat(count, 1),
        A_imag=A.imag.to(real).repeat(count, 1),
        B=torch.view_as_real(B).to(real).repeat(count, 1, 1),
        C=torch.view_as_real(C).to(real),
        log_dt=log_uniform(count, dt_min, dt_max),
    )
