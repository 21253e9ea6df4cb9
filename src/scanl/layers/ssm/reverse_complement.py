"""A layer made equivariant to the reverse complement of DNA."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from scanl.layers import options, registry
from scanl.layers.base import Layer
from scanl.layers.designation import Designation, make_layer
from scanl.layers.initial_state import InnerState
from scanl.layers.packing import turned
from scanl.layers.state import State
from scanl.options import multiple_of


@registry.register("reverse_complement")
class ReverseComplement(Layer):
    """A layer made equivariant to the reverse complement of DNA. It reads each strand in the strand's own direction.

    The first half of the channels is one strand, the second half the other. With R the reversal of time and channels,
    y = [f(a), R f(R b)] for x = [a, b]. So reversing time and all 2 d channels of x does the same to y. With an
    embedding [E(t), reversed E(complement t)] and channels read alike, a model is equivariant.
    A carried state affects the first strand only.
    """

    id = "S-caduceus"
    cost = ("T", "T")
    equation = "y = [f(a), R f(R b)],  x = [a, b],  R = reversal of time and channels"
    source = (
        'Schiff et al., "Caduceus: Bi-Directional Equivariant Long-Range DNA Sequence Modeling", arXiv:2403.03234, '
        "sec. 3.2"
    )
    state: ClassVar = InnerState("layer", "f for the first strand")
    sample: ClassVar = {"layer": "lru"}
    bidirectional = True

    def __init__(
        self,
        dim: Annotated[options.Dim, multiple_of(2), "D = 2 d, even"],
        layer: Annotated[
            Designation,
            "f, of width d: a registered name, a class of your own or an instance. It may be causal; this layer is not",
        ] = "caduceus",
        layer_options: Annotated[Mapping[str, Any] | None, "options of f"] = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.layer = make_layer(layer, dim // 2, layer_options or {})

    def run(self, x: Tensor, state: State, cu_seqlens: Tensor | None) -> tuple[Tensor, State]:
        one, other = x.chunk(2, -1)
        y, state = self.layer(one, state, cu_seqlens=cu_seqlens)
        answer = self.layer(turned(other, cu_seqlens).flip(-1), cu_seqlens=cu_seqlens)[0]
        return torch.cat([y, turned(answer, cu_seqlens).flip(-1)], -1), state
