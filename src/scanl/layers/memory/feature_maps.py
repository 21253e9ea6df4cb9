"""Published models that are linear attention with a particular feature map or normalisation."""

from typing import ClassVar

from scanl.layers.memory.linear_attention import LinearAttention
from scanl.layers.registry import preset


@preset("noncausal_linear_attention", causal=False)
class NoncausalLinearAttention(LinearAttention):
    """Linear attention in which every step reads all steps, including future ones."""

    id = "S-linattn"
    cost = ("T", "T")
    equation = "o_t = (sum_j phi(k_j) v_j^T)^T phi(q_t) / (sum_j phi(k_j) . phi(q_t)),  phi(x) = elu(x) + 1"
    source = 'Katharopoulos et al., "Transformers are RNNs", arXiv:2006.16236, eq. (4) to (7)'
    op = None
    own_path = True
    bidirectional = True


@preset("unnormalised_linear_attention", feature_map="identity", normalize=False, output_norm=True)
class UnnormalisedLinearAttention(LinearAttention):
    """Linear attention without a feature map; a norm of each head replaces the denominator."""

    id = "S-linattn-unnorm"
    equation = "S_t = S_{t-1} + k_t v_t^T,  o_t = RMSNorm(S_t^T q_t)"
    source = 'Qin et al., "The Devil in Linear Transformer", arXiv:2210.10340, eq. (9)'


@preset("polynomial_attention", feature_map="polynomial")
class PolynomialAttention(LinearAttention):
    """Linear attention whose kernel is a polynomial of the inner product, by default of degree 2.

    A head with more than 256 features reads the steps of a block by the kernel, and only earlier ones by features.
    """

    id = "S-polyfeat"
    equation = "o_t = sum_{j<=t} (1 + q_t . k_j)^p v_j / sum_{j<=t} (1 + q_t . k_j)^p,  p = 2"
    source = 'Katharopoulos et al., "Transformers are RNNs", arXiv:2006.16236, sec. 3.2.1'


@preset("performer", feature_map="positive_random_features")
class Performer(LinearAttention):
    """Performer, FAVOR+: linear attention whose positive random features estimate the kernel of softmax.

    Differs: no maximum is subtracted from the exponents, and nothing is added to the features. The projection is drawn
    when the layer is made; `feature_map.redraw()` draws it anew, in training every 1000 steps, say. The output has no
    bias; in performer-pytorch it has one. With `bias` all four maps have one.
    """

    id = "S-performer"
    aliases = ("FAVOR+", "FAVOR")
    equation = (
        "o_t = S_t^T phi(q_t) / (z_t . phi(q_t)),  phi(x) = exp(W x' - |x'|^2 / 2) / sqrt(m),  x' = x / K^(1/4),  "
        "rows of W orthogonal"
    )
    source = 'Choromanski et al., "Rethinking Attention with Performers", arXiv:2009.14794, lemma 1'


@preset(
    "rfa", feature_map="fourier_features", num_features=64, bias=True, init="rfa", eps=1.5625
)  # eps: the released code's 1 with its features of 1/10 in place of 1/sqrt(m)
class RFA(LinearAttention):
    """Random feature attention: linear attention with sines and cosines of random projections of unit vectors.

    The projection of each head is drawn when the layer is made. The released code draws it anew for every training
    step; call `feature_map.redraw()` for that. With m features, its least denominator is `eps` = 100 / m.
    """

    id = "S-rfa"
    aliases = ("random_feature_attention",)
    equation = (
        "o_t = S_t^T phi(q_t) / (z_t . phi(q_t)),  phi(x) = (sin(W x'), cos(W x')) / sqrt(m),  x' = sigma * x / |x|"
    )
    source = 'Peng et al., "Random Feature Attention", arXiv:2103.02143, eq. (5)'


@preset(
    "rfa_gate", feature_map="fourier_features", num_features=64, bias=True, init="rfa", forget_gate=True, eps=0.135
)  # eps: e^-2, rounded down
class RFAGate(LinearAttention):
    """Random feature attention with a forget gate for each head, which favours recent steps.

    The released code has no gate. `feature_map.redraw()` draws the projection anew, as for `rfa`. The denominator
    estimates an average of exp(-|q - k|² / 2), of unit vectors at the start: numbers from e^-2 to 1. The features are
    signed, so the estimate may be near 0 or negative. Its least value is e^-2 here; the paper names none.
    """

    id = "S-rfa-gate"
    aliases = ("gated_rfa", "gated_random_feature_attention")
    equation = (
        "S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T,  z_t = g_t z_{t-1} + (1 - g_t) phi(k_t),  "
        "o_t = S_t^T phi(q_t) / (z_t . phi(q_t)),  g_t = sigmoid(w_g . x_t + b_g)"
    )
    source = 'Peng et al., "Random Feature Attention", arXiv:2103.02143, sec. 3.2'
    own_path = True


@preset("arc_cosine_attention", feature_map="arc_cosine_features", num_features=64, bias=True, init="rfa")
class ArcCosineAttention(LinearAttention):
    """Random feature attention with the arc-cosine kernel: the features are ReLUs of random projections.

    Differs: queries and keys are not scaled to unit length, and all heads use one projection, with orthogonal rows.
    """

    id = "S-arccos"
    equation = "o_t = S_t^T phi(q_t) / (z_t . phi(q_t)),  phi(x) = ReLU(W x) / sqrt(m)"
    source = 'Peng et al., "Random Feature Attention", arXiv:2103.02143, appendix; Cho and Saul, NeurIPS 2009, eq. (1)'


@preset("fwp", feature_map="identity", normalize=False)
class FastWeightProgrammer(LinearAttention):
    """Fast weight programmer: a slow network writes outer products into the weights of a fast network.

    Differs: the fast weights are not squashed, so that steps can be computed in parallel. `odefwp` is the form in
    continuous time. `deltanet_2021` is the form that corrects the values it has written.
    """

    id = "S-fwp"
    aliases = ("fast_weights",)
    equation = "S_t = S_{t-1} + (W_k x_t) (W_v x_t)^T,  o_t = S_t^T W_q x_t"
    source = (
        'Schmidhuber, "Learning to Control Fast-Weight Memories", Neural Computation 4(1), 1992; Schlag, Irie and '
        'Schmidhuber, "Linear Transformers Are Secretly Fast Weight Programmers", arXiv:2102.11174, eq. (4) and (5)'
    )


@preset("based", feature_map="taylor", head_dim=16, eps=1e-12)
class Based(LinearAttention):
    """Based: linear attention whose kernel is the exponential's Taylor polynomial of degree 2, with narrow keys.

    Differs: equal features are kept once, so 16 channels have 153 features and not 273. The kernel is the same. The
    authors' models have 12 heads or more.
    """

    id = "S-based"
    equation = "o_t = sum_{j<=t} (1 + s + s^2 / 2) v_j / sum_{j<=t} (1 + s + s^2 / 2),  s = q_t . k_j / sqrt(K)"
    source = 'Arora et al., "Simple Linear Attention Language Models", arXiv:2402.18668, sec. 4.1'


@preset("rebased", feature_map="quadratic", head_dim=16, qk_norm="layernorm", eps=1e-12)
class ReBased(LinearAttention):
    """ReBased: linear attention whose kernel is the square of the inner product, of normed queries and keys.

    The denominator is 0 only where all keys so far are orthogonal to the query. The authors' models have 12 heads.
    """

    id = "S-rebased"
    equation = "o_t = sum_{j<=t} s^2 v_j / sum_{j<=t} s^2,  s = LN(q_t) . LN(k_j) / sqrt(K)"
    source = (
        'Aksenov et al., "Linear Transformers with Learnable Kernel Functions are Better In-Context Models", '
        "arXiv:2402.10644, sec. 4"
    )


@preset("dpfp", feature_map="dpfp", nu=2, qk_norm="sum", normalize=False)
class DPFP(LinearAttention):
    """Fast weights with a deterministic parameter-free projection; the features of a key sum to 1.

    Differs: 1e-4 is added to the sum, so that a zero vector causes no division by zero. o is not scaled by 1/sqrt(K).
    """

    id = "S-dpfp"
    equation = (
        "S_t = S_{t-1} + f(k_t) v_t^T,  o_t = S_t^T f(q_t),  f(x) = phi(x) / sum(phi(x)),  "
        "phi(x)_{s,i} = r_i r_{i-s},  r = ReLU([x, -x])"
    )
    source = (
        'Schlag, Irie and Schmidhuber, "Linear Transformers Are Secretly Fast Weight Programmers", arXiv:2102.11174, '
        "sec. 5"
    )


@preset("cosformer", feature_map="cosine_reweighting", bias=True)
class CosFormer(LinearAttention):
    """cosFormer: linear attention with ReLU features and a cosine decay with distance, up to `horizon` steps.

    Differs: the horizon is a fixed option; in the released code it is the length of the sequence.
    """

    id = "S-cosformer"
    equation = (
        "o_t = sum_{j<=t} c_{t-j} (ReLU(q_t) . ReLU(k_j)) v_j / sum_{j<=t} c_{t-j} (ReLU(q_t) . ReLU(k_j)),  "
        "c_j = cos(pi j / (2 M))"
    )
    source = 'Qin et al., "cosFormer: Rethinking Softmax in Attention", arXiv:2202.08791, sec. 3'
    sample: ClassVar = {"num_heads": 1, "expand_k": 4.0}  # with few channels, all ReLUs of a step may be 0
    own_path = True
