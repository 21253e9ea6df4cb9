"""DeltaNet: a matrix memory written by the delta rule."""

from typing import Annotated, ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.layers.parts.query_key_value import MemoryState, QueryKeyValue
from scanl.ops import delta_rule
from scanl.ops._frame.context import late
from scanl.ops.delta_rule import unit
from scanl.ops.feature_maps import elu_plus_one
from scanl.options import one_of

_ACTIVATIONS = {"silu": late(F, "silu"), "relu": F.relu, "elu": elu_plus_one, "identity": lambda x: x}


@registry.register("deltanet")
class DeltaNet(QueryKeyValue):
    """DeltaNet: each step moves the memory's value at a key towards the new value, by a learned fraction.

    This is the form of 2024, with SiLU and unit length for queries and keys. `deltanet_2021` has the options of 2021.

    Parameters as in flash-linear-attention: q_proj, k_proj (H K, D); v_proj, g_proj (H V, D); b_proj (H, D);
    q_conv1d, k_conv1d, v_conv1d with weight (width, 1, W); o_norm.weight (V); o_proj (D, H V).
    Initialisation: linear weights N(0, 0.02²), the convolutions as in PyTorch.
    """

    id = "S-deltanet"
    aliases = ("delta_rule", "delta_network")
    equation = (
        "S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,  o_t = S_t^T q_t / sqrt(K),  "
        "beta_t = sigmoid(W_b x_t);  y = W_o RMSNorm(o)"
    )
    source = (
        'Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", '
        "arXiv:2406.06484, sec. 2.2 and 3.3"
    )
    op = "delta_rule"
    sample: ClassVar = {"num_heads": 2}
    residual_out = "o_proj"

    def __init__(
        self,
        dim: options.Dim,
        expand_k: options.ExpandKeys = 1.0,
        expand_v: options.ExpandValues = 1.0,
        num_heads: options.FreeHeads = 4,
        use_beta: Annotated[bool, "learn the write strength; otherwise it is 1"] = True,
        output_gate: Annotated[options.OutputGate, "a SiLU gate after the norm"] = False,
        conv_size: options.ConvSizeOrNone = 4,
        conv_bias: options.ConvBias = False,
        allow_neg_eigval: options.NegativeEigenvalues = False,
        activation: Annotated[
            options.Activation,
            one_of(_ACTIVATIONS),
            'activation of queries and keys: "silu", "relu", "elu" (plus 1) or "identity"; values have SiLU',
        ] = "silu",
        qk_norm: Annotated[
            Literal["l2", "sum"],
            'norm of queries and keys: "l2", or "sum", which divides by the sum of absolute values',
        ] = "l2",
        norm_eps: options.NormEps = 1e-5,
    ) -> None:
        super().__init__()
        self.head_k_dim, self.head_v_dim = (round(expand * dim) // num_heads for expand in (expand_k, expand_v))
        self.dim, self.num_heads, self.allow_neg_eigval = dim, num_heads, allow_neg_eigval
        self.activation, self.qk_norm = activation, qk_norm
        key, value = num_heads * self.head_k_dim, num_heads * self.head_v_dim
        self.memory = (num_heads, self.head_k_dim, self.head_v_dim)
        self._make_projections((key, key, value), conv_size, conv_bias)
        self.b_proj = nn.Linear(dim, num_heads, bias=False) if use_beta else None
        self.g_proj = nn.Linear(dim, value, bias=False) if output_gate else None
        self.o_norm = GatedRMSNorm(self.head_v_dim, norm_eps)
        self.o_proj = nn.Linear(value, dim, bias=False)
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def run(self, x: Tensor, state: MemoryState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, MemoryState]:
        silu = self.activation == "silu"
        qkv, recurrent, conv = self._read(x, state, cu_seqlens, (silu, silu, True))
        q, k, v = (tensor.unflatten(-1, (self.num_heads, -1)) for tensor in qkv)
        q, k = widen(q), widen(k)
        if not silu:
            q, k = _ACTIVATIONS[self.activation](q), _ACTIVATIONS[self.activation](k)
        l2 = self.qk_norm == "l2"
        q, k = (unit(q, 1e-6), k) if l2 else (F.normalize(q, 1, -1, 1e-6), F.normalize(k, 1, -1, 1e-6))
        beta = k.new_ones(k.shape[:3]) if self.b_proj is None else widen(self.b_proj(x)).sigmoid()
        beta = beta * 2 if self.allow_neg_eigval else beta
        o, recurrent = delta_rule(q, k, v, beta, None, recurrent, normalize_keys=l2, cu_seqlens=cu_seqlens)
        y = self.o_norm(o, None if self.g_proj is None else self.g_proj(x).view_as(o))
        return self.o_proj(y.to(x.dtype).flatten(-2)), MemoryState(recurrent, conv)


@registry.preset("deltanet_2021", activation="elu", qk_norm="sum", conv_size=None)
class DeltaNet2021(DeltaNet):
    """DeltaNet of 2021: positive features of queries and keys that sum to 1, and no convolution.

    Differs: the values pass through SiLU, the queries are scaled by 1/sqrt(K), and the output of each head is normed.
    """

    id = "S-deltanet"
    equation = (
        "S_t = S_{t-1} + beta_t f(k_t) (v_t - S_{t-1}^T f(k_t))^T,  o_t = S_t^T f(q_t) / sqrt(K),  "
        "f(x) = (elu(x) + 1) / sum(elu(x) + 1)"
    )
    source = (
        'Schlag, Irie and Schmidhuber, "Linear Transformers Are Secretly Fast Weight Programmers", arXiv:2102.11174, '
        "sec. 4"
    )


@registry.preset("deltanet_negative_eigenvalues", allow_neg_eigval=True)
class DeltaNetNegativeEigenvalues(DeltaNet):
    """DeltaNet with write strengths up to 2: its transition has eigenvalues from -1 to 1, so it can compute parity."""

    id = "S-deltanet"
    equation = "S_t = (I - 2 beta_t k_t k_t^T) S_{t-1} + 2 beta_t k_t v_t^T,  o_t = S_t^T q_t / sqrt(K)"
    source = 'Grazzi et al., "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues", arXiv:2411.12537'
