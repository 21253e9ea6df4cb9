"""Base classes of patches: the general one, and one for modules that keep their state in a `Cache`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.hub import call
from scanl.hub.cached_tensors import CACHES, LAYER_ATTRIBUTE
from scanl.layers.parts.short_convolution import convolve
from scanl.registry import Registry


class Patch(ABC):
    """Replacement for the forward of some modules of transformers or torch, all of which compute the same function.

    A subclass defines `forward`, with the signature that the model uses to call the module.
    """

    name: ClassVar[str] = ""  # set by `register`
    modules: ClassVar[tuple[str, ...]] = ()  # MODEL.CLASS under transformers.models, or torch.nn.CLASS
    original: ClassVar[str] = ""  # what transformers runs without compiled kernels
    runs: ClassVar[str] = ""  # the ops that run with the patch
    corrects: ClassVar[tuple[str, ...]] = ()  # cases in which the original is wrong
    kernels: ClassVar[tuple[str, ...]] = ()  # functions of the module's file that may be compiled kernels
    reads: ClassVar[tuple[str, ...]] = ()  # inner modules that it computes from their weights, without calling them
    needs_call: ClassVar[tuple[str, ...]] = ()  # what it can learn only from a `Call`: "padding", "packing"

    @staticmethod
    @abstractmethod
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute module(*args, **kwargs) by scanl's ops."""

    @staticmethod
    def unable(module: Any) -> str:
        """Return why this module cannot be patched; an empty string if it can be."""
        return ""

    @classmethod
    def whole(cls, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call that kernels compute whole; None for other calls, which `takes` decides."""
        return None

    @classmethod
    def takes(cls, module: Any, *args: Any, **kwargs: Any) -> bool:
        """Whether `forward` computes this call. If not, the module's own forward does."""
        return True

    @classmethod
    def calls(cls) -> tuple[str, ...]:
        """Return what computes which calls, and why: a line for each."""
        return (f"calls of any length: {cls.runs}",)


registry: Registry[Patch] = Registry("patch")
register, names, get = registry.add, registry.names, registry.get


class CachedPatch(Patch):
    """Patch for modules that keep a window of inputs, a recurrent state, or both in transformers' `Cache`.

    A subclass defines `run`.
    """

    @staticmethod
    @abstractmethod
    def run(
        module: Any, x: Tensor, conv: Tensor | None, recurrent: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Run the module over x (B, T, D), packed if cu_seqlens is given, from a state with one row for each sequence.

        conv: the last W-1 inputs of the convolution (N, W-1, C).   recurrent: in the form of the cache.
        Returns y (B, T, D), the inputs of the convolution (B, T, C), its new state and the new recurrent state. An item
        that the module does not have is None.
        """

    @staticmethod
    def slot(module: Any) -> int:
        """Return the index of this module's state in its layer's cache, which may hold states of several modules."""
        return 0

    @classmethod
    def forward(
        cls,
        module: Any,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        cache = given_cache(cache, others)
        rows, x = call.TokenRows.lay(call.of(module, hidden_states, attention_mask), hidden_states)
        conv, recurrent, slot = None, None, cls.slot(module)
        if cache is not None:
            conv, recurrent = read(cache, module.layer_idx, slot)
            rows.start_anew(conv is not None or recurrent is not None)
        y, inputs, conv, recurrent = cls.run(module, x, conv, recurrent, rows.cu_seqlens)
        if cache is not None:
            write(cache, module, rows, inputs, conv, recurrent, slot)
        return rows.back(y)


def given_cache(cache: Any, others: Mapping[str, Any]) -> Any:
    """Return the cache of a call of a module; None if there is none. others: the arguments that are not `cache`."""
    return next((found for found in (cache, *map(others.get, CACHES)) if found is not None), None)


def layer_index(module: Any) -> int:
    """Return the index of the module's layer: its own attribute, or else the number in its name in the model."""
    index = getattr(module, "layer_idx", None)
    index = module.__dict__.get(LAYER_ATTRIBUTE) if index is None else index
    if index is None:
        raise ConfigError(
            f"{type(module).__name__} does not know the index of its layer in the cache; accelerate the whole model, "
            "not the module alone"
        )
    return index


def read(cache: Any, index: int, slot: int = 0) -> tuple[Tensor | None, Tensor | None]:
    """Read the last W-1 inputs (B, W-1, C) and the recurrent state of a layer's cache; None before the first input."""
    conv = cache.get_conv_state(index, slot)
    if conv is not None:
        # A cache that records its past holds more than the window, and less when the past is shorter.
        spare = conv.shape[-1] - cache.layers[index].conv_kernel_size[slot]
        conv = (conv if spare == 0 else nn.functional.pad(conv, (-spare, 0)))[..., 1:].mT
    return conv, cache.get_recurrent_state(index, slot)


def write(
    cache: Any,
    module: Any,
    rows: call.TokenRows,
    inputs: Tensor | None,
    conv: Tensor | None,
    recurrent: Tensor | None,
    slot: int = 0,
) -> None:
    """Write the recurrent state and the last W inputs to a cache; all inputs if the cache records its past.

    A backward pass may need the old content of the cache, so nothing is overwritten while gradients are on.
    """
    index, in_place = layer_index(module), not torch.is_grad_enabled()
    if inputs is not None:
        assert conv is not None
        layer, window, conv = cache.layers[index], conv.shape[1] + 1, rows.last(conv).mT
        if cache.is_recording_past(index) and not rows.packed:
            cache.update_conv_state(rows.back(inputs).mT, index, slot, conv_kernel_size=window)
        elif not layer.has_previous_state[slot]:
            # The cache holds one input more than the convolution needs. The first one is never read.
            previous = nn.functional.pad(conv.to(inputs.dtype), (1, 0))
            cache.update_conv_state(previous, index, slot, conv_kernel_size=window)
        elif in_place:
            layer.conv_states[slot][..., 1:].copy_(conv)
        else:
            layer.conv_states[slot] = nn.functional.pad(conv.to(layer.conv_states[slot].dtype), (1, 0))
    if recurrent is not None:
        recurrent, layer = rows.last(recurrent), cache.layers[index]
        previous = layer.recurrent_states[slot]
        if previous is None or (previous.is_cuda and in_place):  # a CUDA graph needs the same memory address
            cache.update_recurrent_state(recurrent, index, slot)
        else:
            layer.recurrent_states[slot] = recurrent.to(previous.dtype)
        layer.has_previous_state[slot] = True


def convolved(
    module: Any, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """Apply `module.conv1d` to x (B, T, C), then the activation of this name in transformers."""
    if activation in (None, "silu", "swish"):
        return convolve(module.conv1d, x, state, cu_seqlens=cu_seqlens, silu=activation is not None)
    from transformers.activations import ACT2FN

    y, state = convolve(module.conv1d, x, state, cu_seqlens=cu_seqlens)
    return ACT2FN[activation](y), state


def decay(A_log: Tensor) -> Tensor:
    """Return A = -exp(A_log), in float32."""
    return -torch.exp(A_log.float())
