"""Initial diagonal state space models of S4D and H3, and a check of the options that choose them."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from scanl.errors import ConfigError, unknown
from scanl.layers.parts.hippo import STARTS, diagonal_start
from scanl.layers.parts.time_step import check_step_range, log_uniform
from scanl.ops.ssm_kernels import DISCRETIZATIONS


class DiagonalSystems(NamedTuple):
    """Parameters of S systems: ln(-Re A), Im A (S, N/2); B, C (S, N/2, 2) as pairs of real numbers; ln Δ (S)."""

    log_A_real: Tensor
    A_imag: Tensor
    B: Tensor
    C: Tensor
    log_dt: Tensor


def diagonal_systems(count: int, d_state: int, init: str, dt_min: float, dt_max: float) -> DiagonalSystems:
    """Make `count` systems with N = d_state real states: A and B from `diagonal_start`, C complex N(0, 1) times B."""
    A, B = diagonal_start(init, d_state)
    real = torch.get_default_dtype()
    C = torch.view_as_complex(torch.randn(count, d_state // 2, 2) * math.sqrt(0.5)) * B
    return DiagonalSystems(
        log_A_real=(-A.real).log().to(real).repeat(count, 1),
        A_imag=A.imag.to(real).repeat(count, 1),
        B=torch.view_as_real(B).to(real).repeat(count, 1, 1),
        C=torch.view_as_real(C).to(real),
        log_dt=log_uniform(count, dt_min, dt_max),
    )


def check_diagonal_system(who: str, d_state: int, init: str, disc: str, dt_min: float, dt_max: float) -> None:
    """Raise ConfigError for an odd d_state, an unknown init or discretisation, or a wrong range of step sizes."""
    if d_state < 2 or d_state % 2:
        raise ConfigError(f"{who}: d_state is {d_state}, expected an even number of at least 2")
    if init not in STARTS:
        raise ConfigError(f"{who}: {unknown('init', init, STARTS)}")
    if disc not in DISCRETIZATIONS:
        raise ConfigError(f"{who}: {unknown('disc', disc, DISCRETIZATIONS)}")
    check_step_range(who, dt_min, dt_max)
