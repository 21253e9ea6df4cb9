r"""Gated DeltaNet: a matrix memory that decays and is written by the delta rule.

.. math:: S_t = (I - \beta_t k_t k_t^\top)\, \alpha_t S_{t-1} + \beta_t k_t v_t^\top, \quad
          o_t = S_t^\top q_t / \sqrt{K}, \quad \alpha_t = e^{-e^{A_{\log}} \mathrm{softplus}(W_a x_t + b)}
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.base import UNDECAYED, preset, register, widen
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.layers.parts.query_key_value import MemoryState, QueryKeyValue
from scanl.layers.parts.time_step import time_step_bias
from scanl.ops import delta_rule
from scanl.ops.delta_rule import unit


@register("gated_deltanet")
class GatedDeltaNet(QueryKeyValue):
    """Gated DeltaNet: the delta rule with a decay; each head and step has its own decay and write strength.

    Queries and keys are convolved and have unit length.

    Args:
        dim: D, model width.
        expand_v: V = expand_v * head_dim channels of a value.
        head_dim: K, channels of a query and of a key; by default 3/4 D / num_heads, rounded, as the authors have it:
            256 for their D of 2,048.
        num_heads: heads of queries and keys.
        num_v_heads: H, heads of values, a multiple of num_heads: H / num_heads of them use the same head of keys; by
            default num_heads.
        use_gate: a SiLU gate after the norm of the output.
        use_short_conv: convolutions over q, k and v.
        allow_neg_eigval: write strengths up to 2 instead of 1.
        conv_size, conv_bias: W, the window of the convolutions, and their bias.
        norm_eps: ε of the norm.

    Parameters as in flash-linear-attention: q_proj, k_proj (num_heads K, D); v_proj, g_proj (H V, D); a_proj, b_proj
    (H, D); q_conv1d, k_conv1d, v_conv1d with weight (width, 1, W); A_log, dt_bias (H), without weight decay;
    o_norm.weight (V); o_proj (D, H V).
    Initialisation: A_log = ln U(0, 16), softplus(dt_bias) log-uniform in [0.001, 0.1], linear weights N(0, 0.02²),
    the convolutions as in PyTorch.
    State: S (B, H, K, V), zeros, and the last inputs of the convolutions.
    """

    id = "S-deltanet"
    equation = (
        "S_t = (I - beta_t k_t k_t^T) alpha_t S_{t-1} + beta_t k_t v_t^T,  o_t = S_t^T q_t / sqrt(K);  "
        "y = W_o (RMSNorm(o) * SiLU(W_g x))"
    )
    source = 'Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464, eq. (10) and sec. 3.4'
    op = "delta_rule"
    sample: ClassVar = {"head_dim": 3, "num_heads": 2, "num_v_heads": 4}
    residual_out = "o_proj"
    hints: ClassVar = dict.fromkeys(("A_log", "dt_bias"), UNDECAYED)

    def __init__(
        self,
        dim: int,
        expand_v: float = 2.0,
        head_dim: int | None = None,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        heads = num_heads if num_v_heads is None else num_v_heads
        if head_dim is None:
            head_dim = max(1, round(3 * dim / (4 * max(1, num_heads))))
        if min(head_dim, num_heads, conv_size) < 1:
            found = f"head_dim is {head_dim}, num_heads is {num_heads} and conv_size is {conv_size}"
            raise ConfigError(f"{self._who()}: {found}, expected at least 1")
        if heads < 1 or heads % num_heads:
            raise ConfigError(f"{self._who()}: num_v_heads is {heads}, expected a multiple of num_heads={num_heads}")
        value = round(expand_v * head_dim)
        if value < 1 or abs(value - expand_v * head_dim) > 1e-5 * value:
            raise ConfigError(
                f"{self._who()}: expand_v is {expand_v}, expected a whole number of channels of head_dim={head_dim}"
            )
        self.dim = dim
        self.num_heads, self.num_v_heads, self.head_dim, self.head_v_dim = num_heads, heads, head_dim, value
        self.allow_neg_eigval = allow_neg_eigval
        widths = (num_heads * head_dim, num_heads * head_dim, heads * value)
        self.memory = (heads, head_dim, value)
        self._make_projections(widths, conv_size if use_short_conv else None, conv_bias)
        self.a_proj, self.b_proj = (nn.Linear(dim, heads, bias=False) for _ in range(2))
        self.A_log = nn.Parameter((16 * (1 - torch.rand(heads))).log())  # 1 - U is never 0
        self.dt_bias = nn.Parameter(time_step_bias(heads))
        self.g_proj = nn.Linear(dim, heads * value, bias=False) if use_gate else None
        self.o_norm = GatedRMSNorm(value, norm_eps)
        self.o_proj = nn.Linear(heads * value, dim, bias=False)
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def forward(
        self, x: Tensor, state: MemoryState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, MemoryState]:
        (q, k, v), recurrent, conv = self._read(x, state, cu_seqlens)
        q, k = (part.unflatten(-1, (self.num_heads, self.head_dim)) for part in (q, k))
        v = v.unflatten(-1, (self.num_v_heads, self.head_v_dim))
        beta = widen(self.b_proj(x)).sigmoid() * (2 if self.allow_neg_eigval else 1)
        g = -widen(self.A_log).exp() * F.softplus(widen(self.a_proj(x)) + widen(self.dt_bias))
        o, recurrent = delta_rule(
            unit(widen(q), 1e-6), k, v, beta, g, recurrent, normalize_keys=True, cu_seqlens=cu_seqlens
        )
        gate = None if self.g_proj is None else self.g_proj(x).view_as(o)
        return self.o_proj(self.o_norm(o, gate).to(x.dtype).flatten(-2)), MemoryState(recurrent, conv)


@preset("gated_deltanet_negative_eigenvalues", allow_neg_eigval=True)
class GatedDeltaNetNegativeEigenvalues(GatedDeltaNet):
    """Gated DeltaNet with write strengths up to 2: its transition has eigenvalues from -1 to 1."""

    id = "S-deltanet"
    equation = (
        "S_t = (I - 2 beta_t k_t k_t^T) alpha_t S_{t-1} + 2 beta_t k_t v_t^T,  o_t = S_t^T q_t / sqrt(K);  "
        "y = W_o (RMSNorm(o) * SiLU(W_g x))"
    )
    source = 'Grazzi et al., "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues", arXiv:2411.12537'


@preset("qwen3_next_deltanet", expand_v=1.0, head_dim=128, num_heads=16, num_v_heads=32, norm_eps=1e-6)
class Qwen3NextDeltaNet(GatedDeltaNet):
    """Gated DeltaNet with the sizes of Qwen3-Next: 16 heads of keys and 32 of values, with 128 channels each.

    These sizes are those of the released model, whose width is 2,048. They do not depend on `dim`.
    """

    id = "S-deltanet"
    equation = GatedDeltaNet.equation
    source = 'Qwen team, "Qwen3-Next", 2025, as Qwen3NextGatedDeltaNet in transformers'
