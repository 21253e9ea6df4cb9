r"""Independently recurrent network: each channel feeds back only to itself, through a nonlinearity.

.. math:: s_t = \phi(w \odot s_{t-1} + x_t)

The caller computes the projection x_t = W i_t + b.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from scanl.errors import ConfigError, unknown
from scanl.ops._frame.context import late
from scanl.ops._frame.declaration import OpSample
from scanl.ops._frame.draws import Draws
from scanl.ops.cell import cell

ACTIVATIONS = {"relu": torch.relu, "tanh": late(torch, "tanh"), "identity": lambda raw: raw}


def check_activation(activation: str) -> None:
    """Raise ConfigError for an unknown activation."""
    if activation not in ACTIVATIONS:
        raise ConfigError(f"indrnn: {unknown('activation', activation, ACTIVATIONS)}")


@cell(
    "x: B T D, w: D, state: B D -> B T D",
    id="P-eltrnn",
    equation="s_t = phi(w * s_{t-1} + x_t)",
    source=(
        'Li, Li, Cook, Zhu and Gao, "Independently Recurrent Neural Network (IndRNN): Building A Longer and Deeper '
        'RNN", arXiv:1803.04831, eq. (2)'
    ),
    check=lambda operands, options, cu_seqlens: check_activation(options["activation"]),
)
def indrnn(
    x: Tensor,
    w: Tensor,
    state: Tensor,
    *,
    activation: str = "relu",
) -> tuple[Tensor, Tensor]:
    """Scan s_t = φ(w s_{t-1} + x_t) over time, elementwise.

    x: the projected input, (B, T, D).   w: recurrent weight of each channel, (D,).
    state: s_0, (B, D); zeros when None.
    activation: φ, one of "relu", "tanh" and "identity" (a linear scan).

    Returns s of every step in x's dtype, and the last one, in float32 or wider. Raises ShapeError for a wrong shape,
    dtype or device, ConfigError for an unknown activation. Half precision is computed in float32.

    >>> x, w = torch.tensor([[[1.0, -1.0], [1.0, 3.0], [-9.0, -1.0]]]), torch.tensor([0.5, 2.0])
    >>> s, last = indrnn(x, w, torch.tensor([[4.0, -1.0]]))  # .5·4+1 = 3; .5·3+1 = 2.5; .5·2.5-9 < 0
    >>> s.tolist(), last.tolist()  # 2·(-1)-1 < 0; 2·0+3 = 3; 2·3-1 = 5
    ([[[3.0, 0.0], [2.5, 3.0], [0.0, 5.0]]], [[0.0, 5.0]])
    """
    s = ACTIVATIONS[activation](w * state + x)
    return s, s


@indrnn.samples
def _samples() -> Iterator[OpSample]:
    draw = Draws()

    for activation in ACTIVATIONS:
        operands = {"x": draw(2, 7, 3), "w": draw(3), "state": draw(2, 3)}
        yield OpSample(operands, {"activation": activation})
    yield OpSample(
        {"x": draw(1, 9, 4), "w": draw(4), "state": draw(3, 4)},
        {"cu_seqlens": torch.tensor([0, 2, 2, 9]), "activation": "tanh"},
    )


@indrnn.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    x, w = torch.zeros(2, 4, 3), torch.zeros(3)
    yield OpSample({"x": x, "w": torch.zeros(2)}), "w has shape (2,), expected (D,) with D=3 from x"
    yield OpSample({"x": x, "w": w, "state": torch.zeros(2, 4)}), "state has shape (2, 4), expected (B, D)"
    yield OpSample({"x": x}), "w is missing, expected a tensor (D,)"
