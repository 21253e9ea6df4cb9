r"""Memories that learn in mini-batches of steps: gradients are taken at the weights with which the mini-batch began.

The memory is a map x + LN(f(x)) from keys to values, f linear or with one hidden layer. For a matrix W of f, with u_j
its input at step j of the mini-batch and δ_j the gradient of the loss ½ |k + LN(f(k)) - v|² by its output,

.. math:: W_i = a_i W + f_i Z - \sum_{j \le i} G_{ij} u_j \delta_j^\top, \quad
          Z_i = e_i Z - \sum_{j \le i} E_{ij} u_j \delta_j^\top

so uᵀ W_i is a sum of products of matrices for all steps of a mini-batch at once, and no W_i is formed.
Source: Sun et al., "Learning to (Learn at Test Time)", arXiv:2407.04620 (the dual form).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.ops._frame.nonfinite import faulty, since

EPS = 1e-6  # of the memory's norm


class Rates(NamedTuple):
    """Coefficients of C steps: a (None for 1), f and e (B, H, C), and G and E (B, H, C, C), lower triangular."""

    a: Tensor | None
    f: Tensor
    e: Tensor
    G: Tensor
    E: Tensor


class Norm(NamedTuple):
    """The weights of the memory's norm: weight and bias, (H, K)."""

    weight: Tensor
    bias: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        """Norm z (B, H, C, K)."""
        return F.layer_norm(z, z.shape[-1:], eps=EPS) * self.weight[:, None] + self.bias[:, None]

    def gradient(self, z: Tensor, target: Tensor) -> Tensor:
        """Return the gradient of ½ |LN(z) - target|² by z."""
        z = z - z.mean(-1, keepdim=True)
        scale = (z.square().mean(-1, keepdim=True) + EPS).rsqrt()
        z = z * scale
        g = (z * self.weight[:, None] + self.bias[:, None] - target) * self.weight[:, None]
        return scale * (g - g.mean(-1, keepdim=True) - z * (g * z).mean(-1, keepdim=True))


# Of all parts: operands (P, B, H, C, ·), the place of each step in its mini-batch, counted from 1, and which slots hold
# a step, (P, B, C); to the coefficients, with a first axis of P parts.
Coefficients = Callable[[Sequence[Tensor], Tensor, Tensor], Rates]

# Of one mini-batch or a part of it: operands, coefficients, which rows come to the end of their mini-batch (None where
# all do), and the state; to the outputs and the state.
Part = Callable[[Sequence[Tensor], Rates, Tensor | None, list[Tensor]], tuple[Tensor, list[Tensor]]]


def in_mini_batches(
    size: int,
    position: Tensor | None,
    operands: Sequence[Tensor],
    state: list[Tensor],
    coefficients: Coefficients,
    run: Part,
) -> tuple[Tensor, list[Tensor]]:
    """Cut time where each row's mini-batches end, and run one part of every row after the other.

    size: steps of a mini-batch.   position: (B,), steps of its mini-batch that each row has read; None for 0.
    operands: (B, T, H, ·), at least one step; `run` gets (B, H, C, ·), zero in slots without a step. What does not
    depend on the state is computed for all parts at once.
    Returns the outputs (B, T, H, ·) and the state.
    Numbers that are not finite are replaced by zeros. Outputs are NaN from that step on, and so is the state.
    """
    joined = torch.cat(list(operands), -1)
    widths = [each.shape[-1] for each in operands]
    batch, steps = joined.shape[:2]
    read = joined.new_zeros(batch, dtype=torch.int64) if position is None else position
    fault = faulty(joined).flatten(2).any(2)
    spoil = since(fault, 1).to(joined.dtype)
    joined = torch.where(fault[:, :, None, None], 0, joined)
    width = min(size, steps)
    slots = torch.arange(width, device=joined.device)
    parts = -(-(steps + (0 if position is None else size - 1)) // size)
    # Of each part and row, (P, B): the slot of its first step; below 0 where that was read before.
    begins = size * torch.arange(parts, device=joined.device)[:, None] - read
    at = begins.clamp(min=0)[..., None] + slots
    within = at - begins[..., None] + 1
    holds = (at < steps) & (within <= size)
    index = at.clamp(max=steps - 1).transpose(0, 1).flatten(1)[:, :, None, None].expand(-1, -1, *joined.shape[2:])
    taken = joined.gather(1, index).unflatten(1, (parts, width)).permute(1, 0, 3, 2, 4)
    taken = torch.where(holds[:, :, None, :, None], taken, 0).split(widths, -1)
    rates = coefficients(taken, within.clamp(max=size), holds)
    outputs = []
    for index, ends in enumerate(begins + size <= steps):
        own = [part[index] for part in taken]
        alone = None if rates.a is None else rates.a[index]
        of_part = Rates(alone, *(each[index] for each in rates[1:]))
        y, state = run(own, of_part, None if (index + 1) * size <= steps else ends, state)
        outputs.append(y)
    every = torch.arange(steps, device=joined.device)
    part = (read[:, None] + every) // size
    slot = part * width + every - (part * size - read[:, None]).clamp(min=0)
    y = torch.cat(outputs, 2).transpose(1, 2)
    y = y.gather(1, slot[:, :, None, None].expand(-1, -1, *y.shape[2:])) * spoil[:, :, None, None]
    return y, [each * spoil[:, -1].view(-1, *(1,) * (each.ndim - 1)) for each in state]


def learn(
    start: Sequence[Tensor],
    now: Sequence[Tensor],
    moving: Sequence[Tensor] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rates: Rates,
    norm: Norm,
    *,
    bias: bool,
    moves: bool = True,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Take the gradients at `start`, read with W_i of each step, and return the outputs and the last W and Z.

    start, now, moving: the matrices where the mini-batch began, W and Z, (B, H, rows, columns); with `bias` their last
    row is a bias. None for a Z of zeros.   q, k, v: (B, H, C, K).   moves: whether the last Z is wanted.
    """

    def given(u: Tensor) -> Tensor:
        return F.pad(u, (0, 1), value=1.0) if bias else u

    def products(index: int, u: Tensor) -> Tensor:
        own = u @ now[index]
        own = own if rates.a is None else rates.a[..., None] * own
        own = own if moving is None else own + rates.f[..., None] * (u @ moving[index])
        return _less(own, u @ inputs[index].mT * rates.G, gradients[index])

    hidden, inputs = [], [given(k)]
    for weight in start[:-1]:
        hidden.append(inputs[-1] @ weight)
        inputs.append(given(F.gelu(hidden[-1], approximate="tanh")))
    gradients = [norm.gradient(inputs[-1] @ start[-1], v - k)]
    for z, weight in zip(reversed(hidden), reversed(start[1:]), strict=True):
        rows = weight[:, :, :-1] if bias else weight
        gradients.insert(0, torch.ops.aten.gelu_backward(gradients[0] @ rows.mT, z, approximate="tanh"))
    u = given(q)
    for index in range(len(start) - 1):
        u = given(F.gelu(products(index, u), approximate="tanh"))
    y = q + norm(products(len(start) - 1, u))
    after, later = [], []
    for index, (u, delta) in enumerate(zip(inputs, gradients, strict=True)):
        W, Z = now[index], None if moving is None else moving[index]
        W = W if rates.a is None else rates.a[:, :, -1, None, None] * W
        W = W if Z is None else W + rates.f[:, :, -1, None, None] * Z
        after.append(_less(W, (u * rates.G[:, :, -1, :, None]).mT, delta))
        if moves:
            Z = torch.zeros_like(W) if Z is None else rates.e[:, :, -1, None, None] * Z
            later.append(_less(Z, (u * rates.E[:, :, -1, :, None]).mT, delta))
    return y, after, later


def _less(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return x less the product of two matrices, for each row and head."""
    return torch.baddbmm(x.flatten(0, 1), left.flatten(0, 1), right.flatten(0, 1), alpha=-1).view_as(x)
