"""Gated multi-layer perceptrons."""

from typing import Annotated

from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.channel._base import PointwiseMixer
from scanl.ops.fused.gated import POLYNOMIALS, gated
from scanl.options import one_of

ACTIVATIONS = [*POLYNOMIALS, "identity"]


@registry.channel_mixers.add("gated_mlp")
class GatedMLP(PointwiseMixer):
    """y = W_down (f(W_gate x) * W_up x). No state.

    "identity" is the SGLU of TransNormerLLM, arXiv:2307.14995.

    Initialisation: weights N(0, 1/fan_in), biases 0. A stack of L blocks of two writes each divides `down` by sqrt(2L).
    In recurrentgemma, the program of Griffin, `down` is N(0, 2/(L fan_in)), twice that deviation.
    """

    equation = "y = W_down (f(W_gate x) * W_up x)"
    aliases = ("SwiGLU", "GEGLU")
    source = 'Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202, eq. (6)'
    residual_out = "down"

    def __init__(
        self,
        dim: options.Dim,
        expand: Annotated[
            options.Expand, "there are int(expand * dim) hidden features, rounded up to `multiple_of`"
        ] = 2.0,
        bias: options.Bias = False,
        activation: Annotated[
            str,
            one_of(ACTIVATIONS),
            'f: "silu" (SwiGLU), "gelu_tanh" (GEGLU, by GELU\'s approximation with tanh), "identity" (SGLU)',
        ] = "silu",
        hidden_dim: Annotated[
            options.HiddenDim | None, "hidden features, in place of those that `expand` gives"
        ] = None,
        multiple_of: options.MultipleOf = 1,
    ) -> None:
        super().__init__()
        self.dim = dim
        hidden = hidden_dim or self._hidden(expand, dim, multiple_of)
        # Two matrices rather than one that is split: contiguous activations are a third faster on a CPU.
        self.gate = nn.Linear(dim, hidden, bias=bias)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)
        self.activation = activation
        self._initialise()

    def mapped(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        return self.down(gate * up if self.activation == "identity" else gated(gate, up, self.activation))
