"""Gated causal convolution: the layer of gated convolutional networks."""

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.window import Inputs, windows


@registry.register("gated_convolution")
class GatedConvolution(Layer):
    """A causal convolution over the last W steps, one half of whose channels gates the other: a GLU of a window.

    The sum of x and y, which a stack forms, is the paper's residual block with one convolution. Its weight
    normalization is `torch.nn.utils.parametrizations.weight_norm` of `linear`.

    Parameters: linear (2D, W D) with a bias; rows of W and then of V, columns of x_t, x_{t-1} and so on.
    Initialisation as in He et al., arXiv:1502.01852: weights N(0, 2/(W D)); biases 0.
    """

    id = "S-glu"
    cost = ("T W", "W")
    aliases = ("GCNN", "gated_convolutional_network")
    carried_by = "ops"
    equation = "y_t = (sum_j W_j x_{t-j} + b) * sigmoid(sum_j V_j x_{t-j} + c),  0 <= j < W"
    source = (
        'Dauphin, Fan, Auli and Grangier, "Language Modeling with Gated Convolutional Networks", arXiv:1612.08083, '
        "eq. (1)"
    )
    state: ClassVar = StateAxes("past, dim", "the last inputs", when="past")
    sample: ClassVar = {"conv_size": 3}

    def __init__(self, dim: options.Dim, conv_size: options.ConvSize = 4) -> None:
        super().__init__()
        self.dim, self.past = dim, conv_size - 1
        self.linear = nn.Linear(conv_size * dim, 2 * dim)
        nn.init.kaiming_normal_(self.linear.weight, nonlinearity="relu")
        nn.init.zeros_(self.linear.bias)

    def run(self, x: Tensor, state: Inputs | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Inputs]:
        window, inputs = windows(x, self.past + 1, state, cu_seqlens=cu_seqlens)
        return F.glu(self.linear(window)), inputs
