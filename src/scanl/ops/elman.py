r"""Elman's recurrent network: the state is a nonlinearity of the input and of a product with the state before.

.. math:: h_t = \phi(\hat x_t + U h_{t-1}), \quad \phi = \tanh \text{ or } \mathrm{ReLU}
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from scanl.errors import ConfigError, unknown
from scanl.ops._frame.declaration import OpSample
from scanl.ops._frame.draws import Draws
from scanl.ops.cell import cell

NONLINEARITIES = "tanh", "relu"


def _check(operands: Any, options: Any, cu_seqlens: Tensor | None) -> None:
    if options["nonlinearity"] not in NONLINEARITIES:
        raise ConfigError(f"elman: {unknown('nonlinearity', options['nonlinearity'], NONLINEARITIES)}")


@cell(
    "x: B T D, u: D D, state: B D -> B T D",
    equation="h_t = phi(x_t + U h_{t-1}),  phi = tanh or ReLU",
    source=(
        'Elman, "Finding Structure in Time", Cognitive Science 14(2), 1990; with ReLU: Le, Jaitly and Hinton, "A '
        'Simple Way to Initialize Recurrent Networks of Rectified Linear Units", arXiv:1504.00941'
    ),
    check=_check,
)
def elman(x: Tensor, u: Tensor, state: Tensor, *, nonlinearity: str = "tanh") -> tuple[Tensor, Tensor]:
    """Scan Elman's network over time.

    x: the projected input with all biases, (B, T, D).   u: recurrent weights, (D, D), (outputs, inputs).
    nonlinearity: "tanh" or "relu".   state: h_0, (B, D); zeros when None.

    Returns h of every step in x's dtype, and the last one, in float32 or wider. Raises ShapeError for a wrong shape,
    dtype or device, ConfigError for an unknown nonlinearity. Half precision is computed in float32.

    >>> elman(torch.tensor([[[4.0], [1.0]]]), torch.tensor([[0.5]]), nonlinearity="relu")[0].flatten().tolist()
    [4.0, 3.0]
    """
    product = x + torch.einsum("oi,bi->bo", u, state)
    h = torch.tanh(product) if nonlinearity == "tanh" else torch.relu(product)
    return h, h


@elman.samples
def _samples() -> Iterator[OpSample]:
    draw = Draws()

    yield OpSample({"x": draw(2, 7, 3), "u": draw(3, 3), "state": draw(2, 3)})
    yield OpSample({"x": draw(3, 5, 6), "u": draw(6, 6) / 2, "state": draw(3, 6)}, {"nonlinearity": "relu"})
    yield OpSample(
        {"x": draw(1, 9, 4), "u": draw(4, 4), "state": draw(3, 4)}, {"cu_seqlens": torch.tensor([0, 2, 2, 9])}
    )


@elman.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    x, u = torch.zeros(2, 4, 3), torch.zeros(3, 3)
    yield OpSample({"x": x, "u": torch.zeros(3, 4)}), "u has shape (3, 4), expected (D, D) with D=3 from x"
    yield OpSample({"x": x, "u": u, "state": torch.zeros(2, 4)}), "state has shape (2, 4), expected (B, D)"
    yield OpSample({"x": x}), "u is missing, expected a tensor (D, D)"
