"""The norm that many recurrent layers end in: root mean square over a head, and a gate."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers.base import widen


class GatedRMSNorm(nn.Module):
    r"""y = x / rms(x) ⊙ weight ⊙ SiLU(gate), over the last axis; with `gate_first`, x is gated before the norm.

    weight: (width,), ones. Computed in float32 or wider. Source: the norm of Gated Linear Attention, arXiv:2312.06635,
    section 4.4, there LayerNorm; gate first as in Mamba-2, arXiv:2405.21060, section 7.1.
    """

    def __init__(self, width: int, eps: float = 1e-5, gate_first: bool = False) -> None:
        super().__init__()
        self.norm_shape, self.eps, self.gate_first = (width,), eps, gate_first
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        gate = F.silu(widen(gate))
        wide = widen(x)
        if self.gate_first:
            return F.rms_norm(wide * gate, self.norm_shape, widen(self.weight), self.eps).to(x.dtype)
        return (F.rms_norm(wide, self.norm_shape, widen(self.weight), self.eps) * gate).to(x.dtype)
