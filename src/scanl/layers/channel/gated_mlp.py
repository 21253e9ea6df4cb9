"""Gated multi-layer perceptrons."""

from torch import Tensor, nn

from scanl.errors import ConfigError, nearest
from scanl.layers.base import channel_mixers
from scanl.layers.channel._base import Pointwise
from scanl.ops.fused.gated import POLYNOMIALS, gated

ACTIVATIONS = [*POLYNOMIALS, "identity"]


@channel_mixers.add("gated_mlp")
class GatedMLP(Pointwise):
    """y = W_down (f(W_gate x) * W_up x). No state.

    Args:
        dim: D, model width.
        expand, round_up_to_multiple_of: there are int(expand * D) hidden features, rounded up to a multiple of
            round_up_to_multiple_of.
        bias: biases in the three projections.
        activation: f, "silu" (SwiGLU), "gelu_tanh" (GEGLU, with GELU's approximation by tanh) or "identity" (SGLU of
            TransNormerLLM, arXiv:2307.14995).
        intermediate_size: number of hidden features; if given, `expand` has no effect.

    Initialisation: weights N(0, 1/fan_in), biases 0. A stack of L blocks of two writes each divides `down` by sqrt(2L).
    In recurrentgemma, the program of Griffin, `down` is N(0, 2/(L fan_in)), twice that deviation.
    """

    equation = "y = W_down (f(W_gate x) * W_up x)"
    source = 'Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202, eq. (6)'
    residual_out = "down"

    def __init__(
        self,
        dim: int,
        expand: float = 2.0,
        bias: bool = False,
        activation: str = "silu",
        intermediate_size: int | None = None,
        round_up_to_multiple_of: int = 1,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise nearest("activation of gated_mlp", activation, ACTIVATIONS)
        if round_up_to_multiple_of < 1:
            raise ConfigError(f"gated_mlp: round_up_to_multiple_of is {round_up_to_multiple_of}, expected at least 1")
        self.dim, self.expand, self.round_up_to_multiple_of = dim, expand, round_up_to_multiple_of
        hidden = intermediate_size
        if hidden is None:
            hidden = self._hidden(expand, dim, round_up_to_multiple_of)
        elif hidden < 1:
            raise ConfigError(f"gated_mlp: intermediate_size is {hidden}, expected at least 1")
        # Two matrices rather than one that is split: contiguous activations are a third faster on a CPU.
        self.gate = nn.Linear(dim, hidden, bias=bias)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)
        self.activation = activation
        self._initialise()

    def mapped(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        return self.down(gate * up if self.activation == "identity" else gated(gate, up, self.activation))
