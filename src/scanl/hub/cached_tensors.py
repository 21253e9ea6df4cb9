"""The tensors of constant size in caches of transformers: reading them, writing them, and caches for a recording."""

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from scanl.ops._compiler.rules import UnsupportedOperation

CACHES = ("cache", "past_key_values", "cache_params")  # names of the argument for a `Cache`: the last two before 5.24
LAYER_ATTRIBUTE = "_scanl_layer"  # of a patched module: the index of its layer in the cache

Places = list[tuple[Any, Any]]  # containers, and the keys or indices in them at which tensors are


class CacheKind(NamedTuple):
    """A kind of cache.

    fits: whether a value is one.   places: where it has tensors, for the layers with these indices; None while some of
    them are not made yet, or while it keeps more than a step needs.   blank: a copy for a recording, whose tensors can
    be replaced. What a kernel cannot keep there raises UnsupportedOperation.   tokens_in: the number of
    tokens that a blank was told of.   add_tokens: tells a cache of as many.
    """

    name: str
    fits: Callable[[Any], bool]
    places: Callable[[Any, Collection[int]], Places | None]
    blank: Callable[[Any, Collection[int]], Any]
    tokens_in: Callable[[Any], int] = lambda blank: 0
    add_tokens: Callable[[Any, int], None] = lambda cache, tokens: None


def kind_of(value: Any) -> CacheKind | None:
    """Return the kind of cache that a value is; None if it is none."""
    return next((kind for kind in _KINDS if kind.fits(value)), None)


def tensors_at(places: Places) -> list[Tensor]:
    return [holder[key] for holder, key in places]


def write(places: Places, tensors: Sequence[Tensor]) -> None:
    for (holder, key), tensor in zip(places, tensors, strict=True):
        holder[key] = tensor


def _of_layers(cache: Any, indices: Collection[int]) -> Places | None:
    places: Places = []
    for index in indices:
        if index >= len(cache.layers):
            return None
        layer = cache.layers[index]
        if not hasattr(layer, "recurrent_states"):
            continue
        if layer.record_past or layer.__dict__.get("_scanl_fresh") is not None:
            return None
        for slot, filled in layer.has_previous_state.items():
            if not filled:
                return None
            if layer.is_conv_states_initialized[slot]:
                places.append((layer.conv_states, slot))
            if layer.is_recurrent_states_initialized[slot]:
                places.append((layer.recurrent_states, slot))
    return places


class _ClosedLayer:
    """A layer of a cache that a kernel cannot keep."""

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedOperation("its cache grows with the text, as that of attention does")


def _closed(*_: Any, **__: Any) -> Any:
    raise UnsupportedOperation("it asks for the length of its cache")


def _blank_layers(cache: Any, indices: Collection[int]) -> Any:
    blank = copy.copy(cache)
    blank.layers = [_ClosedLayer() for _ in cache.layers]
    for index in indices:
        if not hasattr(cache.layers[index], "recurrent_states"):
            continue
        layer = blank.layers[index] = copy.copy(cache.layers[index])
        layer.conv_states, layer.recurrent_states = dict(layer.conv_states), dict(layer.recurrent_states)
        if hasattr(layer, "keys"):
            layer.update = _closed
    blank.get_seq_length = blank.get_mask_sizes = blank.get_query_offset = _closed
    return blank


def _of_states(cache: Any, indices: Collection[int]) -> Places:
    for index, state in cache.rnn_state.items():
        if type(state) is tuple:  # which cannot be written
            cache.rnn_state[index] = list(state)
    return [(state, at) for state in cache.rnn_state.values() for at in range(len(state))]


def _blank_states(cache: Any, indices: Collection[int]) -> Any:
    blank = copy.copy(cache)
    blank.rnn_state, blank.seqlen_offset = {index: list(state) for index, state in cache.rnn_state.items()}, 0
    return blank


def _add_tokens(cache: Any, tokens: int) -> None:
    cache.seqlen_offset += tokens


_KINDS = (
    CacheKind("Cache", lambda value: type(value).__module__ == "transformers.cache_utils", _of_layers, _blank_layers),
    CacheKind(
        "xLSTMCache",
        lambda value: hasattr(value, "rnn_state") and hasattr(value, "seqlen_offset"),
        _of_states,
        _blank_states,
        lambda blank: blank.seqlen_offset,
        _add_tokens,
    ),
    CacheKind(
        "state of RWKV",
        lambda value: isinstance(value, list) and len(value) > 0 and all(isinstance(each, Tensor) for each in value),
        lambda state, indices: [(state, at) for at in range(len(state))],
        lambda state, indices: type(state)(state),
    ),
)
