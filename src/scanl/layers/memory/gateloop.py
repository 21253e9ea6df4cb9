r"""GateLoop: a linear recurrence with a complex transition that depends on the input.

.. math:: S_t = \mathrm{diag}(a_t) S_{t-1} + k_t v_t^\top, \quad o_t = \mathrm{Re}(S_t^\top q_t), \quad
          a_t = \sigma(\alpha_t) e^{i \beta_t}, \; (\alpha_t, \beta_t) = W_a x_t + b_a
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.base import Layer, register, widen
from scanl.layers.state import Device, DType
from scanl.ops import linear_attention, linear_scan


@register("gateloop")
class GateLoop(Layer):
    """GateLoop: a complex decay that depends on the input. By default a head has one channel and one complex state.

    Args:
        dim: D, model width.
        heads: H, of K = dim_inner / H channels each; by default dim_inner, the best choice in the paper.
        dim_inner: channels of q, k and v, and of the transition; by default D.
        add_swish_gating: a SiLU gate on the output.
        sub_ln: LayerNorm over the channels before the gate.
        polar: the transition has the angle of the complex number α + iβ and the magnitude σ(|α + iβ|), which is at
            least 1/2, as in gateloop-transformer.

    Parameters as in the gateloop-transformer of PyPI: to_qkv (3 dim_inner, D); to_a.0 (2 dim_inner, D) with a bias, α
    and β adjacent; maybe_sub_ln, weight and bias (dim_inner); to_gates.0 (dim_inner, D); to_out (D, dim_inner).
    Differs: when heads have several channels, that program has one transition for each head. This layer has one for
    each key channel, as the paper does. That program also scales the transition's gradient by 0.9; this layer does not.
    Initialisation: as in PyTorch.
    State: S (B, H, K, K) complex, zeros.
    """

    id = "S-gateloop"
    equation = (
        "S_t = diag(a_t) S_{t-1} + k_t v_t^T,  o_t = Re(S_t^T q_t),  a_t = sigmoid(alpha_t) e^{i beta_t};  "
        "y = W_o (LN(o) * SiLU(W_g x))"
    )
    source = (
        'Katsch, "GateLoop: Fully Data-Controlled Linear Recurrence for Sequence Modeling", arXiv:2311.01927, sec. 3'
    )
    op = "linear_scan"
    sample: ClassVar = {"dim_inner": 10}
    residual_out = "to_out"

    def __init__(
        self,
        dim: int,
        heads: int | None = None,
        dim_inner: int | None = None,
        add_swish_gating: bool = True,
        sub_ln: bool = True,
        polar: bool = False,
    ) -> None:
        super().__init__()
        inner = dim if dim_inner is None else dim_inner
        heads = inner if heads is None else heads
        if inner < 1 or heads < 1 or inner % heads:
            raise ConfigError(f"gateloop: heads is {heads}, expected a divisor of dim_inner={inner}")
        self.dim, self.heads, self.size, self.polar = dim, heads, inner // heads, polar
        self.to_qkv = nn.Linear(dim, 3 * inner, bias=False)
        self.to_a = nn.Sequential(nn.Linear(dim, 2 * inner))
        self.maybe_sub_ln = nn.LayerNorm(inner) if sub_ln else nn.Identity()
        self.to_gates = nn.Sequential(nn.Linear(dim, inner, bias=False), nn.SiLU()) if add_swish_gating else None
        self.to_out = nn.Linear(inner, dim, bias=False)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        shape = (batch_size, self.heads, self.size, self.size)
        return self._zeros(*shape, device=device, dtype=dtype, at_least=torch.complex64)

    def forward(
        self, x: Tensor, state: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self._check(x, state, cu_seqlens)
        heads = (self.heads, self.size)
        q, k, v = (part.unflatten(-1, heads) for part in widen(self.to_qkv(x)).chunk(3, -1))
        alpha, phase = widen(self.to_a(x)).unflatten(-1, (*heads, 2)).unbind(-1)
        if self.polar:
            number = torch.complex(alpha, phase)
            alpha, phase = number.abs(), number.angle()
        if self.size == 1:
            kv = torch.complex(k * v, torch.zeros_like(v))[..., None]
            S, last = linear_scan(kv, torch.polar(alpha.sigmoid(), phase)[..., None], state, cu_seqlens=cu_seqlens)
            o = q * S.real[..., 0]
        else:
            g = torch.complex(F.logsigmoid(alpha), phase)
            o, last = linear_attention(q, k, v, g, state=state, scale=1.0, cu_seqlens=cu_seqlens)
            o = o.real
        y = self.maybe_sub_ln(o.to(x.dtype).flatten(-2))
        return self.to_out(y if self.to_gates is None else y * self.to_gates(x)), last
