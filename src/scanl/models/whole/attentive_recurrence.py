"""The Attentive Recurrent Network: a recurrence over its own reads of a whole sequence."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from scanl.errors import ConfigError
from scanl.layers.designation import make_layer
from scanl.layers.module import Module
from scanl.models.presets import whole
from scanl.models.saving import ModelPart
from scanl.models.whole.cross_attention import CrossAttention
from scanl.options import ConfiguredMeta, at_least, divides


@whole("attentive_recurrence", "ARN", "attentive_recurrent_network")
class AttentiveRecurrence(ModelPart, Module, metaclass=ConfiguredMeta):
    r"""A few steps of a recurrent layer, each of which reads the whole sequence U by attention.

    .. math:: c_t = \mathrm{ATT}(s_{t-1}, U), \quad s_t = F(s_{t-1}, c_t), \quad s_0 = 0, \quad t = 1, \dots, n

    The first read is the mean of the values. The steps do not stand for positions, so there is no law over U but that
    its order has no effect beyond what U itself says of it.

    Differs: s_t in the query is the layer's output, with an RMSNorm.
    Source: Hao et al., "Modeling Recurrence for Transformer", arXiv:1904.03092, sec. 3.2; 8 steps are theirs.
    """

    name: ClassVar[str] = "attentive recurrence"

    def __init__(
        self,
        dim: Annotated[int, at_least(1), "D, width of U and of the steps"],
        steps: Annotated[int, at_least(1), "n, steps of the recurrence"] = 8,
        *,
        layer: Annotated[str, "F, a registered causal layer or module:Class"] = "lstm",
        layer_options: Annotated[Mapping[str, Any] | None, "options of F"] = None,
        num_heads: Annotated[int, divides("dim"), "heads of the attention; a divisor of dim"] = 8,
        fusion: Annotated[
            Literal["stack", "gate"],
            'how a decoder reads the steps: "stack", after the encoder\'s outputs; "gate", in a gated sum of both',
        ] = "stack",
    ) -> None:
        super().__init__()
        self.dim, self.steps, self.fusion = dim, steps, fusion
        self.attention = CrossAttention(dim, dim, num_heads)
        self.layer = make_layer(layer, dim, layer_options or {})
        if self.layer.bidirectional:
            raise ConfigError(f"attentive recurrence: layer is {layer!r}, expected a causal layer")

    def forward(self, u: Tensor, visible: Tensor) -> Tensor:
        """Return s (B, n, D) of U (B, S, D). visible: (B or 1, 1, S), which of its steps are read."""
        k, v = self.attention.keys_values(u)
        s, state, steps = u.new_zeros(len(u), 1, self.dim), None, []
        for _ in range(self.steps):
            s, state = self.layer(self.attention(s, k, v, visible), state)
            steps.append(s)
        return torch.cat(steps, 1)
