"""Gated linear unit."""

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.channel._base import PointwiseMixer
from scanl.layers.channel.mlp import ACTIVATIONS
from scanl.ops._frame.context import late
from scanl.options import one_of

GATES: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": late(torch, "sigmoid"), **ACTIVATIONS}


@registry.channel_mixers.add("glu")
class GLU(PointwiseMixer):
    """Gated linear unit: a linear map of (W x + b) ⊙ f(V x + c). No state.

    With `variant` "both", f is applied to both halves, as in the gated attention unit. `gated_mlp` is the form with an
    output map and without biases by default.

    Parameters: up (H, D), W and b; gate (H, D), V and c; out (D, H), absent without `hidden_dim`, where H is D.
    Initialisation: weights N(0, 1/fan_in), biases 0.
    """

    id = "S-glu"
    aliases = ("gated_linear_unit",)
    equation = "y = (W x + b) * f(V x + c)"
    source = (
        'Dauphin, Fan, Auli and Grangier, "Language Modeling with Gated Convolutional Networks", arXiv:1612.08083, '
        'eq. (1); variants: Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202'
    )

    residual_out = "up"

    def __init__(
        self,
        dim: options.Dim,
        hidden_dim: Annotated[
            options.HiddenDim | None, "H, hidden features, with an output map; None for D and no output map"
        ] = None,
        bias: options.Bias = True,
        activation: Annotated[
            str, one_of(GATES), 'f: "sigmoid", "silu" (SwiGLU), "gelu_tanh" (GEGLU) or "relu" (ReGLU)'
        ] = "sigmoid",
        variant: Annotated[Literal["one", "both"], "halves that f is applied to: the second one or both"] = "one",
    ) -> None:
        super().__init__()
        self.dim, self.activation, self.variant = dim, activation, variant
        self.up, self.gate = (nn.Linear(dim, hidden_dim or dim, bias=bias) for _ in range(2))
        if hidden_dim is not None:
            self.out = nn.Linear(hidden_dim, dim, bias=bias)
        self._initialise()

    def mapped(self, x: Tensor) -> Tensor:
        function, up = GATES[self.activation], self.up(x)
        y = (function(up) if self.variant == "both" else up) * function(self.gate(x))
        return self.out(y) if "out" in self._modules else y
