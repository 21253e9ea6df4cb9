"""Gated DeltaNet: a matrix memory that decays and is written by the delta rule."""

from typing import Annotated, Any

from scanl.layers import options, registry
from scanl.layers.parts.delta_memory import DeltaMemory
from scanl.options import at_least


@registry.register("gated_deltanet")
class GatedDeltaNet(DeltaMemory):
    """Gated DeltaNet: the delta rule with a decay; each head and step has its own decay and write strength.

    Queries and keys are convolved and have unit length. `deltaproduct` and `gated_deltaproduct` write several times a
    step.

    Parameters as in flash-linear-attention: q_proj (num_heads K, D); k_proj (n num_heads K, D); v_proj (n H V, D);
    g_proj (H V, D); a_proj (H, D); b_proj (n H, D); q_conv1d, k_conv1d, v_conv1d with weight (width, 1, W); A_log,
    dt_bias (H), without weight decay; o_norm.weight (V); o_proj (D, H V).
    Initialisation: A_log = ln U(0, 16), softplus(dt_bias) log-uniform in [0.001, 0.1], linear weights N(0, 0.02²),
    the convolutions as in PyTorch.
    """

    id = "S-deltanet"
    aliases = ("GDN",)
    equation = (
        "S_t = (I - beta_t k_t k_t^T) alpha_t S_{t-1} + beta_t k_t v_t^T,  o_t = S_t^T q_t / sqrt(K),  "
        "alpha_t = exp(-exp(A_log) softplus(W_a x_t + b));  y = W_o (RMSNorm(o) * SiLU(W_g x))"
    )
    source = 'Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464, eq. (10) and sec. 3.4'

    def __init__(
        self,
        dim: options.Dim,
        num_householder: Annotated[
            int,
            at_least(1),
            "n, writes per step. A step decays the memory once, then corrects it n times, each time with a key, a "
            "value and a strength of its own",
        ] = 1,
        forget_gate: Annotated[bool, "the decay; without it a_proj, A_log and dt_bias are absent"] = True,
        allow_neg_eigval: options.NegativeEigenvalues = False,
        **shared: Any,
    ) -> None:
        self.num_householder, self.forget_gate, self.allow_neg_eigval = num_householder, forget_gate, allow_neg_eigval
        super().__init__(dim, **shared)


@registry.preset("gated_deltanet_negative_eigenvalues", allow_neg_eigval=True)
class GatedDeltaNetNegativeEigenvalues(GatedDeltaNet):
    """Gated DeltaNet with write strengths up to 2: its transition has eigenvalues from -1 to 1."""

    id = "S-deltanet"
    equation = (
        "S_t = (I - 2 beta_t k_t k_t^T) alpha_t S_{t-1} + 2 beta_t k_t v_t^T,  o_t = S_t^T q_t / sqrt(K);  "
        "y = W_o (RMSNorm(o) * SiLU(W_g x))"
    )
    source = 'Grazzi et al., "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues", arXiv:2411.12537'


@registry.preset("qwen3_next_deltanet", expand_v=1.0, num_heads=16, num_v_heads=32, norm_eps=1e-6)
class Qwen3NextDeltaNet(GatedDeltaNet):
    """Gated DeltaNet in the proportions of Qwen3-Next: 16 heads of keys and 32 of values, with D / 16 channels each.

    Here the default of head_dim is D / num_heads, rounded. So at the width of the released model, 2,048, the heads have
    its 128 channels.
    """

    id = "S-deltanet"
    equation = GatedDeltaNet.equation
    keys_by_dim = 1.0
    source = 'Qwen team, "Qwen3-Next", 2025, as Qwen3NextGatedDeltaNet in transformers'


@registry.preset("gated_deltaproduct", num_householder=2, allow_neg_eigval=True)
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


@registry.preset("deltaproduct", num_householder=2, allow_neg_eigval=True, forget_gate=False, output_gate=False)
class DeltaProduct(GatedDeltaNet):
    """DeltaProduct: several corrections a step, and no decay."""

    id = "S-deltaproduct"
    equation = (
        "S_t = (I - b_n k_n k_n^T) ... (I - b_1 k_1 k_1^T) S_{t-1} + writes,  b_j = 2 beta_{t,j},  "
        "o_t = S_t^T q_t / sqrt(K);  y = W_o RMSNorm(o)"
    )
    source = GatedDeltaProduct.source
