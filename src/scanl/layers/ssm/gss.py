"""Gated state space: a DSS of reduced width between two gated linear maps."""

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import Hint, Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.module import Module
from scanl.layers.parts.diagonal_ssm import diagonal_ssm
from scanl.layers.ssm._base import BY_CONVOLUTION


class GSSKernel(Module):
    """A norm and diagonal systems with steps of 1: Lambda_real, Lambda_imag (N); C_real, C_imag (H, N); param_D (H)."""

    def __init__(self, width: int, state_dim: int, imag_exp: bool) -> None:
        super().__init__()
        self.imag_exp = imag_exp
        self.norm = nn.LayerNorm(width)
        self.Lambda_real = nn.Parameter(torch.randn(state_dim))
        self.Lambda_imag = nn.Parameter(torch.randn(state_dim))
        self.C_real = nn.Parameter(torch.randn(width, state_dim))
        self.C_imag = nn.Parameter(torch.randn(width, state_dim))
        self.param_D = nn.Parameter(torch.randn(width))

    def system(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return A and B (1, N), C (H, N) and steps of 1."""
        imag = widen(self.Lambda_imag)
        A = torch.complex(-widen(self.Lambda_real).exp(), imag.exp() if self.imag_exp else imag)[None]
        C = torch.complex(widen(self.C_real), widen(self.C_imag)) / 2
        return A, torch.ones_like(A), C, torch.ones_like(A.real[0, :1])


@registry.register("gss")
class GSS(Layer):
    """GSS: diagonal systems on few channels. Linear maps widen their output, and a branch without memory gates it.

    The layer is the block of the paper without its first norm and its sum with the input, which a stack adds. Modes
    are not paired with their conjugates, and a step is 1: there is no Δ.

    Parameters as in the package gated-state-spaces-pytorch: to_u.0 (E, D), to_v.0 (H, D), to_gate (E, H), without
    biases; to_out (D, E) with bias; dss: norm, Lambda_real, Lambda_imag (N), C_real, C_imag (H, N), param_D (H). There
    `to_u` makes the gate, and `to_v` the input of the systems. λ and C have no weight decay.
    Initialisation: ln(-Re λ), ln(Im λ) or Im λ, Re C, Im C and D N(0, 1); the linear maps as in PyTorch.
    """

    id = "S-gss"
    aliases = ("gated_state_space",)
    equation = (
        "s_t = exp(lambda) * s_{t-1} + (exp(lambda) - 1)/lambda * u_t,  u = LN(GELU(W_u x)),  "
        "y = W_o (GELU(W_v x) * W_y (Re(C s) + D * u)) + b"
    )
    source = (
        'Mehta, Gupta, Cutkosky and Neyshabur, "Long Range Language Modeling via Gated State Spaces", '
        "arXiv:2206.13947, sec. 3 and its listings"
    )
    op = "linear_scan"
    state: ClassVar = StateAxes("width, state_dim", dtype=torch.complex64)
    excused: ClassVar = BY_CONVOLUTION
    sample: ClassVar = {"state_dim": 3, "width": 4, "expand": 2}
    hints: ClassVar = dict.fromkeys(
        ("dss.Lambda_real", "dss.Lambda_imag", "dss.C_real", "dss.C_imag"), Hint(weight_decay=False, lr="lr")
    )

    def __init__(
        self,
        dim: options.Dim,
        expand: Annotated[options.Expand, "E/D, where E is the width of the gate; 4 in the paper"] = 3,
        width: Annotated[options.Width | None, "H, channels of the systems; by default D/4, at least 1"] = None,
        state_dim: Annotated[options.StateDim, "N, complex modes of each channel; one spectrum for all channels"] = 512,
        imag_exp: Annotated[
            bool, "Im λ is the exponential of its parameter, as in the paper; otherwise the parameter"
        ] = True,
        lr: Annotated[options.LearningRate, "learning rate of λ and C; None for the optimizer's"] = None,
    ) -> None:
        super().__init__()
        width = max(1, dim // 4) if width is None else width
        wide = int(expand * dim)
        if wide < 1:
            self._refuse("expand", expand, f"at least 1/{dim} because of dim={dim}")
        self.dim, self.width, self.state_dim, self.lr = dim, width, state_dim, lr
        self.to_u = nn.Sequential(nn.Linear(dim, wide, bias=False), nn.GELU())
        self.to_v = nn.Sequential(nn.Linear(dim, width, bias=False), nn.GELU())
        self.dss = GSSKernel(width, state_dim, imag_exp)
        self.to_gate = nn.Linear(width, wide, bias=False)
        self.to_out = nn.Linear(wide, dim)

    def run(
        self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, timespans: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        u = widen(self.dss.norm(self.to_v(x)))
        y, last = diagonal_ssm(u, *self.dss.system(), state, cu_seqlens=cu_seqlens, timespans=timespans)
        y = torch.addcmul(y, u, widen(self.dss.param_D)).to(x.dtype)
        return self.to_out(self.to_gate(y) * self.to_u(x)), last
