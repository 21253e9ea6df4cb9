"""Published models that are linear attention with a particular feature map or normalisation."""

from scanl.layers.base import preset
from scanl.layers.memory.linear_attention import LinearAttention


@preset("noncausal_linear_attention", causal=False)
class NoncausalLinearAttention(LinearAttention):
    """Linear attention in which every step reads all steps, including future ones."""

    id = "S-linattn"
    equation = "o_t = (sum_j phi(k_j) v_j^T)^T phi(q_t) / (sum_j phi(k_j) . phi(q_t)),  phi(x) = elu(x) + 1"
    source = 'Katharopoulos et al., "Transformers are RNNs", arXiv:2006.16236, eq. (4) to (7)'
    op = None
    own_path = True
    bidirectional = True


@preset("unnormalised_linear_attention", feature_map="identity", normalize=False, output_norm="rmsnorm")
class UnnormalisedLinearAttention(LinearAttention):
    """Linear attention without a feature map; a norm of each head replaces the denominator."""

    id = "S-linattn-unnorm"
    equation = "S_t = S_{t-1} + k_t v_t^T,  o_t = RMSNorm(S_t^T q_t)"
    source = 'Qin et al., "The Devil in Linear Transformer", arXiv:2210.10340, eq. (9)'


@preset("polynomial_attention", feature_map="polynomial")
class PolynomialAttention(LinearAttention):
    """Linear attention whose kernel is a polynomial of degree 2 of the inner product."""

    id = "S-polyfeat"
    equation = "o_t = sum_{j<=t} (1 + q_t . k_j)^2 v_j / sum_{j<=t} (1 + q_t . k_j)^2"
    source = 'Katharopoulos et al., "Transformers are RNNs", arXiv:2006.16236, sec. 3.2.1'


@preset("performer", feature_map="positive_random_features")
class Performer(LinearAttention):
    """Performer, FAVOR+: linear attention whose positive random features estimate the kernel of softmax.

    Differs: no maximum is subtracted from the exponents, and nothing is added to the features. The projection is drawn
    once, when the layer is made; assign `feature_map.projection` to replace it.
    """

    id = "S-performer"
    equation = (
        "o_t = S_t^T phi(q_t) / (z_t . phi(q_t)),  phi(x) = exp(W x' - |x'|^2 / 2) / sqrt(m),  x' = x / K^(1/4),  "
        "rows of W orthogonal"
    )
    source = 'Choromanski et al., "Rethinking Attention with Performers", arXiv:2009.14794, lemma 1'


@preset("rfa", feature_map="fourier_features")
class RFA(LinearAttention):
    """Random feature attention: linear attention with sines and cosines of random projections of unit vectors.

    Differs: all heads use one projection, which is drawn once. The released code draws one for each head and training
    step.
    """

    id = "S-rfa"
    equation = (
        "o_t = S_t^T phi(q_t) / (z_t . phi(q_t)),  phi(x) = (sin(W x'), cos(W x')) / sqrt(m),  x' = sigma * x / |x|"
    )
    source = 'Peng et al., "Random Feature Attention", arXiv:2103.02143, eq. (5)'


@preset("rfa_gate", feature_map="fourier_features", gate=True)
class RFAGate(LinearAttention):
    """Random feature attention with a forget gate for each head, which favours recent steps.

    Differs from the paper as `rfa` does.
    """

    id = "S-rfa-gate"
    equation = (
        "S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T,  z_t = g_t z_{t-1} + (1 - g_t) phi(k_t),  "
        "o_t = S_t^T phi(q_t) / (z_t . phi(q_t)),  g_t = sigmoid(w_g . x_t + b_g)"
    )
    source = 'Peng et al., "Random Feature Attention", arXiv:2103.02143, sec. 3.2'
    own_path = True


@preset("dpfp", feature_map="dpfp", nu=2, norm_q=True, norm_k=True, normalize=False)
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


@preset("cosformer", feature_map="cosine_reweighting")
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
    own_path = True
