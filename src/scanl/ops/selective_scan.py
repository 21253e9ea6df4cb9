r"""Selective scan: a diagonal state space model whose step size, input and output matrices depend on the input.

.. math:: h_t = e^{\Delta_t A} \odot h_{t-1} + (\Delta_t u_t)\, B_t^\top, \quad
   y_t = (h_t C_t + D \odot u_t) \odot \mathrm{silu}(z_t)

Each channel's state h is a vector of N numbers. If A, B or C is complex, h stands for itself and its conjugate, and the
output is twice the real part of h C.

B is discretised as Δ B, as in the authors' program and not as in their eq. (4).

Differs from that program: channels are the last axis, and complex B and C have a complex dtype.
"""

from collections.abc import Iterator
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from scanl.ops._frame.compiled import compiled
from scanl.ops._frame.declaration import COMPLEX, FLOATING, HALF_DTYPES, Call, OpSample
from scanl.ops._frame.draws import Draws
from scanl.ops._frame.op import op
from scanl.ops._frame.summary import Diagonal
from scanl.ops.linear_scan import linear_scan


@op(
    "u: B T E, delta: B T E, A: E N, B: E N | B T N | B T G N, C: E N | B T N | B T G N, "
    "D?: E, z?: B T E, delta_bias?: E, state: B E N -> B T E",
    id="P-selscan",
    equation="h_t = exp(Delta_t A) * h_{t-1} + (Delta_t u_t) B_t^T,  y_t = (h_t C_t + D * u_t) * SiLU(z_t)",
    source='Gu and Dao, "Mamba", arXiv:2312.00752, eq. (2) and algorithm 2',
    neutral={"delta": 0.0},
    effect=Diagonal({"u": 0.0}),
    values="u",
    dtypes=HALF_DTYPES + FLOATING + COMPLEX,
    divides={"G": "E"},
    real=("u", "delta", "D", "z", "delta_bias"),
    wide=("delta", "A", "D", "delta_bias"),
)
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    state: Tensor | None = None,
    *,
    delta_softplus: bool = False,
    **call: Unpack[Call],
) -> tuple[Tensor, Tensor]:
    """Scan a diagonal state space model with input-dependent Δ, B and C, without storing the states of all steps.

    u: input, (B, T, E).   delta: step size Δ, (B, T, E). If given, delta_bias, (E,), is added to it; then softplus is
    applied if delta_softplus.   A: (E, N); a negative real part makes the state decay.   B, C: input and output
    weights: (B, T, N) for all channels; (B, T, G, N) for G groups of E/G neighbouring channels, where G divides E; or
    (E, N), constant over time.   D: skip connection, (E,).   z: output gate, (B, T, E).   state: h_0, (B, E, N); zeros
    when None.   A, B, C and state may be complex; the others are real.
    reverse, cu_seqlens, backend: as for every op (see `linear_scan`).

    Returns y in u's dtype and the last h, float32 or wider. Raises ShapeError and BackendError before any work.
    Second derivatives do store the states of all steps, (B, T, E, N).

    >>> u, one = torch.tensor([[[2.0], [3.0]]]), torch.ones(1, 2, 1)
    >>> half = torch.tensor([[0.5]]).log()
    >>> y, h = selective_scan(u, one, half, one, one * 10)  # h: 2; .5·2 + 3 = 4; y = 10 h
    >>> [round(x, 4) for x in y.flatten().tolist()], round(h.item(), 4)
    ([20.0, 40.0], 4.0)
    >>> y, h = selective_scan(u, one, half, one, one, torch.tensor([1.0]), delta_bias=torch.tensor([1.0]))
    >>> [round(x, 4) for x in y.flatten().tolist()]  # Δ = 2: h: 4; .25·4 + 6 = 7; y = h + u
    [6.0, 10.0]
    """
    assert state is not None  # zeros where the caller gave None
    delta, B, C = _step_size(delta, delta_bias, delta_softplus), _rows(B, u), _rows(C, u)
    h, ys = state, []
    for t in range(u.shape[1]):
        step = delta[:, t, :, None]
        h = (step * A).exp() * h + step * u[:, t, :, None] * B[:, t]
        y = (h * C[:, t]).sum(-1)
        ys.append(2 * y.real if y.is_complex() else y)
    return _output(torch.stack(ys, 1) if ys else u.clone(), u, D, z), h


def _step_size(delta: Tensor, bias: Tensor | None, positive: bool) -> Tensor:
    delta = delta if bias is None else delta + bias
    return softplus(delta) if positive else delta


def _rows(B: Tensor, u: Tensor) -> Tensor:
    """Reshape B so that it broadcasts to (B, T, E, N)."""
    if B.ndim == 2:
        return B.expand(1, u.shape[1], -1, -1)
    if B.ndim == 3:
        return B.unsqueeze(2)
    return B.repeat_interleave(u.shape[2] // max(1, B.shape[2]), 2)


def _output(y: Tensor, u: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    y = y if D is None else y + D * u
    return y if z is None else y * silu(z)


@selective_scan.backend("parallel")
def _parallel(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    state: Tensor,
    *,
    delta_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """Run a linear scan over (B, T, E, N), with the states of all steps in memory."""
    step = _step_size(delta, delta_bias, delta_softplus).unsqueeze(-1)
    h, last = linear_scan(step * u.unsqueeze(-1) * _rows(B, u), (step * A).exp(), state, backend="parallel")
    y = (h * _rows(C, u)).sum(-1)
    return _output(2 * y.real if y.is_complex() else y, u, D, z), last


def _needs(N: int, **_: Any) -> list[str]:
    return [] if 0 < N <= 256 else [f"N={N} is over 256" if N else "N=0"]


compiled(selective_scan, "cpu", devices=("cpu",), package="numba", dtypes=FLOATING + COMPLEX)
compiled(selective_scan, "triton", devices=("cuda",), package="triton", dtypes=HALF_DTYPES + FLOATING, needs=_needs)


@selective_scan.samples
def _samples() -> Iterator[OpSample]:
    draw = Draws()

    def some(steps: int, channels: int, width: int, *groups: int, batch: int = 2, rows: int = 2) -> dict[str, Tensor]:
        lead = (batch, steps)
        return {
            "u": draw(*lead, channels),
            "delta": torch.rand(*lead, channels, generator=draw.generator, dtype=torch.float64),
            "A": -torch.rand(channels, width, generator=draw.generator, dtype=torch.float64) * 2,
            "B": draw(*lead, *groups, width),
            "C": draw(*lead, *groups, width),
            "state": draw(rows, channels, width),
        }

    yield OpSample(some(7, 3, 4))
    yield OpSample({**some(35, 5, 2), "D": draw(5)})
    yield OpSample({**some(6, 4, 3, 2), "D": draw(4), "z": draw(2, 6, 4)})
    yield OpSample({**some(5, 3, 2), "B": draw(3, 2)})
    yield OpSample({**some(5, 3, 2), "C": draw(3, 2), "z": draw(2, 5, 3)})
    packed = {**some(9, 4, 3, batch=1, rows=3), "D": draw(4), "z": draw(1, 9, 4), "delta_bias": draw(4)}
    yield OpSample(packed, {"cu_seqlens": torch.tensor([0, 2, 2, 9]), "delta_softplus": True})
    biased = {**some(8, 4, 2, 4, batch=1), "delta_bias": draw(4) / 4}
    yield OpSample(biased, {"cu_seqlens": torch.tensor([0, 5, 8])})


@selective_scan.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    u, A, B = torch.zeros(2, 4, 6), torch.zeros(6, 3), torch.zeros(2, 4, 3)
    operands = {"u": u, "delta": u, "A": A, "B": B, "C": B}
    yield OpSample({**operands, "A": A[:5]}), "A has shape (5, 3), expected (E, N) with E=6 from u"
    yield (
        OpSample({**operands, "B": B[..., :2]}),
        "B has shape (2, 4, 2), expected (E, N) or (B, T, N) or (B, T, G, N) with E=6 from u, N=3 from A, B=2 from u",
    )
    grouped = torch.zeros(2, 4, 4, 3)
    yield OpSample({**operands, "B": grouped, "C": grouped}), "B has G=4, expected a divisor of E=6 from u"
    yield OpSample({**operands, "D": torch.zeros(5)}), "D has shape (5,), expected (E,) with E=6 from u"
    yield OpSample({**operands, "delta": u.to(torch.complex64)}), "delta is complex64, expected real numbers"
    yield OpSample({"u": u, "delta": u, "A": A, "B": B}), "C is missing, expected a tensor (E, N) or (B, T, N)"
