"""The backbone of a model: a stack of residual blocks, of one layer or of a repeating pattern of layers."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scanl.errors import ConfigError, ShapeError, nearest
from scanl.layers import auxiliary
from scanl.layers.base import Layer, widen
from scanl.layers.designation import Designation, label, layer_class, make_layer
from scanl.layers.module import Module
from scanl.layers.packing import restarted
from scanl.layers.registry import layers
from scanl.layers.state import Device, DType, State
from scanl.models.block import CHANNEL_MIXERS, NORMS, Block, BlockState, make_norm, normed
from scanl.models.presets import presets
from scanl.models.saving import ModelPart
from scanl.options import WORDS, ConfiguredMeta, at_least

StackState = tuple[BlockState, ...]


class Backbone(ModelPart, Module, metaclass=ConfiguredMeta):
    """The body of a model, between its input and its head: maps (B, T, dim) to (B, T, dim). Abstract.

    `Stack` is the usual one. A subclass with another state or another wiring works in every model, and is saved with
    it.   dim: D, width.
    """

    dim: int

    def mixers(self) -> list[Layer]:
        """Return the layers that mix steps, the lowest first."""
        raise NotImplementedError

    def make_norm(self) -> nn.RMSNorm | nn.LayerNorm:
        """Return a new norm, of the kind that stands before each layer."""
        raise NotImplementedError

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> State:
        """Return the state before any step."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        state: State = None,
        *,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Map x (B, T, dim) to y (B, T, dim) and the state."""
        raise NotImplementedError

    @property
    def bidirectional(self) -> bool:
        """Whether any layer reads future steps."""
        return any(mixer.bidirectional for mixer in self.mixers())

    @property
    def longest(self) -> int | None:
        """Steps of the longest sequence that all layers read; None: any."""
        limits = [layer.longest for layer in self.modules() if isinstance(layer, Layer)]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def timed(self) -> bool:
        """Whether every layer takes the durations of steps, `timespans`."""
        return all("timespans" in mixer.takes for mixer in self.mixers())


WORDS[Backbone] = "a stack of layers, such as Stack(256, 6, 'hawk')"


class Stack(Backbone):
    """`depth` blocks and a final norm; maps (B, T, dim) to (B, T, dim) and the state.

    `scanl train` has an option for each argument.

    The initial weights of projections into the residual stream are divided by the square root of the number of such
    projections in the stack, so that the stream's variance does not grow with depth. Layers whose authors publish
    another scale (`residual_by_depth`) use that scale. State: one BlockState for each block.

    recompute: an attribute, False at first. If it is True, a forward pass with gradients keeps only what enters each
    block, and the backward pass runs the block again (Chen et al., arXiv:1604.06174). The numbers are the same.
    """

    name: ClassVar[str] = "stack"  # in messages

    def __init__(
        self,
        dim: Annotated[int, at_least(1), "D, width of the residual stream"],
        depth: Annotated[int, at_least(1), "number of blocks"],
        layer: Annotated[
            Designation | Sequence[Any],  # `layer_class` has a better message for what is no layer
            "a registered layer (hawk), a pattern of layers that repeats over depth (hawk,hawk,lru), or a preset "
            "(griffin). A class of your own stands wherever a name does, and so does my.module:MyRNN. Of an instance, "
            "every block gets a copy, with its values",
        ] = "hawk",
        *,
        layer_options: Annotated[
            Mapping[str, Any] | None,
            "the layer's options; for a pattern, by layer: {lru: {...}}. The name of a class of your own is that of "
            "the class",
        ] = None,
        channel_mixer: Annotated[
            Designation,
            f"layer that mixes channels after each layer: {', '.join(CHANNEL_MIXERS)}; or a class of your own",
        ] = "gated_mlp",
        channel_options: Annotated[Mapping[str, Any] | None, "the channel mixer's options"] = None,
        norm: Annotated[str, f"norm before every mixer and after the last block: {', '.join(NORMS)}"] = "rmsnorm",
        norm_eps: Annotated[float, at_least(0), "ε of the norms"] = 1e-6,
        residual_in_float32: Annotated[
            bool, "keep the residual stream in float32 where the parameters are narrower"
        ] = False,
        dropout: Annotated[
            float, "fraction of a layer's or mixer's output that is dropped before it is added, in training"
        ] = 0.0,
        own_norm: Annotated[bool, "the layers have norms of their own, so none stands before them"] = False,
        two_hop: Annotated[bool, "a channel mixer's output is added to the block's input (see `Block`)"] = False,
    ) -> None:
        super().__init__()
        single = isinstance(layer, str | type | Layer)
        pattern = [designation for item in ([layer] if single else layer) for designation in _layers_of(item)]
        if not pattern:
            raise ConfigError("stack: layer is an empty pattern, expected at least one layer")
        options = _options_by_name(pattern, layer_options or {}, single=single and pattern == [layer])
        mixers = [
            make_layer(designation, dim, options[label(designation)]) for designation in (pattern * depth)[:depth]
        ]
        self.dim = dim
        self.blocks = nn.ModuleList(
            Block(m, channel_mixer, dict(channel_options or {}), norm, norm_eps, dropout, own_norm, two_hop)
            for m in mixers
        )
        channels = [block.channel for block in self._blocks() if block.channel is not None]
        for stacked in (mixers, channels):
            for index, entering in enumerate(stacked):
                entering.enter_stack(index, stacked)
        self.norm_kind, self.norm_eps = norm, norm_eps
        self.norm = self.make_norm()
        self.residual_in_float32 = residual_in_float32
        self.recompute = False
        self._scale_residual_writers()

    def mixers(self) -> list[Layer]:
        return [block.mixer for block in self._blocks()]

    def make_norm(self) -> nn.RMSNorm | nn.LayerNorm:
        return make_norm(self.norm_kind, self.dim, self.norm_eps)

    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> StackState:
        return tuple(block.init_state(batch_size, device=device, dtype=dtype) for block in self._blocks())

    def _scale_residual_writers(self) -> None:
        writes = sum(1 if block.channel is None else 2 for block in self._blocks())
        for layer in self.modules():
            if isinstance(layer, Layer) and layer.residual_out is not None and not layer.residual_by_depth:
                projection = cast(nn.Linear, layer.get_submodule(layer.residual_out))
                with torch.no_grad():
                    projection.weight.div_(math.sqrt(writes))

    def forward(
        self,
        x: Tensor,
        state: StackState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        starts: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, StackState]:
        """Apply all blocks and the norm to x (B, T, dim).

        starts: (B, T) bool, True at steps before which the state begins anew.
        timespans: (B, T), duration of each step. Every layer must accept it.
        """
        if starts is not None:
            self._check_state(state)
            more = {"cu_seqlens": cu_seqlens, "starts": starts, "timespans": timespans}
            return restarted(self.name, self.forward, self.init_state, x, state, **more)
        x, state = self.run_blocks(x, state, cu_seqlens=cu_seqlens, timespans=timespans)
        return normed(self.norm, x), state

    def run_blocks(
        self,
        x: Tensor,
        state: StackState | None,
        *,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
        after_block: Callable[[int, Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, StackState]:
        """Apply all blocks without the norm after the last.

        after_block: called as after_block(i, x) with the output of block i; returns what the next block reads.
        """
        self._check_state(state)
        states, memo = [], {}
        x = widen(x) if self.residual_in_float32 else x
        again = self.recompute and torch.is_grad_enabled()
        for index, (block, previous) in enumerate(zip(self._blocks(), state or [None] * len(self.blocks), strict=True)):
            run = partial(_checkpointed, block) if again else block
            x, after = run(x, previous, cu_seqlens=cu_seqlens, timespans=timespans, memo=memo)
            x = x if after_block is None else after_block(index, x)
            states.append(after)
        return x, tuple(states)

    def _check_state(self, state: Any) -> None:
        """Raise ShapeError unless each block has a state of its own. The layers check the tensors."""
        if state is None or torch.compiler.is_compiling():
            return
        blocks = len(self.blocks)
        if not isinstance(state, tuple | list):
            shown = f"a {type(state).__name__}"
        elif len(state) == blocks and all(entry is None or len(entry) == 2 for entry in state):
            return
        else:
            shown = f"a {type(state).__name__} of {len(state)}"
        raise ShapeError(
            f"stack: state is {shown}, expected None or the state that this stack returned, a BlockState for each of "
            f"its {blocks} blocks"
        )


def _checkpointed(
    block: Block, x: Tensor, state: BlockState | None, *, memo: dict[str, Tensor], **others: Any
) -> tuple[Tensor, BlockState]:
    """Call a block of which the backward pass needs only what enters it, because it runs the block again."""
    first, entering = iter([memo]), dict(memo)

    def run(x: Tensor, state: BlockState | None) -> tuple[Tensor, BlockState]:
        return block(x, state, memo=next(first, dict(entering)), **others)

    contexts = partial(auxiliary.checkpoint_contexts, block)
    return checkpoint(run, x, state, use_reentrant=False, context_fn=contexts)  # pyright: ignore[reportReturnType]


def check_causal(who: str, stack: Backbone) -> None:
    """Raise ConfigError if a layer of the stack is bidirectional."""
    for mixer in stack.mixers():
        if mixer.bidirectional:
            raise ConfigError(f"{who}: layer {label(mixer)!r} is bidirectional, expected causal ones only")
    if stack.bidirectional:
        raise ConfigError(f"{who}: a {type(stack).__name__} is bidirectional, expected a causal stack")


def _layers_of(layer: Designation) -> tuple[Designation, ...]:
    """Return the layers of a whole model, or the layer itself."""
    return presets.get(layer).layers if isinstance(layer, str) and presets.find(layer) is not None else (layer,)


def _options_by_name(
    pattern: Sequence[Designation], options: Mapping[str, Any], single: bool
) -> dict[str, dict[str, Any]]:
    for layer in pattern:
        layer_class(layer)
    known = list(dict.fromkeys(map(label, pattern)))
    if single:
        return {known[0]: dict(options)}
    by_label = {layers.find(name) or name: values for name, values in options.items()}
    for name in by_label:
        if name not in known:
            raise nearest("layer in layer_options", name, known)
    return {name: dict(by_label.get(name, {})) for name in known}
