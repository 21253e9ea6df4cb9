r"""Long short-term memory: a memory with a forget gate, an input gate and an output gate.

.. math::
   i, f, g, o = \hat x_t + R h_{t-1}, \quad c_t = \sigma(f) \odot c_{t-1} + \sigma(i) \odot \tanh(g), \quad
   h_t = \sigma(o) \odot \tanh(c_t)

The gates are in the order of `torch.nn.LSTM`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from scanl.ops._frame.declaration import OpSample
from scanl.ops._frame.draws import Draws
from scanl.ops.cell import cell


@cell(
    "x: B T 4 D, r: 4 D D, state: B 2 D -> B T D",
    equation=(
        "c_t = sigmoid(f) * c_{t-1} + sigmoid(i) * tanh(g),  h_t = sigmoid(o) * tanh(c_t),  (i, f, g, o) = x_t + R "
        "h_{t-1}"
    ),
    source=(
        'Hochreiter and Schmidhuber, "Long Short-Term Memory", Neural Computation 9(8), 1997; forget gate: Gers, '
        'Schmidhuber and Cummins, "Learning to Forget", Neural Computation 12(10), 2000'
    ),
)
def lstm(x: Tensor, r: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Scan the long short-term memory over time.

    x: the projected input of i, f, g and o, in this order, with all biases, (B, T, 4, D).
    r: recurrent weights, (4, D, D), each (outputs, inputs) as in nn.Linear.   state: h_0 and c_0, (B, 2, D); zeros when
    None.

    Returns h of every step in x's dtype, and the last state, in float32 or wider. Raises ShapeError for a wrong shape,
    dtype or device. Half precision is computed in float32.

    >>> x = torch.tensor([[[[0.0], [0.0], [40.0], [40.0]]]])  # i and f are σ(0) = 1/2, o is 1
    >>> lstm(x, torch.zeros(4, 1, 1), torch.tensor([[[0.0], [3.0]]]))[1].flatten().tolist()  # c = 3/2 + 1/2; h = tanh c
    [0.9640275835990906, 2.0]
    """
    h, c = state.unbind(1)
    i, f, g, o = (x + torch.einsum("goi,bi->bgo", r, h)).unbind(1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, torch.stack([h, c], 1)


@lstm.samples
def _samples() -> Iterator[OpSample]:
    draw = Draws()

    yield OpSample({"x": draw(2, 7, 4, 3), "r": draw(4, 3, 3), "state": draw(2, 2, 3)})
    yield OpSample({"x": draw(3, 5, 4, 6), "r": draw(4, 6, 6) / 2, "state": draw(3, 2, 6)})
    yield OpSample(
        {"x": draw(1, 9, 4, 4), "r": draw(4, 4, 4), "state": draw(3, 2, 4)}, {"cu_seqlens": torch.tensor([0, 2, 2, 9])}
    )


@lstm.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    x, r = torch.zeros(2, 4, 4, 5), torch.zeros(4, 5, 5)
    yield OpSample({"x": x, "r": torch.zeros(4, 5, 4)}), "r has shape (4, 5, 4), expected (4, D, D) with D=5 from x"
    yield OpSample({"x": x, "r": r, "state": torch.zeros(2, 5)}), "state has shape (2, 5), expected (B, 2, D)"
    yield OpSample({"x": x}), "r is missing, expected a tensor (4, D, D)"
