"""Linear attention: an inner product of features replaces the exponential kernel of softmax attention."""

from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer, as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.feature_map import Degree, FeatureMap, Features, Horizon, Name, Shifts
from scanl.layers.parts.kernel_memory import attend_by_kernel
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.layers.parts.positions import positions
from scanl.ops import linear_attention, noncausal_linear_attention
from scanl.ops._frame.context import exactly

# Features of a head up to which a kernel of `linear_attention` costs less than scores of pairs of steps.
MAX_KERNEL_FEATURES = 256


class LinearAttentionState(NamedTuple):
    recurrent: Annotated[
        Tensor,
        StateAxes("num_heads, feature_map.width, head_v_dim + normalize", "S; z is one more column with normalize"),
    ]
    steps: Annotated[Tensor, StateAxes("1", "steps read", dtype=torch.int64, after=torch.add, when="positional")]


@registry.register("linear_attention")
class LinearAttention(Layer):
    """Linear attention with any feature map, normalised or not, causal or not.

    The defaults are the linear transformer. Models with other options have their own names: `performer`, `rfa`,
    `rfa_gate`, `arc_cosine_attention`, `dpfp`, `fwp`, `cosformer`, `polynomial_attention`, `based`, `rebased`,
    `unnormalised_linear_attention` and `noncausal_linear_attention`.

    Parameters as in flash-linear-attention: q_proj, k_proj (H K, D); v_proj (H V, D); o_proj (D, H V); norm.weight (V);
    in addition gate_proj (H, D) with a bias, q_norm and k_norm (H K), and the parameters of feature_map.
    Initialisation: as `init` says; norms 1, their biases 0.
    """

    id = "S-linattn-causal"
    aliases = (
        "linear_transformer",
        "linearized_attention",
        "linearized_transformer",
        "transformers_are_rnns",
        "causal_linear_attention",
    )
    equation = "S_t = S_{t-1} + phi(k_t) v_t^T,  z_t = z_{t-1} + phi(k_t),  o_t = S_t^T phi(q_t) / (z_t . phi(q_t))"
    source = 'Katharopoulos et al., "Transformers are RNNs", arXiv:2006.16236, eq. (18) to (20)'
    op = "linear_attention"
    state: ClassVar = LinearAttentionState
    sample: ClassVar = {"num_heads": 2}
    residual_out = "o_proj"

    def __init__(
        self,
        dim: options.Dim,
        expand_k: options.ExpandKeys = 1.0,
        expand_v: options.ExpandValues = 1.0,
        num_heads: options.FreeHeads = 8,
        head_dim: Annotated[options.HeadDim | None, "K; with a number, expand_k has no effect"] = None,
        feature_map: Name = "elu_plus_one",
        num_features: Features = None,
        nu: Shifts = 1,
        horizon: Horizon = 4096,
        degree: Degree = 2,
        normalize: Annotated[bool, "divide by z_t · φ(q_t), clipped to at least eps"] = True,
        qk_norm: Annotated[
            Literal["sum", "layernorm"] | None,
            'norm of queries and keys: "sum" divides the features of each by their sum plus 1e-4; "layernorm" is over '
            "the channels of all heads, before the split into heads",
        ] = None,
        forget_gate: Annotated[
            bool,
            "S_t = g_t S_{t-1} + (1 - g_t) φ(k_t) v_tᵀ, and z_t likewise, with g_t = σ(W_g x_t + b_g) for each head",
        ] = False,
        causal: options.Causal = True,
        output_norm: Annotated[options.OutputNorm, "RMSNorm of each head's output"] = False,
        bias: Annotated[options.Bias, "biases in q_proj, k_proj, v_proj and o_proj"] = False,
        init: Annotated[
            Literal["torch", "rfa"],
            "initial values of these four: PyTorch's; or \"rfa\", those of RFA's released code: Xavier uniform of gain "
            "1/sqrt(2), and 0 for the bias of o_proj",
        ] = "torch",
        eps: Annotated[options.Eps, "the least denominator"] = 1e-6,
        norm_eps: options.NormEps = 1e-5,
    ) -> None:
        super().__init__()
        if forget_gate and not causal:
            self._refuse("forget_gate", True, "False because of causal=False")
        self.head_dim = round(expand_k * dim) // num_heads if head_dim is None else head_dim
        self.head_v_dim = round(expand_v * dim) // num_heads
        self.dim, self.num_heads, self.normalize, self.eps = dim, num_heads, normalize, eps
        self.qk_norm, self.causal, self.bidirectional = qk_norm, causal, not causal
        key, value = num_heads * self.head_dim, num_heads * self.head_v_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, width, bias=bias) for width in (key, key, value))
        self.q_norm, self.k_norm = (nn.LayerNorm(key) if qk_norm == "layernorm" else None for _ in range(2))
        self.feature_map = FeatureMap(feature_map, num_heads, self.head_dim, num_features, nu, horizon, degree)
        plain = causal and not (forget_gate or qk_norm == "sum")
        self.by_kernel = plain and self.feature_map.has_kernel and self.feature_map.width > MAX_KERNEL_FEATURES
        self.gate_proj = nn.Linear(dim, num_heads) if forget_gate else None
        self.norm = GatedRMSNorm(self.head_v_dim, norm_eps) if output_norm else None
        self.o_proj = nn.Linear(value, dim, bias=bias)
        if init == "rfa":
            for project in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
                nn.init.xavier_uniform_(project.weight, gain=0.5**0.5)
            if bias:
                nn.init.zeros_(self.o_proj.bias)

    @property
    def positional(self) -> bool:
        """Whether the feature map reads positions, so that the state counts steps."""
        return self.feature_map.positional

    def run(
        self, x: Tensor, state: LinearAttentionState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, LinearAttentionState]:
        S, past = self._begin(x, state, cu_seqlens)
        steps = None
        if self.positional:
            steps, past = positions(past, x.shape[1], cu_seqlens)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (tensor.unflatten(-1, (self.num_heads, -1)) for tensor in (q, k, v))
        v = F.pad(v, (0, 1), value=1.0) if self.normalize else v
        by_kernel = self.by_kernel and cu_seqlens is None and x.shape[1] > 1 and not exactly()
        if by_kernel and not torch.compiler.is_compiling():
            with as_widened(x):
                start = None if state is None else S
                o, S = attend_by_kernel(self.feature_map, widen(q), widen(k), widen(v), start)
        else:
            o, S = self._by_features(x, q, k, v, S, steps, cu_seqlens)
        if self.normalize:
            o = o[..., :-1] / o[..., -1:].clamp(min=self.eps)
        o = o.to(x.dtype) if self.norm is None else self.norm(o, None).to(x.dtype)
        return self.o_proj(o.flatten(-2)), LinearAttentionState(S, past)

    def _by_features(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, S: Tensor, steps: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, k = self.feature_map(q, steps), self.feature_map(k, steps)
        if self.qk_norm == "sum":
            q, k = (features / (features.sum(-1, keepdim=True) + 1e-4) for features in (q, k))
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
