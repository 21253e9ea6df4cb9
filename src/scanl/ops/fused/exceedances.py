r"""How often the outputs of linear recurrences exceed thresholds.

.. math:: p_t = \lambda \odot p_{t-1} + W x_t, \quad r_t = \lambda \odot r_{t-1} + p_t, \quad
   y_t = \mathrm{Re} \sum_f \bar c_f r_{t,f} + E x_t, \quad n_q = \sum_t [y_t > b_q]

A filter y_k has F poles λ, each twice. The outputs are never stored, so thousands of filters read a long series in the
memory of their state. The counts are whole numbers, and have no gradient.
"""

import torch
from torch import Tensor

from scanl.ops._cpu._memory import contiguous
from scanl.ops._frame.fused import kernels, supported


@torch.no_grad()
def exceedances(
    x: Tensor, poles: Tensor, w: Tensor, c: Tensor, e: Tensor, thresholds: Tensor, state: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the counts n (B, Q, K) of packed sequences, and the state after their last steps.

    x: (N, C).   poles, c: (2, F, K), real and imaginary parts of λ and c.   w: W, (C, F, K).   e: E, (C, K).
    thresholds: b, (Q, K).   state: (B, 4, F, K), real and imaginary parts of p and of r.
    cu_seqlens: (B + 1,), where the sequences begin and end.

    >>> one, half = (torch.tensor([real, 0.0]).view(2, 1, 1) for real in (1.0, 0.5))
    >>> system = [half, torch.ones(1, 1, 1), one, torch.zeros(1, 1)]
    >>> x, start = torch.tensor([[1.0], [0.0], [0.0]]), torch.zeros(1, 4, 1, 1)
    >>> n, state = exceedances(x, *system, torch.tensor([[0.8]]), start, torch.tensor([0, 3]))
    >>> n.item(), state.flatten().tolist()  # p: 1, 1/2, 1/4; r: 1, 1/2+1/2 = 1, 1/2+1/4 = 3/4, which is not above 0.8
    (2.0, [0.25, 0.0, 0.75, 0.0])
    """
    operands = x, poles, w, c, e, thresholds, state
    if not supported(*operands):
        return plain(*operands, cu_seqlens)
    return kernels("exceedances").forward(*map(contiguous, operands), cu_seqlens)


def plain(
    x: Tensor, poles: Tensor, w: Tensor, c: Tensor, e: Tensor, thresholds: Tensor, state: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the same by a loop in torch."""
    decay, weight = torch.complex(*poles), torch.complex(*c)
    counts, ends = [], []
    bounds = cu_seqlens.tolist()
    for row, begin, end in zip(state, bounds, bounds[1:], strict=False):
        p, r = torch.complex(row[0], row[1]), torch.complex(row[2], row[3])
        count = thresholds.new_zeros(thresholds.shape)
        for step in x[begin:end]:
            p = decay * p + torch.einsum("c,cfk->fk", step, w)
            r = decay * r + p
            y = (weight.conj() * r).real.sum(0) + step @ e
            count = count + (y > thresholds)
        counts.append(count)
        ends.append(torch.stack([p.real, p.imag, r.real, r.imag]))
    return torch.stack(counts), torch.stack(ends)
