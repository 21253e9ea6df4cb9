"""Norms over channels, computed in float32 or wider."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers.base import widen
from scanl.layers.module import Module
from scanl.ops.fused.gated import gated
from scanl.ops.fused.rms_norm import rms_norm


class GatedRMSNorm(Module):
    r"""y = x / rms(x) ⊙ weight ⊙ f(gate), over the last axis. With `gate_first`, x is gated before the norm.

    activation: f.   gate None: y = x / rms(x) ⊙ weight.   groups: number of equal parts of the last
    axis, each with its own rms.   weight: (width,), initially 1. Computed in float32 or wider.
    Source: the norm of Gated Linear Attention, arXiv:2312.06635, section 4.4, there LayerNorm; `gate_first` as in
    Mamba-2, arXiv:2405.21060, section 7.1.
    """

    def __init__(
        self,
        width: int,
        eps: float = 1e-5,
        gate_first: bool = False,
        groups: int = 1,
        activation: Literal["silu", "sigmoid"] = "silu",
    ) -> None:
        super().__init__()
        self.activation = activation
        self.parts, self.eps, self.gate_first = (groups, width // groups), eps, gate_first
        self.weight = nn.Parameter(torch.ones(width))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, groups={self.parts[0]}, eps={self.eps}, gate_first={self.gate_first}"

    def forward(self, x: Tensor, gate: Tensor | None) -> Tensor:
        y = self._gated(widen(x), gate) if self.gate_first else widen(x)
        if self.parts[0] == 1:
            y = rms_norm(y, widen(self.weight), self.eps)
        else:
            y = rms_norm(y.unflatten(-1, self.parts), None, self.eps).flatten(-2) * widen(self.weight)
        return (y if self.gate_first else self._gated(y, gate)).to(x.dtype)

    def _gated(self, y: Tensor, gate: Tensor | None) -> Tensor:
        if gate is None:
            return y
        return gated(widen(gate), y) if self.activation == "silu" else y * torch.sigmoid(widen(gate))


class HeadNorm(Module):
    """LayerNorm of each head of x (..., H, P), times weight (H P), which starts at 1. Returns (..., H P).

    zero_centered: the factor is 1 + weight, and weight starts at 0. Computed in float32 or wider.
    """

    def __init__(self, width: int, eps: float = 1e-5, zero_centered: bool = True) -> None:
        super().__init__()
        self.eps, self.center = eps, float(zero_centered)
        self.weight = nn.Parameter(torch.full((width,), 1 - self.center))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, eps={self.eps}"

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(widen(x), x.shape[-1:], eps=self.eps).flatten(-2) * (self.center + widen(self.weight))


class HeadGroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm` of an input (N, C), by the norm of rows: torch takes half of the time for it."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.unflatten(-1, (self.num_groups, -1))
        return torch.addcmul(self.bias, F.layer_norm(rows, rows.shape[-1:], eps=self.eps).flatten(-2), self.weight)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last axis, by `scanl.ops.fused.rms_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class ZeroCenteredRMSNorm(RMSNorm):
    """RMSNorm with the factor 1 + weight, computed in float32 or wider.

    The weight starts at 0, so weight decay pulls the factor to 1.
    """

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(widen(x), 1 + widen(self.weight), self.eps).to(x.dtype)


def simple_rms_norm(x: Tensor, eps: float = 1e-8) -> Tensor:
    """Return x / (rms(x) + eps), over the last axis, in float32 or wider; there are no parameters.

    Source: Qin et al., "TransNormerLLM", arXiv:2307.14995, eq. (11).
    """
    x = widen(x)
    return x / (x.norm(dim=-1, keepdim=True) * x.shape[-1] ** -0.5 + eps)
