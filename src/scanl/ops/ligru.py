r"""Light gated recurrent unit: one gate, no reset, rectified candidates.

.. math::
   a_t = \hat a_t + U_a h_{t-1}, \quad z_t = \sigma(\hat z_t + U_z h_{t-1}), \quad
   h_t = z_t \odot h_{t-1} + (1 - z_t) \odot \mathrm{ReLU}(a_t)

z is the weight of the old state. The caller computes a^ = BN(W_a i) and z^ = BN(W_z i). The candidate comes first, then
the gate, as in the weights of speechbrain's `LiGRU`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from scanl.ops._frame.declaration import OpSample
from scanl.ops._frame.draws import Draws
from scanl.ops.cell import cell


@cell(
    "x: B T 2 D, u: 2 D D, state: B D -> B T D",
    id="P-denserec",
    equation=(
        "h_t = z_t * h_{t-1} + (1 - z_t) * ReLU(a_t' + U_a h_{t-1}),  z_t = sigmoid(z_t' + U_z h_{t-1}),  (a', z') = x"
    ),
    source=(
        'Ravanelli, Brakel, Omologo and Bengio, "Light Gated Recurrent Units for Speech Recognition", '
        "arXiv:1803.10225, eq. (5)"
    ),
)
def ligru(
    x: Tensor,
    u: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Scan the light gated recurrent unit over time.

    x: the projected input of candidate and gate, in this order, (B, T, 2, D).
    u: recurrent weights U_a, U_z, (2, D, D), each (outputs, inputs) as in nn.Linear.   state: h_0, (B, D); zeros when
    None.

    Returns h of every step in x's dtype, and the last one, in float32 or wider. Raises ShapeError for a wrong shape,
    dtype or device. Half precision is computed in float32.

    >>> x = torch.tensor([[[[4.0], [0.0]], [[1.0], [0.0]]]])  # the gate is σ(0) = 1/2 in both steps
    >>> u = torch.tensor([[[-0.5]], [[0.0]]])
    >>> ligru(x, u)[0].flatten().tolist()  # 0/2 + 4/2 = 2; 2/2 + (1 - .5·2)/2 = 1
    [2.0, 1.0]
    """
    a, z = x[:, 0] + state @ u[0].T, torch.sigmoid(x[:, 1] + state @ u[1].T)
    h = z * state + (1 - z) * torch.relu(a)
    return h, h


@ligru.samples
def _samples() -> Iterator[OpSample]:
    draw = Draws()

    yield OpSample({"x": draw(2, 7, 2, 3), "u": draw(2, 3, 3), "state": draw(2, 3)})
    yield OpSample({"x": draw(3, 5, 2, 6), "u": draw(2, 6, 6) / 2, "state": draw(3, 6)})
    yield OpSample(
        {"x": draw(1, 9, 2, 4), "u": draw(2, 4, 4), "state": draw(3, 4)}, {"cu_seqlens": torch.tensor([0, 2, 2, 9])}
    )


@ligru.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    x, u = torch.zeros(2, 4, 2, 3), torch.zeros(2, 3, 3)
    yield OpSample({"x": x, "u": torch.zeros(2, 3, 4)}), "u has shape (2, 3, 4), expected (2, D, D) with D=3 from x"
    yield OpSample({"x": x, "u": u, "state": torch.zeros(2, 4)}), "state has shape (2, 4), expected (B, D)"
    yield OpSample({"x": x}), "u is missing, expected a tensor (2, D, D)"
