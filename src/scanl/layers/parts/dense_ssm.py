r"""Run a dense discrete state space model over a whole sequence, one model for each channel.

.. math:: s_t = A s_{t-1} + B x_t, \quad y_t = C s_t
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.ops import long_convolution
from scanl.ops._frame.opaque import opaque

MAX_RECURRENT_STEPS = 16  # up to this many steps the recurrence is used


def dense_ssm(x: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return y (B, T, D) and the state (B, D, M) after the last step, in x's dtype.

    x: (B, T, D), T at least 1.   A: (D, M, M), B and C: (D, M), real, float64.   state: (B, D, M); None for zeros.

    The kernel C A^j B is a product of two tables with about √T columns: C A^l and A^{ib} B with j = i b + l. To make
    them, A is squared log T times. The same tables give the state's effect on each step, and the last state. The
    cost is O(D M³ log T + D M T), and O(M) more for each step and row of the batch.
    """
    batch, steps, _ = x.shape
    size = 1 << ((steps - 1).bit_length() + 1) // 2
    blocks = 1 << (-(-steps // size) - 1).bit_length()
    squares = [A]  # A^1, A^2, A^4, ...
    powers = size * blocks if state is not None else size * blocks - 1  # a state goes through all steps
    while len(squares) < powers.bit_length():
        squares.append(squares[-1] @ squares[-1])
    inner, outer = squares[: size.bit_length() - 1], squares[size.bit_length() - 1 :]

    rows = _table(C[:, None].mT, [power.mT for power in inner], 1 << len(inner)).mT  # (D, size, M): C A^l
    kernel = (rows @ _table(B[..., None], outer, blocks)).mT.flatten(1)[:, :steps]
    y, _ = long_convolution(x, kernel.to(x.dtype))

    # Zeros before the sequence complete the first block; they do not change the result.
    gap = size * blocks - steps
    written = _table(B[..., None], inner, size).flip(-1).mT.to(x.dtype)  # (D, size, M): A^{size-1-l} B
    parts = F.pad(x, (0, 0, gap, 0)).permute(2, 0, 1).unflatten(2, (blocks, size))
    sums = (parts.flatten(1, 2) @ written).unflatten(1, (batch, blocks))  # (D, B, blocks, M)
    for power in outer[: blocks.bit_length() - 1]:
        sums = sums[:, :, 0::2] @ power.mT.to(x.dtype)[:, None] + sums[:, :, 1::2]
    last = sums[:, :, 0].transpose(0, 1)
    if state is None:
        return y, last
    here = state.permute(1, 2, 0).to(A.dtype)  # (D, M, B)
    # One column for each row of the batch and each block's start.
    starts = _table(A @ here, outer, blocks).unflatten(2, (blocks, batch))
    echo = torch.einsum("dlm,dmib->bild", rows, starts).flatten(1, 2)[:, :steps]
    gone = here
    for i, power in enumerate(squares):
        if steps >> i & 1:
            gone = power @ gone
    return y + echo.to(x.dtype), last + gone.permute(2, 0, 1).to(x.dtype)


def _table(first: Tensor, squares: list[Tensor], count: int) -> Tensor:
    """Return (D, M, count K): A^i times the K columns of `first`, for i < count. `squares` are A, A², A⁴, ..."""
    table = first
    for power in squares[: count.bit_length() - 1]:
        table = torch.cat([table, power @ table], 2)
    return table


def _shapes(u: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(u), u.new_empty(u.shape[0], *B.shape)


@opaque(
    "dense_scan(Tensor u, Tensor A, Tensor B, Tensor C, Tensor? state) -> (Tensor, Tensor)",
    _shapes,
)
def dense_scan(u: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run a few steps as the recurrence, more by `dense_ssm`. Shapes as there; T may be 0."""
    state = None if state is None else state.to(u.dtype)
    if u.shape[1] > MAX_RECURRENT_STEPS:
        return dense_ssm(u, A, B, C, state)
    state = u.new_zeros(u.shape[0], *B.shape) if state is None else state
    A, B, C = (tensor.to(u.dtype) for tensor in (A, B, C))
    ys = []
    for x in u.unbind(1):
        state = torch.einsum("dnm,bdm->bdn", A, state) + B * x[..., None]
        ys.append((C * state).sum(-1))
    # The backward pass needs the last state, and a caller may change what is returned in place.
    return (torch.stack(ys, 1) if ys else u), state.clone()
