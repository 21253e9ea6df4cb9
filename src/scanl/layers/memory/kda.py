"""Kimi delta attention: the delta rule with a decay for each channel of the keys."""

from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.parts.delta_memory import DeltaMemory, ExpandHead, KeyHeads
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.layers.parts.time_step import time_step_bias


@registry.register("kda")
class KDA(DeltaMemory):
    """Kimi delta attention: gated DeltaNet with a decay for each key channel, and low-rank gates.

    Queries, keys and values are convolved; queries and keys have unit length. `kda_negative_eigenvalues` has write
    strengths up to 2.

    Parameters as in flash-linear-attention: `gated_deltanet`'s without a_proj; f_proj.0 (V, D), f_proj.1 (H K,
    V); g_proj.0 (V, D), g_proj.1 (H V, V) with a bias; A_log (H), dt_bias (H K), without weight decay.
    Initialisation: A_log = ln U(1, 16), or 0 for safe_gate; softplus(dt_bias) log-uniform in [0.001, 0.1]; linear
    weights N(0, 0.02²), their bias 0; the convolutions as in PyTorch.
    """

    id = "S-kda"
    aliases = ("kimi_delta_attention",)
    equation = (
        "S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T,  o_t = S_t^T q_t / sqrt(K),  "
        "alpha_t = exp(-exp(A_log) softplus(W_2 W_1 x_t + b));  y = W_o (RMSNorm(o) * sigmoid(W_4 W_3 x + c))"
    )
    source = 'Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", arXiv:2510.26692, eq. (1)'
    forget_gate = False  # its decay is its own

    def __init__(
        self,
        dim: options.Dim,
        head_dim: Annotated[options.HeadDim, "K, channels of a query and of a key"] = 128,
        expand_v: Annotated[ExpandHead, "V / head_dim; V is also the rank of the weights of the two gates"] = 1.0,
        num_heads: Annotated[KeyHeads | None, "heads of queries and keys; by default dim / head_dim"] = None,
        output_gate: Annotated[options.OutputGate, "a low-rank sigmoid gate after the norm"] = True,
        allow_neg_eigval: options.NegativeEigenvalues = False,
        safe_gate: Annotated[bool, "g_t = -5 σ(e^{A_log} (W_2 W_1 x_t + b)), which is never below -5"] = False,
        **shared: Any,
    ) -> None:
        self.allow_neg_eigval = allow_neg_eigval
        super().__init__(
            dim,
            expand_v=expand_v,
            head_dim=head_dim,
            num_heads=max(1, dim // head_dim) if num_heads is None else num_heads,
            output_gate=False,
            **shared,
        )
        heads, value = self.num_v_heads, self.head_v_dim
        self.safe_gate = safe_gate
        self.A_log = nn.Parameter(torch.zeros(heads) if safe_gate else (1 + 15 * torch.rand(heads)).log())
        self.dt_bias = nn.Parameter(time_step_bias(heads * head_dim))
        self.f_proj = nn.Sequential(nn.Linear(dim, value, bias=False), nn.Linear(value, heads * head_dim, bias=False))
        if output_gate:
            self.g_proj = nn.Sequential(nn.Linear(dim, value, bias=False), nn.Linear(value, heads * value))
        self.o_norm = GatedRMSNorm(value, self.o_norm.eps, activation="sigmoid")
        for linear in (*self.f_proj, *(self.g_proj.children() if self.g_proj is not None else ())):
            assert isinstance(linear, nn.Linear)
            nn.init.normal_(linear.weight, std=0.02)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def _log_decay(self, x: Tensor) -> Tensor:
        """Return the log decay of each step and channel, (B, T, H, K)."""
        f = (widen(self.f_proj(x)) + widen(self.dt_bias)).unflatten(-1, (self.num_v_heads, self.head_dim))
        rate = widen(self.A_log).exp()[:, None]
        return -5 * (rate * f).sigmoid() if self.safe_gate else -rate * F.softplus(f)


@registry.preset("kda_negative_eigenvalues", allow_neg_eigval=True)
class KDANegativeEigenvalues(KDA):
    """Kimi delta attention with write strengths up to 2: its transition has eigenvalues from -1 to 1."""

    id = "S-kda"
    equation = KDA.equation.replace("beta_t", "2 beta_t")
    source = (
        'Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", arXiv:2510.26692, eq. (1); '
        'Grazzi et al., "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues", '
        "arXiv:2411.12537, sec. 4"
    )
