r"""Linear attention: an inner product of features replaces the exponential kernel of softmax attention.

.. math:: S_t = S_{t-1} + \phi(k_t) v_t^\top, \; z_t = z_{t-1} + \phi(k_t), \quad
          o_t = \frac{S_t^\top \phi(q_t)}{z_t^\top \phi(q_t)}
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.base import Layer, as_widened, register, widen
from scanl.layers.parts.feature_map import FeatureMap
from scanl.layers.parts.kernel_memory import attend_by_kernel
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.layers.parts.positions import positions
from scanl.layers.parts.query_key_value import whole_heads
from scanl.layers.state import Device, DType
from scanl.ops import linear_attention, noncausal_linear_attention

MANY = 256  # features of a head; up to there a kernel of `linear_attention` costs less than scores of pairs of steps


class LinearAttentionState(NamedTuple):
    """State of `LinearAttention`.

    recurrent: S (B, H, K', V); z is one more column if the layer normalises.
    steps: number of steps read (B, 1), int64; None if the feature map does not need it.
    """

    recurrent: Tensor
    steps: Tensor | None


@register("linear_attention")
class LinearAttention(Layer):
    """Linear attention with any feature map, normalised or not, causal or not.

    The defaults are the linear transformer. Models with other options have their own names: `performer`, `rfa`,
    `rfa_gate`, `arc_cosine_attention`, `dpfp`, `fwp`, `cosformer`, `polynomial_attention`, `based`, `rebased`,
    `unnormalised_linear_attention` and `noncausal_linear_attention`.

    Args:
        dim: D, model width.
        expand_k, expand_v: all heads together have expand_k * D channels of keys and expand_v * D of values.
        num_heads: H.
        head_k_dim: K; if given, `expand_k` has no effect.
        feature_map: φ, from K to K' channels, for both queries and keys: the name of a function in
            `scanl.ops.feature_maps`, or a function of your own from (..., K) to (..., K').
        num_features: m, rows of the projection of a random map; by default K ln K, rounded down.
        nu: ν, shifts of dpfp.
        horizon: M, the longest distance of cosine_reweighting, in steps.
        degree: p, the degree of polynomial.
        normalize: divide by z_t · φ(q_t), clipped to at least eps.
        norm_q, norm_k: divide the features of each query, and of each key, by their sum plus 1e-4.
        gate: S_t = g_t S_{t-1} + (1 - g_t) φ(k_t) v_tᵀ, and z_t likewise, with g_t = σ(W_g x_t + b_g) for each head.
        causal: if False, every step reads all steps, including future ones.
        norm_qk: LayerNorm of the H K channels of queries, and of keys, before they are split into heads.
        output_norm: norm of each head's output, "identity" or "rmsnorm".
        bias: biases in q_proj, k_proj, v_proj and o_proj.
        xavier: initialise the weights of these four as the released code of RFA does: Xavier uniform of gain 1/sqrt(2);
            and the bias of o_proj as 0.
        eps: minimum of the denominator.
        norm_eps: ε of the norm.

    Parameters as in flash-linear-attention: q_proj, k_proj (H K, D); v_proj (H V, D); o_proj (D, H V); norm.weight (V);
    in addition gate_proj (H, D) with a bias, q_norm and k_norm (H K), and the parameters of feature_map.
    Initialisation: as in PyTorch unless `xavier`; norms 1, their biases 0.
    State: S (B, H, K', V), zeros; z is one more column if `normalize`; for cosine_reweighting a count of steps.
    """

    id = "S-linattn-causal"
    aliases = ("linear_transformer",)
    equation = "S_t = S_{t-1} + phi(k_t) v_t^T,  z_t = z_{t-1} + phi(k_t),  o_t = S_t^T phi(q_t) / (z_t . phi(q_t))"
    source = 'Katharopoulos et al., "Transformers are RNNs", arXiv:2006.16236, eq. (18) to (20)'
    op = "linear_attention"
    sample: ClassVar = {"num_heads": 2}
    residual_out = "o_proj"

    def __init__(
        self,
        dim: int,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 8,
        head_k_dim: int | None = None,
        feature_map: str | Callable[[Tensor], Tensor] = "elu_plus_one",
        num_features: int | None = None,
        nu: int = 1,
        horizon: float = 4096,
        degree: int = 2,
        normalize: bool = True,
        norm_q: bool = False,
        norm_k: bool = False,
        gate: bool = False,
        causal: bool = True,
        norm_qk: bool = False,
        output_norm: str = "identity",
        bias: bool = False,
        xavier: bool = False,
        eps: float = 1e-6,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if head_k_dim is None:
            head_k_dim = whole_heads(self._who(), "expand_k", expand_k, dim, num_heads)
        if head_k_dim < 1:
            raise ConfigError(f"{self._who()}: head_k_dim is {head_k_dim}, expected at least 1")
        self.head_k_dim = head_k_dim
        self.head_v_dim = whole_heads(self._who(), "expand_v", expand_v, dim, num_heads)
        if gate and not causal:
            raise ConfigError(f"{self._who()}: gate is True, expected False because of causal=False")
        if output_norm not in ("identity", "rmsnorm"):
            raise ConfigError(f"{self._who()}: output_norm is {output_norm!r}, expected 'identity' or 'rmsnorm'")
        self.dim, self.num_heads, self.normalize, self.eps = dim, num_heads, normalize, eps
        self.norm_q, self.norm_k, self.causal, self.bidirectional = norm_q, norm_k, causal, not causal
        key, value = num_heads * self.head_k_dim, num_heads * self.head_v_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, width, bias=bias) for width in (key, key, value))
        self.q_norm, self.k_norm = (nn.LayerNorm(key) if norm_qk else None for _ in range(2))
        self.feature_map = FeatureMap(feature_map, num_heads, head_k_dim, num_features, nu, horizon, degree)
        plain = causal and not (gate or norm_q or norm_k)
        self.by_kernel = plain and self.feature_map.has_kernel and self.feature_map.width > MANY
        self.gate_proj = nn.Linear(dim, num_heads) if gate else None
        self.norm = GatedRMSNorm(self.head_v_dim, norm_eps) if output_norm == "rmsnorm" else None
        self.o_proj = nn.Linear(value, dim, bias=bias)
        if xavier:
            for project in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
                nn.init.xavier_uniform_(project.weight, gain=0.5**0.5)
            if bias:
                nn.init.zeros_(self.o_proj.bias)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> LinearAttentionState:
        shape = (batch_size, self.num_heads, self.feature_map.width, self.head_v_dim + self.normalize)
        steps = self._zeros(batch_size, 1, device=device, dtype=torch.int64) if self.feature_map.positional else None
        return LinearAttentionState(
            self._zeros(*shape, device=device, dtype=dtype, at_least=torch.float32),
            steps,
        )

    def forward(
        self, x: Tensor, state: LinearAttentionState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, LinearAttentionState]:
        S, read = self._begin(x, state, cu_seqlens)
        steps = None
        if read is not None:
            steps, read = positions(read, x.shape[1], cu_seqlens)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in (q, k, v))
        v = F.pad(v, (0, 1), value=1.0) if self.normalize else v
        if self.by_kernel and cu_seqlens is None and x.shape[1] > 1 and not torch.compiler.is_compiling():
            with as_widened(x):
                start = None if state is None else S
                o, S = attend_by_kernel(self.feature_map, widen(q), widen(k), widen(v), start)
        else:
            o, S = self._by_features(x, q, k, v, S, steps, cu_seqlens)
        if self.normalize:
            o = o[..., :-1] / o[..., -1:].clamp(min=self.eps)
        o = o.to(x.dtype) if self.norm is None else self.norm(o, None).to(x.dtype)
        return self.o_proj(o.flatten(-2)), LinearAttentionState(S, read)

    def _by_features(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, S: Tensor, steps: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, k = self.feature_map(q, steps), self.feature_map(k, steps)
        q = q / (q.sum(-1, keepdim=True) + 1e-4) if self.norm_q else q
        k = k / (k.sum(-1, keepdim=True) + 1e-4) if self.norm_k else k
        if not self.causal:
            return _all(q, k, widen(v), S, cu_seqlens)
        g = None
        if self.gate_proj is not None:
            gate = widen(self.gate_proj(x))
            g, k = F.logsigmoid(gate), k * (-gate).sigmoid()[..., None]
        return linear_attention(q, k, v, g, state=S, scale=1.0, cu_seqlens=cu_seqlens)


def _all(q: Tensor, k: Tensor, v: Tensor, S: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Let every step read its whole sequence.

    For packed sequences: a causal pass plus a reversed pass, minus the present step, which is in both.
    """
    if cu_seqlens is None:
        return noncausal_linear_attention(q, k, v, S, scale=1.0)
    behind, S = linear_attention(q, k, v, state=S, scale=1.0, cu_seqlens=cu_seqlens)
    ahead, _ = linear_attention(q, k, v, scale=1.0, cu_seqlens=cu_seqlens, reverse=True)
    return behind + ahead - (q * k).sum(-1, keepdim=True) * v, S
