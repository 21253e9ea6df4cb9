r"""Simple recurrent unit: a gated average of the inputs for each channel, with a highway connection.

.. math::
   f_t = \sigma(\hat f_t + v_f \odot c_{t-1}), \quad r_t = \sigma(\hat r_t + v_r \odot c_{t-1}), \quad
   c_t = f_t \odot c_{t-1} + (1 - f_t) \odot x_t, \quad h_t = r_t \odot c_t + (1 - r_t) \odot u_t

The caller computes x = W i, f^ = W_f i + b_f, r^ = W_r i + b_r and the highway
u = α i (or a projection). Without v_f the recurrence of c is linear, and `linear_scan` evaluates it in parallel.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from scanl.ops._frame.declaration import OpSample
from scanl.ops._frame.draws import Draws
from scanl.ops._frame.summary import Diagonal
from scanl.ops.cell import cell


@cell(
    "x: B T D, f: B T D, r: B T D, u?: B T D, v_f?: D, v_r?: D, state: B D -> B T D",
    id="P-eltrnn",
    equation=(
        "f_t = sigmoid(f_t' + v_f * c_{t-1}),  r_t = sigmoid(r_t' + v_r * c_{t-1}),  c_t = f_t * c_{t-1} + (1 - "
        "f_t) * x_t,  h_t = r_t * c_t + (1 - r_t) * u_t"
    ),
    source=(
        'Lei, Zhang, Wang, Dai and Artzi, "Simple Recurrent Units for Highly Parallelizable Recurrence", '
        "arXiv:1709.02755, eq. (1) to (4)"
    ),
    neutral={"f": math.inf},
    effect=Diagonal({"x": 0.0}, unless=("v_f",)),
)
def sru(
    x: Tensor,
    f: Tensor,
    r: Tensor,
    u: Tensor | None,
    v_f: Tensor | None,
    v_r: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Scan the simple recurrent unit over time, elementwise.

    x: the candidate, (B, T, D).   f, r: forget and reset gate before the sigmoid, biases included, (B, T, D).
    u: input of the highway connection, (B, T, D); zeros when None.
    v_f, v_r: weights of the state in the gates, (D,); zeros when None.   state: c_0, (B, D); zeros when None.

    Returns h of every step in x's dtype, and the last c, in float32 or wider. Raises ShapeError for a wrong shape,
    dtype or device. Half precision is computed in float32.

    >>> x = torch.tensor([[[4.0], [0.0]]])
    >>> gate = torch.zeros(1, 2, 1)  # both gates at σ(0) = 1/2
    >>> h, c = sru(x, gate, gate, torch.full((1, 2, 1), 6.0))  # c: 0/2+4/2 = 2; 2/2+0/2 = 1
    >>> h.flatten().tolist(), c.tolist()  # h: 2/2+6/2 = 4; 1/2+6/2 = 3.5
    ([4.0, 3.5], [[1.0]])
    """
    forget = f if v_f is None else f + v_f * state
    reset = torch.sigmoid(r if v_r is None else r + v_r * state)
    forget = torch.sigmoid(forget)
    c = forget * state + (1 - forget) * x
    return (reset * c if u is None else reset * c + (1 - reset) * u), c


@sru.samples
def _samples() -> Iterator[OpSample]:
    draw = Draws()

    def inputs(*shape: int) -> dict[str, Tensor]:
        return {name: draw(*shape) for name in ("x", "f", "r")}

    yield OpSample({**inputs(2, 7, 3), "u": draw(2, 7, 3), "v_f": draw(3), "v_r": draw(3), "state": draw(2, 3)})
    yield OpSample({**inputs(2, 5, 3), "v_f": draw(3), "v_r": draw(3), "state": draw(2, 3)})
    yield OpSample({**inputs(2, 6, 4), "u": draw(2, 6, 4), "state": draw(2, 4)})
    yield OpSample(
        {**inputs(1, 9, 4), "u": draw(1, 9, 4), "v_f": draw(4), "v_r": draw(4), "state": draw(3, 4)},
        {"cu_seqlens": torch.tensor([0, 2, 2, 9])},
    )


@sru.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    x = torch.zeros(2, 4, 3)
    inputs = {"x": x, "f": x, "r": x}
    yield OpSample({"x": x, "f": x}), "r is missing, expected a tensor (B, T, D)"
    yield OpSample({**inputs, "u": x[:, 1:]}), "u has shape (2, 3, 3), expected (B, T, D) with B=2 from x, T=4 from x"
    yield OpSample({**inputs, "v_f": torch.zeros(4)}), "v_f has shape (4,), expected (D,) with D=3 from x"
