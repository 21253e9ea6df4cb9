r"""Gated recurrent unit: a reset gate on the state's contribution to the candidate, and a gate that keeps the state.

.. math::
   r_t = \sigma(\hat r_t + U_r h_{t-1} + b_r), \quad z_t = \sigma(\hat z_t + U_z h_{t-1} + b_z), \quad
   n_t = \tanh(\hat n_t + r_t \odot (U_n h_{t-1} + b_n)), \quad h_t = (1 - z_t) \odot n_t + z_t \odot h_{t-1}

Differs: the reset gate multiplies U_n h_{t-1} + b_n, as in `torch.nn.GRU`; in the paper it multiplies h_{t-1} itself.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from scanl.ops._frame.declaration import OpSample
from scanl.ops._frame.draws import Draws
from scanl.ops.cell import cell


@cell(
    "x: B T 3 D, u: 3 D D, b?: 3 D, state: B D -> B T D",
    equation=(
        "r_t = sigmoid(r_t' + U_r h_{t-1} + b_r),  z_t = sigmoid(z_t' + U_z h_{t-1} + b_z),  h_t = (1 - z_t) * "
        "tanh(n_t' + r_t * (U_n h_{t-1} + b_n)) + z_t * h_{t-1},  (r', z', n') = x"
    ),
    source=('Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder", arXiv:1406.1078, eq. (5) to (8)'),
)
def gru(x: Tensor, u: Tensor, b: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Scan the gated recurrent unit over time.

    x: the projected input of r, z and n, in this order, with its bias, (B, T, 3, D).
    u: recurrent weights U_r, U_z, U_n, (3, D, D), each (outputs, inputs) as in nn.Linear.
    b: recurrent biases, (3, D); zeros when None.   state: h_0, (B, D); zeros when None.

    Returns h of every step in x's dtype, and the last one, in float32 or wider. Raises ShapeError for a wrong shape,
    dtype or device. Half precision is computed in float32.

    >>> x = torch.tensor([[[[0.0], [0.0], [40.0]], [[0.0], [0.0], [-20.0]]]])  # r and z are σ(0) = 1/2 in both steps
    >>> u = torch.tensor([[[0.0]], [[0.0]], [[80.0]]])
    >>> gru(x, u)[0].flatten().tolist()  # 1/2 tanh(40) = .5; 1/2 tanh(-20 + 1/2 · 80 · .5 = 0) + 1/2 · .5
    [0.5, 0.25]
    """
    recurrent = torch.einsum("goi,bi->bgo", u, state)
    if b is not None:
        recurrent = recurrent + b
    r, z = torch.sigmoid(x[:, 0] + recurrent[:, 0]), torch.sigmoid(x[:, 1] + recurrent[:, 1])
    n = torch.tanh(x[:, 2] + r * recurrent[:, 2])
    h = (1 - z) * n + z * state
    return h, h


@gru.samples
def _samples() -> Iterator[OpSample]:
    draw = Draws()

    yield OpSample({"x": draw(2, 7, 3, 3), "u": draw(3, 3, 3), "b": draw(3, 3), "state": draw(2, 3)})
    yield OpSample({"x": draw(3, 5, 3, 6), "u": draw(3, 6, 6) / 2, "state": draw(3, 6)})
    yield OpSample(
        {"x": draw(1, 9, 3, 4), "u": draw(3, 4, 4), "b": draw(3, 4), "state": draw(3, 4)},
        {"cu_seqlens": torch.tensor([0, 2, 2, 9])},
    )


@gru.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    x, u = torch.zeros(2, 4, 3, 5), torch.zeros(3, 5, 5)
    yield OpSample({"x": x, "u": torch.zeros(3, 5, 4)}), "u has shape (3, 5, 4), expected (3, D, D) with D=5 from x"
    yield OpSample({"x": x, "u": u, "b": torch.zeros(3, 4)}), "b has shape (3, 4), expected (3, D) with D=5 from x"
    yield OpSample({"x": x, "u": u, "state": torch.zeros(2, 4)}), "state has shape (2, 4), expected (B, D)"
    yield OpSample({"x": x}), "u is missing, expected a tensor (3, D, D)"
