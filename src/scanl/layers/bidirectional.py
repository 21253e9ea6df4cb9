"""One layer for each direction of time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.layers import options, registry
from scanl.layers.base import Layer
from scanl.layers.designation import make_layer
from scanl.layers.initial_state import InnerState
from scanl.layers.packing import reversed_steps
from scanl.layers.state import State

Inner: TypeAlias = str | type[Layer] | Callable[[int], Layer]  # a name, a class, or a function from width to a layer


def _make(who: str, inner: Inner, dim: int, inner_options: Mapping[str, Any] | None) -> Layer:
    if isinstance(inner, str | type):
        return make_layer(inner, dim, inner_options or {})
    if isinstance(inner, nn.Module) or not callable(inner):
        raise ConfigError(
            f"{who}: layer is a {type(inner).__name__}, expected a registered name or a function from dim to a layer, "
            "because each layer inside has parameters of its own"
        )
    if inner_options:
        raise ConfigError(
            f"{who}: layer_options is {dict(inner_options)}, expected none because layer is a function; set them in it"
        )
    made = inner(dim)
    if not isinstance(made, Layer) or made.dim != dim:
        product = f"a {type(made).__name__}" + (f" of dim={made.dim}" if isinstance(made, Layer) else "")
        raise ConfigError(f"{who}: layer makes {product}, expected a Layer of dim={dim}")
    return made


def _enter(inner: Layer, index: int, layers: Sequence[Layer]) -> None:
    """Call `inner.enter_stack` with the corresponding inner layers of the stack's other wrappers.

    layers: those inner layers; for a layer of the stack that has none, this wrapper. An inner layer that takes a memo
    is skipped, because a wrapper does not pass a memo on.
    """
    if "memo" not in inner.takes:
        inner.enter_stack(index, layers)


@registry.register("bidirectional")
class Bidirectional(Layer):
    """One layer runs forward and another backward in time: fwd(x) + rev(bwd(rev(x))), or a projection of both.

    Each packed sequence is reversed separately. State: the forward layer's. A carried state affects only that
    direction, so reading a sequence in pieces gives other outputs than reading it whole.
    """

    id = "S-bidir"
    cost = ("T", "T")
    aliases = ("BidirectionalLinearRNN", "BiRNN")
    equation = "y = fwd(x) + reverse(bwd(reverse(x)))"
    source = 'Schuster and Paliwal, "Bidirectional Recurrent Neural Networks", IEEE Trans. Signal Processing, 1997'
    sample: ClassVar = {"layer": "rglru", "layer_options": {"num_heads": 2}}
    excused: ClassVar = {"default_sizes_are_in_proportion": "it holds two whole layers"}
    bidirectional = True
    state: ClassVar = InnerState("forward_layer")

    def __init__(
        self,
        dim: options.Dim,
        layer: Annotated[
            Inner, "registered name, a class of your own, or a function from dim to a layer"
        ] = "linear_rnn",
        combine: Annotated[
            Literal["sum", "concat"], '"sum"; or "concat", which maps [fwd; bwd] (2 dim) to dim by `out_proj`'
        ] = "sum",
        layer_options: Annotated[Mapping[str, Any] | None, "options of the named layer, or of the class"] = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.forward_layer = _make(self._who(), layer, dim, layer_options)
        self.backward_layer = _make(self._who(), layer, dim, layer_options)
        self.out_proj = nn.Linear(2 * dim, dim) if combine == "concat" else None

    def enter_stack(self, index: int, layers: Sequence[Layer]) -> None:
        alike = [layer if isinstance(layer, Bidirectional) else None for layer in layers]
        _enter(self.forward_layer, index, [peer.forward_layer if peer else self for peer in alike])
        _enter(self.backward_layer, index, [peer.backward_layer if peer else self for peer in alike])

    def run(self, x: Tensor, state: State, cu_seqlens: Tensor | None) -> tuple[Tensor, State]:
        ahead, state = self.forward_layer(x, state, cu_seqlens=cu_seqlens)
        if cu_seqlens is None:
            back = self.backward_layer(x.flip(1))[0].flip(1)
        else:
            turned = reversed_steps(cu_seqlens, x.shape[1])
            back = self.backward_layer(x[:, turned], cu_seqlens=cu_seqlens)[0][:, turned]
        return (ahead + back if self.out_proj is None else self.out_proj(torch.cat([ahead, back], -1))), state
