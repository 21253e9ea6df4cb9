"""The multi-layer perceptron of transformers: two linear maps with an activation between them."""

import functools
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError, nearest
from scanl.layers.base import Layer, channel_mixers
from scanl.layers.state import Device, DType, State

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


@channel_mixers.add("mlp")
class MLP(Layer):
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
        hidden = int(expand * dim)
        if hidden < 1:
            raise ConfigError(f"mlp: expand is {expand}, expected at least 1/{dim} because of dim={dim}")
        self.dim = dim
        self.fc1, self.fc2 = nn.Linear(dim, hidden, bias=bias), nn.Linear(hidden, dim, bias=bias)
        self.activation = activation
        for linear in (self.fc1, self.fc2):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
            if bias:
                nn.init.zeros_(linear.bias)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> State:
        return ()

    def forward(self, x: Tensor, state: State = None, *, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        self._check(x, state, cu_seqlens)
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(x))), ()
