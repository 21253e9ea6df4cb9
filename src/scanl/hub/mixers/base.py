"""What a family of transformers' mixers tells of itself, and how those that keep their state in a `Cache` are run."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.hub import call
from scanl.layers.short_convolution import convolve
from scanl.registry import Registry


class Mixer(ABC):
    """One family: modules whose forward does the same thing, so that one piece of code serves all of them.

    A subclass gives `forward` with the signature that the model calls its mixer with.
    """

    name: ClassVar[str] = ""  # set by `register`
    modules: ClassVar[tuple[str, ...]] = ()  # MODEL.CLASS under transformers.models
    before: ClassVar[str] = ""  # what transformers runs without compiled packages
    runs: ClassVar[str] = ""  # the ops that run instead
    corrects: ClassVar[tuple[str, ...]] = ()  # where the original is wrong
    kernels: ClassVar[tuple[str, ...]] = ()  # functions of the original's module that may come from compiled packages
    call_alone: ClassVar[tuple[str, ...]] = ()  # what only a `Call` tells this family: "padding", "packing"

    @staticmethod
    @abstractmethod
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        """What module(*args, **kwargs) returns, computed by scanl's ops."""


registry: Registry[Mixer] = Registry("mixer")
register, names, get = registry.add, registry.names, registry.get


class CachedMixer(Mixer):
    """A family whose state lies in transformers' `Cache`, as a window of inputs and a recurrent state, or one of the two.

    A subclass gives `run`.
    """

    @staticmethod
    @abstractmethod
    def run(
        module: Any, x: Tensor, conv: Tensor | None, recurrent: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """x (B, T, D), packed if cu_seqlens says so, and the state before it, one row for each sequence.

        conv: the last W-1 inputs of the convolution (N, W-1, C).   recurrent: as the cache holds it.
        Returns y (B, T, D), the inputs of the convolution (B, T, C), its state and the recurrent state afterwards;
        None for what the family does not have.
        """

    @classmethod
    def forward(
        cls,
        module: Any,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        found = call.of(hidden_states, attention_mask)
        rows, x = call.Rows.lay(found, hidden_states)
        conv = recurrent = None
        if cache_params is not None:
            conv, recurrent = read(cache_params, module.layer_idx)
            if found.cu_seqlens is not None and (conv is not None or recurrent is not None):
                raise ConfigError("packed sequences start from nothing, but the cache holds a state")
        y, inputs, conv, recurrent = cls.run(module, x, conv, recurrent, rows.cu_seqlens)
        if cache_params is not None:
            write(cache_params, module, rows, inputs, conv, recurrent)
        return rows.back(y)


def read(cache: Any, index: int) -> tuple[Tensor | None, Tensor | None]:
    """The last W-1 inputs (B, W-1, C) and the recurrent state of a layer of a cache; None before the first input."""
    conv = cache.get_conv_state(index)
    return None if conv is None else conv[..., 1:].mT, cache.get_recurrent_state(index)


def write(
    cache: Any, module: Any, rows: call.Rows, inputs: Tensor | None, conv: Tensor | None, recurrent: Tensor | None
) -> None:
    """Keep what comes next: the window of the last W inputs, and the recurrent state."""
    index = module.layer_idx
    if inputs is not None:
        assert conv is not None
        window = conv.shape[1] + 1
        if rows.cu_seqlens is None:
            recent = inputs if cache.is_recording_past(index) else inputs[:, -window:]
            cache.update_conv_state(recent.mT, index, conv_kernel_size=window)
        else:
            # The cache holds one input more than a convolution looks back to: nothing reads it.
            kept = nn.functional.pad(rows.last(conv).mT.to(inputs.dtype), (1, 0))
            cache.layers[index].has_previous_state[0] = False
            cache.update_conv_state(kept, index, conv_kernel_size=window)
    if recurrent is not None:
        cache.update_recurrent_state(rows.last(recurrent), index)
        cache.layers[index].has_previous_state[0] = True


def convolved(
    module: Any, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """`module.conv1d` over x (B, T, C), and what transformers calls an activation."""
    if activation in (None, "silu", "swish"):
        return convolve(module.conv1d, x, state, cu_seqlens=cu_seqlens, silu=activation is not None)
    from transformers.activations import ACT2FN

    y, state = convolve(module.conv1d, x, state, cu_seqlens=cu_seqlens)
    return ACT2FN[activation](y), state


def decay(A_log: Tensor) -> Tensor:
    """A = -exp(A_log), in float32."""
    return -torch.exp(A_log.float())
