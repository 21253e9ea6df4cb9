"""Keys and values of attention in caches of transformers, in buffers to which a kernel adds those of a token.

A cache of transformers grows by a copy of all its keys. Here a buffer has slots to spare, and the cache has views of
it. A kernel writes the keys and values of its token to slot 0, and attends to the whole buffer under a mask, which
leaves out what is not in use; the token then moves to its place.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from scanl.ops._compiler.rules import UnsupportedOperation

GROWING_LAYERS = {"DynamicLayer", "LinearAttentionAndFullAttentionLayer"}
SLIDING_LAYERS = {"DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer"}
SPARE_SLOTS = 64  # the least: a larger buffer needs another kernel
_ATTRIBUTE = "_scanl_buffer"  # of a layer of a cache


class KeyBuffer:
    """The keys and values of one layer, (B, H, slots, D). slots: those in use, after slot 0."""

    def __init__(self, layer: Any) -> None:
        size = layer.keys.shape[2]
        count = 1 << (size + max(size // 4, SPARE_SLOTS)).bit_length()
        self.slots = slice(1, 1 + size)
        self.keys, self.values = (self._grown(old, count) for old in (layer.keys, layer.values))
        self._show(layer)

    @classmethod
    def of(cls, layer: Any) -> "KeyBuffer":
        """Return the buffer that the keys of a layer are in; a new one if they are in none, or if that is full."""
        known: KeyBuffer | None = layer.__dict__.get(_ATTRIBUTE)
        if known is None or known.shown[0] is not layer.keys or known.shown[1] is not layer.values:
            known = None
        if known is not None and known.slots.stop < known.keys.shape[2]:
            return known
        made = layer.__dict__[_ATTRIBUTE] = cls(layer)
        return made

    def mask(self, padding: Tensor | None) -> Tensor:
        """Return what is added to the scores of all slots, (B, 1, 1, slots). padding: (B, T + 1), 0 for padding."""
        batch, count = len(self.keys), self.slots.stop - self.slots.start
        mask = torch.full((batch, 1, 1, self.keys.shape[2]), -torch.inf, dtype=self.keys.dtype)
        mask[..., 0] = 0
        if padding is None:
            mask[..., self.slots] = 0
        else:
            mask[..., self.slots].masked_fill_(padding[:, None, None, -1 - count : -1].bool(), 0)
        return mask

    def advance(self, layer: Any) -> None:
        """Move the token from slot 0 to its place."""
        end = self.slots.stop
        self.keys[:, :, end], self.values[:, :, end] = self.keys[:, :, 0], self.values[:, :, 0]
        begin = self.slots.start
        if type(layer).__name__ in SLIDING_LAYERS:
            layer.cumulative_length += 1
            begin = max(begin, end + 2 - layer.sliding_window)
        self.slots = slice(begin, end + 1)
        self._show(layer)

    def _show(self, layer: Any) -> None:
        self.shown = self.keys[:, :, self.slots], self.values[:, :, self.slots]
        layer.keys, layer.values = self.shown

    def _grown(self, old: Tensor, count: int) -> Tensor:
        new = old.new_zeros(*old.shape[:2], count, old.shape[3])
        new[:, :, self.slots] = old
        return new


class RecordedKeys:
    """A layer of a cache for a recording. keys, values: its buffers."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values

    def beside(self, layer: Any) -> Any:
        """Return the layer for a recording: this, or what also has other states."""
        if "recurrent_states" not in vars(layer):
            return self
        layer.update = self.update
        return layer

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self._keys[:, :, :1].copy_(keys)
        self._values[:, :, :1].copy_(values)
        return self._keys, self._values


class AttentionByProducts(TorchFunctionMode):
    """While it is the context, attention is computed by products: they can be recorded, and keys are not copied."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _attention(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend from one token, whose heads (B, H, ·, D) or groups of them share keys (B, H, S, D)."""
    if dropout_p or is_causal or query.ndim != 4:
        raise UnsupportedOperation("attention with dropout, or of several tokens")
    heads = query.shape[1:3]
    if enable_gqa:  # the heads of a group are rows of one product
        query = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return (scores.softmax(-1) @ value).unflatten(-1, (1, -1)).reshape(len(query), *heads, -1)


class MaskByKind(dict[str, Tensor | None]):
    """The masks of a call, by the kinds of layers. Models that know no such masks are refused."""

    def __missing__(self, kind: str) -> Any:
        raise UnsupportedOperation(f"it has layers of {kind}")

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedOperation("it makes its mask of attention in a way of its own")


def buffers(cache: Any) -> dict[int, KeyBuffer] | None:
    """Return the buffers of a cache, by the indices of its layers; None if some layer with keys can have none now."""
    made: dict[int, KeyBuffer] = {}
    for index, layer in enumerate(getattr(cache, "layers", ())):
        if hasattr(layer, "is_sliding"):
            known = type(layer).__name__ in GROWING_LAYERS | SLIDING_LAYERS
            if not known or not layer.is_initialized or layer.keys.ndim != 4 or getattr(layer, "record_past", False):
                return None
            made[index] = KeyBuffer.of(layer)
    return made


def with_masks(arguments: Mapping[str, Any], cache: Any, made: Mapping[int, KeyBuffer]) -> dict[str, Any] | None:
    """Return the arguments of a model with masks of the buffers; None where another mask is given than of padding."""
    padding, masks = arguments.get("attention_mask"), MaskByKind(linear_attention=None, conv=None)
    if padding is not None:
        if not isinstance(padding, Tensor) or padding.ndim != 2:
            return None
        padding = None if bool(padding.all()) else padding
    for index, buffer in made.items():
        if padding is not None and padding.shape[1] <= buffer.slots.stop - buffer.slots.start:
            return None
        kind = "sliding_attention" if cache.layers[index].is_sliding else "full_attention"
        if kind not in masks:
            masks[kind] = buffer.mask(padding)
    return {**arguments, "attention_mask": masks}
