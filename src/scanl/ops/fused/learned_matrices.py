r"""Memories that learn in mini-batches of steps: gradients are taken at the weights with which the mini-batch began.

The memory is a map x + LN(f(x)) from keys to values, f linear or with one hidden layer. For a matrix W of f, with u_j
its input at step j of the mini-batch and δ_j the gradient of the loss ½ |k + LN(f(k)) - v|² by its output,

.. math:: W_i = a_i W + f_i Z - \sum_{j \le i} G_{ij} u_j \delta_j^\top, \quad
          Z_i = e_i Z - \sum_{j \le i} E_{ij} u_j \delta_j^\top

so uᵀ W_i is a sum of products of matrices for all steps of a mini-batch at once, and no W_i is formed.
Source: Sun et al., "Learning to (Learn at Test Time)", arXiv:2407.04620 (the dual form).

Whole mini-batches run as compiled loops on a CPU, one memory after the other.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.ops._frame.context import exactly
from scanl.ops._frame.fused import apply, differentiable, kernels, supported

EPS = 1e-6  # of the memory's norm
TILE = 16  # steps and channels of which the loops take multiples


class Rates(NamedTuple):
    """Coefficients of C steps, for W and Z beside each other.

    read: a and f of each step, (B, H, C, 2).   carry: what W and Z after the steps take of those before, (B, H, 2, 2);
    Z takes nothing of W.
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


def learn_whole(
    memory: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, rates: Rates, norm: Norm, *, bias: bool
) -> tuple[Tensor, list[Tensor]]:
    """Learn P whole mini-batches one after the other. q, k, v: (P, B, H, C, K); the rates have this first axis too.

    memory: W and Z beside each other, (B, H, 2, rows, columns), or W alone, as for `learn`. The gradients of a
    mini-batch are taken at its first W. Returns (P, B, H, C, K) and the memory in its form.
    """
    operands = (q, k, v, *rates, torch.stack(norm, 1), torch.cat([matrix.flatten(2) for matrix in memory], 2))
    shapes = [matrix.shape[2:] for matrix in memory]
    if _has_loops(shapes, *operands):
        y, state = apply(_Learning, shapes, bias, *operands)
    else:
        y, state = _plain(shapes, bias, *operands)
    return y, _unpacked(state, shapes)


def _unpacked(state: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    pieces = state.split([shape.numel() for shape in shapes], 2)
    return [piece.unflatten(2, shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _has_loops(shapes: Sequence[torch.Size], q: Tensor, *others: Tensor) -> bool:
    """Return whether the compiled loops take these numbers. Not under `exact`: their sums have another order."""
    widths = (q.shape[3], *(shape[2] for shape in shapes))
    fits = q.dtype == torch.float32 and not any(width % TILE for width in widths)
    return fits and not exactly() and supported(q, *others)


def _plain(shapes: Sequence[torch.Size], bias: bool, *operands: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `learn_whole` does, by `learn`. operands: q, k, v, the rates, the norm (H, 2, K), and the state."""
    q, k, v, read, carry, within, write, norm, state = operands
    memory, ys = _unpacked(state, shapes), []
    every = zip(*(x.unbind() for x in (q, k, v, read, carry, within, write)), strict=True)
    for q, k, v, *rates in every:
        start = [matrix[:, :, 0] for matrix in memory]
        y, memory = learn(
            start, memory, q, k, v, Rates(*rates), Norm(*norm.unbind(1)), bias=bias, copies=memory[0].shape[2]
        )
        ys.append(y)
    return torch.stack(ys), torch.cat([matrix.flatten(2) for matrix in memory], 2)


class _Learning(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shapes: Sequence[torch.Size], bias: bool, *operands: Tensor) -> Any:
        *sequences, norm, begin = operands
        sizes = shapes[0][2] if len(shapes) > 1 else 0, shapes[0][0], bias
        loops, keep = kernels("learned_matrices"), isinstance(ctx, torch.autograd.function.FunctionCtx)
        y, end, states, kept = loops.forward(sequences, norm, begin.flatten(0, 1), *sizes, keep)
        ctx.save_for_backward(*operands, states, kept)
        if keep:
            ctx.shapes, ctx.sizes = shapes, sizes
        return y, end.view_as(begin)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        *operands, states, kept = ctx.saved_tensors
        if torch.is_grad_enabled():  # this pass is differentiated
            return (
                None,
                None,
                *differentiable(lambda *operands: _plain(ctx.shapes, ctx.sizes[2], *operands), operands, cotangents),
            )
        dy, d_end = cotangents
        *sequences, norm, begin = operands
        loops = kernels("learned_matrices")
        gradients, d_norm, d_begin = loops.backward(dy, d_end.flatten(0, 1), sequences, norm, states, kept, *ctx.sizes)
        return None, None, *gradients, d_norm.unflatten(0, begin.shape[:2]).sum(0), d_begin.view_as(begin)
