"""The multi-layer perceptron of transformers: two linear maps with an activation between them."""

import functools
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import nearest
from scanl.layers.base import channel_mixers
from scanl.layers.channel._base import Pointwise

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


@channel_mixers.add("mlp")
class MLP(Pointwise):
    """y = W_2 f(W_1 x + b_1) + b_2. No state.

    Args:
        dim: D, model width.
        expand: there are int(expand * D) hidden features.
        activation: f, "gelu_tanh" (GELU's approximation by tanh), "silu" or "relu".
        bias: biases in both maps.

    Parameters: fc1 (expand D, D), fc2 (D, expand D).
    Initialisation: weights N(0, 1/fan_in), biases 0.
    """

    equation = "y = W_2 f(W_1 x + b_1) + b_2"
    source = 'Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, eq. (2)'
    residual_out = "fc2"

    def __init__(self, dim: int, expand: float = 4.0, activation: str = "gelu_tanh", bias: bool = True) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise nearest("activation of mlp", activation, list(ACTIVATIONS))
        hidden = self._hidden(expand, dim)
        self.dim = dim
        self.fc1, self.fc2 = nn.Linear(dim, hidden, bias=bias), nn.Linear(hidden, dim, bias=bias)
        self.activation = activation
        self._initialise()

    def mapped(self, x: Tensor) -> Tensor:
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(x)))
