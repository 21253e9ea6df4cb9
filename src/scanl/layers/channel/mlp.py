"""The multi-layer perceptron of transformers: two linear maps with an activation between them."""

from collections.abc import Callable
from typing import Annotated

from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.channel._base import PointwiseMixer
from scanl.ops._frame.context import late
from scanl.options import one_of

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": late(F, "gelu", approximate="tanh"),
    "silu": late(F, "silu"),
    "relu": F.relu,
}


@registry.channel_mixers.add("mlp")
class MLP(PointwiseMixer):
    """y = W_2 f(W_1 x + b_1) + b_2. No state.

    Parameters: fc1 (expand D, D), fc2 (D, expand D).
    Initialisation: weights N(0, 1/fan_in), biases 0.
    """

    equation = "y = W_2 f(W_1 x + b_1) + b_2"
    aliases = ("feed_forward", "FFN")
    source = 'Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, eq. (2)'
    residual_out = "fc2"

    def __init__(
        self,
        dim: options.Dim,
        expand: Annotated[options.Expand, "there are int(expand * dim) hidden features"] = 4.0,
        activation: Annotated[
            str, one_of(ACTIVATIONS), 'f: "gelu_tanh" (GELU\'s approximation by tanh), "silu" or "relu"'
        ] = "gelu_tanh",
        bias: options.Bias = True,
    ) -> None:
        super().__init__()
        hidden = self._hidden(expand, dim)
        self.dim = dim
        self.fc1, self.fc2 = nn.Linear(dim, hidden, bias=bias), nn.Linear(hidden, dim, bias=bias)
        self.activation = activation
        self._initialise()

    def mapped(self, x: Tensor) -> Tensor:
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(x)))
