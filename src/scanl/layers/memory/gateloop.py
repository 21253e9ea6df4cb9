"""GateLoop: a linear recurrence with a complex transition that depends on the input."""

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.ops import linear_attention, linear_scan


@registry.register("gateloop")
class GateLoop(Layer):
    """GateLoop: a complex decay that depends on the input. By default a head has one channel and one complex state.

    Parameters as in the gateloop-transformer of PyPI: to_qkv (3 width, D); to_a.0 (2 width, D) with a bias, α and β
    adjacent; maybe_sub_ln, weight and bias (width); to_gates.0 (width, D); to_out (D, width).
    Differs: when heads have several channels, that program has one transition for each head. This layer has one for
    each key channel, as the paper does. That program also scales the transition's gradient by 0.9; this layer does not.
    Initialisation: as in PyTorch.
    """

    id = "S-gateloop"
    equation = (
        "S_t = diag(a_t) S_{t-1} + k_t v_t^T,  o_t = Re(S_t^T q_t),  a_t = sigmoid(alpha_t) e^{i beta_t},  "
        "alpha_t, beta_t = W_a x_t + b_a;  y = W_o (LN(o) * SiLU(W_g x))"
    )
    source = (
        'Katsch, "GateLoop: Fully Data-Controlled Linear Recurrence for Sequence Modeling", arXiv:2311.01927, sec. 3'
    )
    op = "linear_scan"
    state: ClassVar = StateAxes("num_heads, head_dim, head_dim", "S", dtype=torch.complex64)
    sample: ClassVar = {"width": 10}
    residual_out = "to_out"

    def __init__(
        self,
        dim: options.Dim,
        num_heads: Annotated[
            options.FreeHeads | None,
            "H heads of K = width / H channels; by default width, the best in the paper",
        ] = None,
        width: Annotated[
            options.Width | None, "channels of queries, keys, values and of the transition; by default dim"
        ] = None,
        output_gate: Annotated[options.OutputGate, "a SiLU gate on the output"] = True,
        output_norm: Annotated[options.OutputNorm, "LayerNorm over the channels before the gate"] = True,
        polar: Annotated[
            bool,
            "the transition has the angle of the complex number α + iβ and the magnitude σ(|α + iβ|), which is at "
            "least 1/2, as in gateloop-transformer",
        ] = False,
    ) -> None:
        super().__init__()
        width = width or dim
        num_heads = num_heads or width
        if width % num_heads:
            self._refuse("num_heads", num_heads, f"a divisor of width={width}")
        self.dim, self.num_heads, self.head_dim, self.polar = dim, num_heads, width // num_heads, polar
        self.to_qkv = nn.Linear(dim, 3 * width, bias=False)
        self.to_a = nn.Sequential(nn.Linear(dim, 2 * width))
        self.maybe_sub_ln = nn.LayerNorm(width) if output_norm else nn.Identity()
        self.to_gates = nn.Sequential(nn.Linear(dim, width, bias=False), nn.SiLU()) if output_gate else None
        self.to_out = nn.Linear(width, dim, bias=False)

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        heads = (self.num_heads, self.head_dim)
        q, k, v = (tensor.unflatten(-1, heads) for tensor in widen(self.to_qkv(x)).chunk(3, -1))
        alpha, phase = widen(self.to_a(x)).unflatten(-1, (*heads, 2)).unbind(-1)
        if self.polar:
            number = torch.complex(alpha, phase)
            alpha, phase = number.abs(), number.angle()
        if self.head_dim == 1:
            kv = torch.complex(k * v, torch.zeros_like(v))[..., None]
            S, last = linear_scan(kv, torch.polar(alpha.sigmoid(), phase)[..., None], state, cu_seqlens=cu_seqlens)
            o = q * S.real[..., 0]
        else:
            g = torch.complex(F.logsigmoid(alpha), phase)
            o, last = linear_attention(q, k, v, g, state=state, scale=1.0, cu_seqlens=cu_seqlens)
            o = o.real
        y = self.maybe_sub_ln(o.to(x.dtype).flatten(-2))
        return self.to_out(y if self.to_gates is None else y * self.to_gates(x)), last
