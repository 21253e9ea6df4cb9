r"""The matrix memory of the mLSTM layers, whose exponential gates have a stabilizer.

With m_t = max(ln f_t + m_{t-1}, ĩ_t), the memory is stored as e^-m C and e^-m n, so no gate overflows.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.layers.base import widen
from scanl.layers.packing import sequence_index
from scanl.ops import associative_scan, linear_attention
from scanl.ops._frame.context import exactly
from scanl.ops._frame.opaque import opaque


def remember(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    log_f: Tensor,
    memory: Tensor,
    m: Tensor,
    cu_seqlens: Tensor | None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the memory. Return h (B, T, H, V), and the memory and m after the last step, as in MLSTMState.

    q, k: (B, T, H, K).   v: (B, T, H, V).   i, log_f: ĩ and ln f (B, T, H).
    """
    now, previous, m = stabilizer(i, log_f, m.to(i.dtype), cu_seqlens)
    k = k * ((i - now).exp() / math.sqrt(k.shape[-1]))[..., None]
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    h, memory = linear_attention(widen(q), k, v, log_f + previous - now, state=memory, scale=1.0, cu_seqlens=cu_seqlens)
    return h[..., :-1] / (torch.maximum(h[..., -1].abs(), (-now).exp()) + eps)[..., None], memory, m


def stabilizer(i: Tensor, log_f: Tensor, m: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return m_t = max(ln f_t + m_{t-1}, ĩ_t) at each step and before each step (B, T, H), and at the end (B, H).

    A step is the map m -> max(m + a, b). The composition of two such maps is another one, so a scan computes them all.
    A sum of ln f from the start would lose digits on long streams.
    """
    length = i.shape[1]
    if length == 0:
        return i, i, m
    steps = torch.arange(length, device=i.device)
    if cu_seqlens is None:
        start, first = steps == 0, m[:, None]
    else:
        owner = sequence_index(cu_seqlens, length)
        start, first = steps == cu_seqlens[owner], m[owner][None]
    start = start[:, None]
    forget = log_f.masked_fill(start, -torch.inf)  # `first` includes the effect of earlier steps
    enter = torch.where(start, torch.maximum(log_f + first, i), i)
    (now,) = _running(forget, enter, start[None].expand(i.shape[0], -1, -1))
    previous = torch.where(start, first, F.pad(now, (0, 0, 1, 0))[:, :-1])
    if cu_seqlens is None:
        return now, previous, now[:, -1]
    ends = (cu_seqlens[1:] - 1).clamp(min=0)
    return now, previous, torch.where((cu_seqlens.diff() > 0)[:, None], now[0, ends], m)


@opaque(
    "running_stabilizer(Tensor forget, Tensor enter, Tensor start) -> Tensor[]",
    lambda forget, enter, start: [torch.empty_like(enter)],
)
def _running(forget: Tensor, enter: Tensor, start: Tensor) -> list[Tensor]:
    if exactly():  # what a scan adds to what depends on the number of steps
        m, ms = enter[:, 0], []
        for t in range(enter.shape[1]):
            m = torch.where(start[:, t], enter[:, t], torch.maximum(m + forget[:, t], enter[:, t]))
            ms.append(m)
        return [torch.stack(ms, 1)]
    return [associative_scan(_compose, (forget, enter, start))[1]]


def _compose(earlier: tuple[Tensor, ...], later: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Compose two maps m -> max(m + a, b). The start of a sequence drops everything before it, even NaN."""
    (a, b, begun), (c, d, begins) = earlier, later
    a, b = a.masked_fill(begins, -torch.inf), b.masked_fill(begins, -torch.inf)
    return a + c, torch.maximum(b + c, d), begun | begins
