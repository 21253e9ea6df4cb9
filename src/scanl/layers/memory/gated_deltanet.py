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

    Queries and keys are convolved and have unit length. `deltaproduct` and `gated_deltaproduct` write several times a
    step.

    Args:
        dim: D, model width.
        expand_v: V = expand_v * head_dim channels of a value.
        head_dim: K, channels of a query and of a key; by default 3/4 D / num_heads, rounded, as the authors have it:
            256 for their D of 2,048.
        num_heads: heads of queries and keys.
        num_v_heads: H, heads of values, a multiple of num_heads: H / num_heads of them use the same head of keys; by
            default num_heads.
        num_householder: n, writes per step. A step decays the memory once, then corrects it n times, each time with a
            key, a value and a strength of its own.
        use_forget_gate: the decay; without it a_proj, A_log and dt_bias are absent.
        use_gate: a SiLU gate after the norm of the output.
        use_short_conv: convolutions over q, k and v.
        allow_neg_eigval: write strengths up to 2 instead of 1.
        conv_size, conv_bias: W, the window of the convolutions, and their bias.
        norm_eps: ε of the norm.

    Parameters as in flash-linear-attention: q_proj (num_heads K, D); k_proj (n num_heads K, D); v_proj (n H V, D);
    g_proj (H V, D); a_proj (H, D); b_proj (n H, D); q_conv1d, k_conv1d, v_conv1d with weight (width, 1, W); A_log,
    dt_bias (H), without weight decay; o_norm.weight (V); o_proj (D, H V).
    Initialisation: A_log = ln U(0, 16), softplus(dt_bias) log-uniform in [0.001, 0.1], linear weights N(0, 0.02²),
    the convolutions as in PyTorch and
    in fla's layers. (fla's models draw convolutions from N(0, 0.02²).)
    State: S (B, H, K, V), zeros, and the last inputs of the convolutions.
    """

    id = "S-deltanet"
    aliases = ("GDN",)
    equation = (
        "S_t = (I - beta_t k_t k_t^T) alpha_t S_{t-1} + beta_t k_t v_t^T,  o_t = S_t^T q_t / sqrt(K);  "
        "y = W_o (RMSNorm(o) * SiLU(W_g x))"
    )
    source = 'Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464, eq. (10) and sec. 3.4'
    op = "delta_rule"
    sample: ClassVar = {"head_dim": 3, "num_heads": 2, "num_v_heads": 4}
    residual_out = "o_proj"
    hints: ClassVar = dict.fromkeys(("A_log", "dt_bias"), UNDECAYED)
    keys_by_dim: ClassVar[float] = 0.75  # channels of all heads of keys over D, by default

    g_proj: nn.Module | None

    def __init__(
        self,
        dim: int,
        expand_v: float = 2.0,
        head_dim: int | None = None,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        num_householder: int = 1,
        use_forget_gate: bool = True,
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
            head_dim = max(1, round(self.keys_by_dim * dim / max(1, num_heads)))
        if min(head_dim, num_heads, num_householder, conv_size) < 1:
            found = f"head_dim is {head_dim}, num_heads is {num_heads}, num_householder is {num_householder} and "
            found += f"conv_size is {conv_size}"
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
        self.num_householder, self.allow_neg_eigval = num_householder, allow_neg_eigval
        widths = (num_heads * head_dim, num_householder * num_heads * head_dim, num_householder * heads * value)
        self.memory = (heads, head_dim, value)
        self._make_projections(widths, conv_size if use_short_conv else None, conv_bias)
        self.b_proj = nn.Linear(dim, num_householder * heads, bias=False)
        if use_forget_gate:
            self.a_proj = nn.Linear(dim, heads, bias=False)
            self.A_log = nn.Parameter((16 * (1 - torch.rand(heads))).log())  # 1 - U is never 0
            self.dt_bias = nn.Parameter(time_step_bias(heads))
        else:
            self.register_parameter("A_log", None)
            self.register_parameter("dt_bias", None)
        self.use_forget_gate = use_forget_gate
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
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        k = self._writes(k, (self.num_heads, self.head_dim))
        v = self._writes(v, (self.num_v_heads, self.head_v_dim))
        beta = self._writes(widen(self.b_proj(x)).sigmoid(), (self.num_v_heads,))
        beta = beta * 2 if self.allow_neg_eigval else beta
        o, recurrent = self._remember(q, k, v, beta, self._log_decay(x), recurrent, cu_seqlens)
        gate = None if self.g_proj is None else self.g_proj(x).view_as(o)
        return self.o_proj(self.o_norm(o, gate).to(x.dtype).flatten(-2)), MemoryState(recurrent, conv)

    def _writes(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the n writes of each step, one after another: (B, T, n S) to (B, T n, *shape), S the size of shape."""
        return x.unflatten(-1, (self.num_householder, *shape)).flatten(1, 2)

    def _log_decay(self, x: Tensor) -> Tensor | None:
        """Return the log decay of each step, (B, T, H); None without one."""
        if not self.use_forget_gate:
            return None
        return -widen(self.A_log).exp() * F.softplus(widen(self.a_proj(x)) + widen(self.dt_bias))

    def _remember(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor | None,
        state: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Write into the memory and read it: q and g have T steps, the others T n."""
        n = self.num_householder
        if n > 1:  # a step's decay is before its first write, and its read after its last
            q = F.pad(q.unsqueeze(2), (0, 0, 0, 0, n - 1, 0)).flatten(1, 2)
            g = None if g is None else F.pad(g.unsqueeze(2), (0, 0, 0, n - 1)).flatten(1, 2)
            cu_seqlens = None if cu_seqlens is None else cu_seqlens * n
        o, last = delta_rule(unit(widen(q), 1e-6), k, v, beta, g, state, normalize_keys=True, cu_seqlens=cu_seqlens)
        return o[:, n - 1 :: n], last


@preset("gated_deltanet_negative_eigenvalues", allow_neg_eigval=True)
class GatedDeltaNetNegativeEigenvalues(GatedDeltaNet):
    """Gated DeltaNet with write strengths up to 2: its transition has eigenvalues from -1 to 1."""

    id = "S-deltanet"
    equation = (
        "S_t = (I - 2 beta_t k_t k_t^T) alpha_t S_{t-1} + 2 beta_t k_t v_t^T,  o_t = S_t^T q_t / sqrt(K);  "
        "y = W_o (RMSNorm(o) * SiLU(W_g x))"
    )
    source = 'Grazzi et al., "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues", arXiv:2411.12537'


@preset("qwen3_next_deltanet", expand_v=1.0, num_heads=16, num_v_heads=32, norm_eps=1e-6)
class Qwen3NextDeltaNet(GatedDeltaNet):
    """Gated DeltaNet in the proportions of Qwen3-Next: 16 heads of keys and 32 of values, with D / 16 channels each.

    Here the default of head_dim is D / num_heads, rounded. So at the width of the released model, 2,048, the heads have
    its 128 channels.
    """

    id = "S-deltanet"
    equation = GatedDeltaNet.equation
    keys_by_dim = 1.0
    source = 'Qwen team, "Qwen3-Next", 2025, as Qwen3NextGatedDeltaNet in transformers'


@preset("gated_deltaproduct", num_householder=2, allow_neg_eigval=True)
class GatedDeltaProduct(GatedDeltaNet):
    """Gated DeltaProduct: several corrections a step, so that a step's transition can be any rotation of a plane."""

    id = "S-deltaproduct"
    equation = (
        "S_t = (I - b_n k_n k_n^T) ... (I - b_1 k_1 k_1^T) alpha_t S_{t-1} + writes,  b_j = 2 beta_{t,j},  "
        "o_t = S_t^T q_t / sqrt(K);  y = W_o (RMSNorm(o) * SiLU(W_g x))"
    )
    source = (
        'Siems et al., "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products", '
        "arXiv:2502.10297, sec. 3"
    )


@preset("deltaproduct", num_householder=2, allow_neg_eigval=True, use_forget_gate=False, use_gate=False)
class DeltaProduct(GatedDeltaNet):
    """DeltaProduct: several corrections a step, and no decay."""

    id = "S-deltaproduct"
    equation = (
        "S_t = (I - b_n k_n k_n^T) ... (I - b_1 k_1 k_1^T) S_{t-1} + writes,  b_j = 2 beta_{t,j},  "
        "o_t = S_t^T q_t / sqrt(K);  y = W_o RMSNorm(o)"
    )
    source = GatedDeltaProduct.source
