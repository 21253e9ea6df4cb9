"""HGRN2: a matrix memory whose keys are one minus its decays."""

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.lower_bound import LowerBoundedLayer
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.ops import linear_attention
from scanl.options import divides


@registry.register("hgrn2")
class HGRN2(LowerBoundedLayer):
    """HGRN2: outer products expand the state of HGRN. The key is the input gate, which is one minus the forget gate.

    The lower bound γ of the forget gate rises with depth, see `LowerBoundedLayer`.

    As in flash-linear-attention, o is divided by sqrt(K) before the norm, of which only the norm's ε takes notice. The
    paper does not divide it.

    Parameters as in flash-linear-attention: q_proj, f_proj, i_proj, o_proj (D, D); g_norm.weight (D).
    Initialisation: linear weights N(0, 0.02²), norm 1, Γ = 0.
    """

    id = "S-hgrn2"
    equation = (
        "S_t = Diag(f_t) S_{t-1} + (1 - f_t) v_t^T,  o_t = S_t^T SiLU(W_q x_t),  "
        "f_t = gamma + (1 - gamma) sigmoid(W_f x_t);  y = W_o RMSNorm(o)"
    )
    source = (
        'Qin et al., "HGRN2: Gated Linear RNNs with State Expansion", arXiv:2404.07904, eq. (5) and sec. 3.2; '
        "the released code has SimpleRMSNorm"
    )
    op = "linear_attention"
    state: ClassVar = StateAxes("dim // head_dim, head_dim, head_dim", "S")
    sample: ClassVar = {"head_dim": 4}
    residual_out = "o_proj"

    def __init__(
        self,
        dim: options.Dim,
        head_dim: Annotated[
            options.HeadDim | None,
            divides("dim"),
            "K, channels of each of the H = dim / K heads; by default 128, or dim if that is smaller",
        ] = None,
        norm_eps: Annotated[options.NormEps, "ε of the norm, which is over all heads"] = 1e-5,
    ) -> None:
        super().__init__()
        head_dim = min(128, dim) if head_dim is None else head_dim
        if dim % head_dim:
            self._refuse("head_dim", head_dim, f"a divisor of dim={dim}")
        self.dim, self.head_dim = dim, head_dim
        self.q_proj, self.f_proj, self.i_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.g_norm = GatedRMSNorm(dim, norm_eps)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        q, f, v = F.silu(self.q_proj(x)), widen(self.f_proj(x)), self.i_proj(x)
        # The sigmoid of -f by its logarithm: where it rounds to 1, its derivative does not round to 0.
        k = (1 - self.lower_bound()) * F.logsigmoid(-f).exp()
        g = F.logsigmoid(f) if self._bound is None else torch.log1p(-k)  # without a bound, k may round to 1
        q, k, v, g = (tensor.unflatten(-1, (-1, self.head_dim)) for tensor in (q, k, v, g))
        o, last = linear_attention(q, k, v, g, state=state, cu_seqlens=cu_seqlens)
        return self.o_proj(self.g_norm(o.flatten(-2), None).to(x.dtype)), last
