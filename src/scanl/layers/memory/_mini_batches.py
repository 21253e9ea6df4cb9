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

STEPS_EXCUSE = "the steps of a mini-batch are summed at once, and how many there are depends on the call"


class Rates(NamedTuple):
    """Coefficients of C steps, for W and Z beside each other.

    read: a and f of each step, (B, H, C, 2).   carry: what W and Z after the steps take of those before, (B, H, 2, 2).
    within: G, lower triangular, (B, H, C, C).   write: what W and Z take of each step, the last rows of G and E,
    (B, H, 2, C).
    """

    read: Tensor
    carry: Tensor
    within: Tensor
    write: Tensor


def rates(a: Tensor, f: Tensor, e: Tensor, G: Tensor, E: Tensor) -> Rates:
    """Return the coefficients of the equations above: a, f, e (..., C) and G, E (..., C, C), lower triangular."""
    none = torch.zeros_like(e[..., -1])
    carry = torch.stack([a[..., -1], f[..., -1], none, e[..., -1]], -1).unflatten(-1, (2, 2))
    return Rates(torch.stack([a, f], -1), carry, G, torch.stack([G[..., -1, :], E[..., -1, :]], -2))


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
    """Cut time at the ends of each row's mini-batches, and run one part of every row after the other.

    size: steps of a mini-batch.   position: (B,), steps of its mini-batch that each row has read; None for 0.
    operands: (B, T, H, ·), at least one step; `run` gets (B, H, C, ·), zero in slots without a step. What does not
    depend on the state is computed for all parts at once.
    Returns the outputs (B, T, H, ·) and the state.
    Numbers that are not finite are replaced by zeros. Outputs are NaN from that step on, and so is the state.
    """
    joined = torch.cat(list(operands), -1)
    widths = [tensor.shape[-1] for tensor in operands]
    batch, steps = joined.shape[:2]
    past = joined.new_zeros(batch, dtype=torch.int64) if position is None else position
    fault = faulty(joined).flatten(2).any(2)
    spoil = since(fault, 1).to(joined.dtype)
    joined = torch.where(fault[:, :, None, None], 0, joined)
    width = min(size, steps)
    slots = torch.arange(width, device=joined.device)
    parts = -(-(steps + (0 if position is None else size - 1)) // size)
    # Of each part and row, (P, B): the slot of its first step; below 0 where that was read before.
    begins = size * torch.arange(parts, device=joined.device)[:, None] - past
    at = begins.clamp(min=0)[..., None] + slots
    within = at - begins[..., None] + 1
    holds = (at < steps) & (within <= size)
    index = at.clamp(max=steps - 1).transpose(0, 1).flatten(1)[:, :, None, None].expand(-1, -1, *joined.shape[2:])
    taken = joined.gather(1, index).unflatten(1, (parts, width)).permute(1, 0, 3, 2, 4)
    taken = torch.where(holds[:, :, None, :, None], taken, 0).split(widths, -1)
    rates = zip(*coefficients(taken, within.clamp(max=size), holds), strict=True)
    outputs = []
    # Parts are unbound, since the gradient of an index is as large as all parts.
    for index, (slots_of_batch, of_part) in enumerate(zip(zip(*taken, strict=True), rates, strict=True)):
        done = None if (index + 1) * size <= steps else begins[index] + size <= steps
        y, state = run(slots_of_batch, Rates(*of_part), done, state)
        outputs.append(y)
    every = torch.arange(steps, device=joined.device)
    batch_index = (past[:, None] + every) // size
    slot = batch_index * width + every - (batch_index * size - past[:, None]).clamp(min=0)
    y = torch.cat(outputs, 2).transpose(1, 2)
    y = y.gather(1, slot[:, :, None, None].expand(-1, -1, *y.shape[2:])) * spoil[:, :, None, None]
    return y, [tensor * spoil[:, -1].view(-1, *(1,) * (tensor.ndim - 1)) for tensor in state]


def learn(
    start: Sequence[Tensor],
    memory: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rates: Rates,
    norm: Norm,
    *,
    bias: bool,
    copies: int,
) -> tuple[Tensor, list[Tensor]]:
    """Take the gradients at `start`, read with W_i of each step, and return the outputs and the last W and Z.

    start: the matrices where the mini-batch began, (B, H, rows, columns); with `bias` their last row is a bias.
    memory: W and Z beside each other, (B, H, 2, rows, columns), or W alone (B, H, 1, rows, columns), where a is 1 and
    Z is 0.   q, k, v: (B, H, C, K).   copies: 2 for W and Z of the results, 1 for W alone.
    One product reads W and Z, one scales and adds them, and one writes to both.
    """

    def given(u: Tensor) -> Tensor:
        return F.pad(u, (0, 1), value=1.0) if bias else u

    def products(index: int, u: Tensor) -> Tensor:
        matrix, scores = memory[index], u @ inputs[index].mT * rates.within
        if matrix.shape[2] == 2:
            u = (u.unsqueeze(3) * rates.read[..., None]).flatten(3)
        return _less(u @ matrix.flatten(2, 3), scores, gradients[index])

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
    after = []
    for matrix, u, delta in zip(memory, inputs, gradients, strict=True):
        if (matrix.shape[2], copies) != (1, 1):
            matrix = rates.carry[:, :, :copies, : matrix.shape[2]] @ matrix.flatten(3)
        written = (u.mT.unsqueeze(2) * rates.write[:, :, :copies, None]).flatten(2, 3)
        after.append(_less(matrix.view(*written.shape[:3], delta.shape[-1]), written, delta).unflatten(2, (copies, -1)))
    return y, after


def _less(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return x less the product of two matrices, for each row and head."""
    return torch.baddbmm(x.flatten(0, 1), first.flatten(0, 1), second.flatten(0, 1), alpha=-1).view_as(x)
