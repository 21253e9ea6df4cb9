r"""Rotary position embedding: rotate pairs of features by an angle proportional to the position.

.. math:: (x_i, x_{i+r/2}) \mapsto (x_i \cos p\theta_i - x_{i+r/2} \sin p\theta_i,\; x_{i+r/2} \cos p\theta_i +
          x_i \sin p\theta_i), \quad \theta_i = b^{-2i/r}

Source: Su et al., "RoFormer", arXiv:2104.09864, eq. (13). As in GPT-NeoX, a pair has one feature from each half.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.ops._frame.context import exactly
from scanl.ops._frame.fused import is_faster


def rotate(x: Tensor, positions: Tensor, width: int, base: float) -> Tensor:
    """Rotate the first `width` features of each head of x (B, T, H, K). positions: (B, T) or (1, T).   base: b.

    Computed in float32 or wider, the angles in float64: in float32 the angle at position 10^6 is wrong by 0.06.

    >>> x = torch.tensor([1.0, 0.0, 5.0]).view(1, 1, 1, 3)
    >>> [round(v, 4) for v in rotate(x, torch.tensor([[2]]), 2, 10000.0).flatten().tolist()]  # cos 2, sin 2
    [-0.4161, 0.9093, 5.0]
    """
    rates = base ** (-torch.arange(0, width, 2, device=x.device, dtype=torch.float64) / max(width, 1))
    angles = (positions[..., None] * rates)[:, :, None]
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    first, second, unturned = x.split([width // 2, width // 2, x.shape[-1] - width], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, unturned], -1).to(x.dtype)


def rotate_pairs(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate adjacent channels of x (..., K), two of which are a pair, by angles (..., A). Channels past 2 A stay.

    Computed in float32 or wider. Give the angles in float64.

    >>> [round(v, 4) for v in rotate_pairs(torch.tensor([1.0, 0.0]), torch.tensor([2.0])).tolist()]  # cos 2, sin 2
    [-0.4161, 0.9093]
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return turn_pairs(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the same, by the cosines and sines of the angles."""
    even = 2 * cos.shape[-1]
    if not exactly() and is_faster(x, cos, sin) and x.shape[-1] % 2 == 0:  # as complex numbers, in one pass over memory
        turn = torch.complex(cos, sin)
        rest = x.shape[-1] // 2 - cos.shape[-1]
        turn = F.pad(turn, (0, rest), value=1) if rest else turn
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
    re, im = x[..., :even].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([re * cos - im * sin, re * sin + im * cos], -1).flatten(-2)
    return turned if even == x.shape[-1] else torch.cat([turned, x[..., even:]], -1)
