"""TTT-MLP: the state is a model with a hidden layer, which takes a step of gradient descent on every token."""

from typing import Any, ClassVar

from scanl.layers import options, registry
from scanl.layers.memory._mini_batches import STEPS_EXCUSE
from scanl.layers.memory.ttt_linear import BaseRate, Heads, TTTLinear


@registry.register("ttt_mlp")
class TTTMLP(TTTLinear):
    """TTT-MLP: TTT-Linear whose model has a hidden layer of 4 K channels with GELU.

    Parameters, initialisation and state: as in `ttt_linear`, with W1 (H, K, 4 K), b1 (H, 1, 4 K), W2 (H, 4 K, K) and
    b2 (H, 1, K).
    """

    id = "S-ttt"
    equation = (
        "W_t = W - c_i sum_{j<=i} g_j grad |k_j + LN(f(k_j)) - v_j|^2 / 2,  f(x) = W2^T GELU(W1^T x + b1) + b2,  "
        "o_t = q_t + LN(f_t(q_t));  y = W_o LN(o)"
    )
    source = TTTLinear.source
    hidden = (4,)
    excused: ClassVar = {
        "default_sizes_are_in_proportion": "its state is a model with a hidden layer in each head",
        "bits_are_the_same_in_any_company": STEPS_EXCUSE,
    }

    def __init__(self, dim: options.Dim, num_heads: Heads = None, *, base_lr: BaseRate = 0.1, **others: Any) -> None:
        super().__init__(dim, num_heads, base_lr=base_lr, **others)
