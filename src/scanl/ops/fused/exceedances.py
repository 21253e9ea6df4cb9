r"""How often, when and how long in a row the outputs of linear recurrences exceed thresholds.

.. math:: p_t = \lambda \odot p_{t-1} + W x_t, \quad r_t = \lambda \odot r_{t-1} + p_t, \quad
   y_t = \mathrm{Re} \sum_f \bar c_f r_{t,f} + E x_t, \quad z_t = y_t - \delta \odot y_{t-1}

.. math:: n_q = \sum_t [z_t > b_q], \quad m_q = \sum_t t \, [z_t > b_q], \quad
   l_{t,q} = (l_{t-1,q} + 1) [z_t > b_q], \quad L_q = \max_t l_{t,q}

A filter y_k has F poles λ, each twice. The outputs are never stored, so thousands of filters read a long series in the
memory of their state. The tallies n, m, l and L are whole numbers, and have no gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from scanl.ops._cpu._memory import contiguous
from scanl.ops._frame.fused import kernels, supported


class Exceedances(NamedTuple):
    """What a sequence has left. filters: (B, 4, F, K), real and imaginary parts of p and of r.   past: (B, K), the last
    y.   tallies: (B, 4, Q, K), n, m, l and L.   steps: (B,), t.
    """

    filters: Tensor
    past: Tensor
    tallies: Tensor
    steps: Tensor


@torch.no_grad()
def exceedances(
    x: Tensor,
    poles: Tensor,
    w: Tensor,
    c: Tensor,
    e: Tensor,
    delta: Tensor,
    thresholds: Tensor,
    state: Exceedances,
    cu_seqlens: Tensor,
) -> Exceedances:
    """Return the state of packed sequences after their last steps.

    x: (N, C).   poles, c: (2, F, K), real and imaginary parts of λ and c.   w: W, (C, F, K).   e: E, (C, K).
    delta: δ, (K,).   thresholds: b, (Q, K).   state: before the first steps.
    cu_seqlens: (B + 1,), where the sequences begin and end.

    >>> one, half = (torch.tensor([real, 0.0]).view(2, 1, 1) for real in (1.0, 0.5))
    >>> system = [half, torch.ones(1, 1, 1), one, torch.zeros(1, 1), torch.zeros(1)]
    >>> shapes = (1, 4, 1, 1), (1, 1), (1, 4, 1, 1), (1,)
    >>> x, start = torch.tensor([[1.0], [0.0], [0.0]]), Exceedances(*map(torch.zeros, shapes))
    >>> after = exceedances(x, *system, torch.tensor([[0.8]]), start, torch.tensor([0, 3]))
    >>> after.filters.flatten().tolist()  # p: 1, 1/2, 1/4; r: 1, 1/2+1/2 = 1, 1/2+1/4 = 3/4, which is not above 0.8
    [0.25, 0.0, 0.75, 0.0]
    >>> after.tallies.flatten().tolist()  # twice, at steps 1 and 2; the stretch of two has ended
    [2.0, 3.0, 0.0, 2.0]
    """
    operands = x, poles, w, c, e, delta, thresholds, *state[:3]
    steps = state.steps + cu_seqlens.diff()
    if not supported(*operands):
        return plain(*operands[:-3], state, cu_seqlens)._replace(steps=steps)
    filters, past, tallies = kernels("exceedances").forward(*map(contiguous, operands), state.steps, cu_seqlens)
    return Exceedances(filters, past, tallies, steps)


def plain(
    x: Tensor,
    poles: Tensor,
    w: Tensor,
    c: Tensor,
    e: Tensor,
    delta: Tensor,
    thresholds: Tensor,
    state: Exceedances,
    cu_seqlens: Tensor,
) -> Exceedances:
    """Return the same by a loop in torch."""
    decay, weight = torch.complex(*poles), torch.complex(*c)
    rows, bounds = [], cu_seqlens.tolist()
    for row, begin, end in zip(range(len(bounds) - 1), bounds, bounds[1:], strict=False):
        filters, y, (n, m, run, longest), t = (part[row] for part in state)
        p, r = torch.complex(*filters[:2]), torch.complex(*filters[2:])
        for step in x[begin:end]:
            p = decay * p + torch.einsum("c,cfk->fk", step, w)
            r = decay * r + p
            before, y = y, (weight.conj() * r).real.sum(0) + step @ e
            above, t = (y - delta * before > thresholds).to(y), t + 1
            n, m, run = n + above, m + t * above, (run + 1) * above
            longest = torch.maximum(longest, run)
        rows.append(
            (torch.stack([p.real, p.imag, r.real, r.imag]), y, torch.stack([n, m, run, longest]), torch.as_tensor(t))
        )
    return Exceedances(*(torch.stack(parts) for parts in zip(*rows, strict=True)))
