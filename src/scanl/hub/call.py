"""Facts about a call of a model that patches need: its padding, and the beginnings of packed sequences."""

import functools
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError, ShapeError
from scanl.hub import token_calls
from scanl.layers.packing import pack, unpack
from scanl.ops.products.functions import large_products


@dataclass(frozen=True, eq=False)
class ModelCall:
    """One call of a model.

    shape: (B, T) of its tokens.   mask: (B, T) bool, False at padding; None without padding.
    cu_seqlens: offsets of the sequences among all B T tokens, row after row; None when every row is one sequence.
    model: the model.   fed: number of steps that `part` has given to each module.
    """

    shape: torch.Size
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    model: nn.Module | None = None
    fed: dict[nn.Module, int] = field(default_factory=dict)

    @property
    def is_token(self) -> bool:
        """Whether each row has one token, and none is padding."""
        return len(self.shape) == 2 and self.shape[1] == 1 and self.mask is None and self.cu_seqlens is None

    @functools.cached_property
    def _modules(self) -> frozenset[nn.Module]:
        return frozenset() if self.model is None else frozenset(self.model.modules())

    def holds_for(self, module: nn.Module) -> bool:
        """Whether there is padding or packing, and the module is a part of the model, not of another one."""
        return (self.mask is not None or self.cu_seqlens is not None) and module in self._modules


_current: ContextVar[ModelCall | None] = ContextVar("call", default=None)


def of(module: nn.Module, x: Tensor, attention_mask: Tensor | None = None) -> ModelCall:
    """Return the call in progress. For a module called outside a model, make one from x (B, T, D) and the mask."""
    current, shape = _current.get(), x.shape[:2]
    if current is not None and current.shape == shape and current.holds_for(module):
        return current
    return ModelCall(shape, valid(attention_mask, shape[1]))


def part(module: nn.Module, x: Tensor) -> ModelCall:
    """Return the same as `of`, for a module that may get the steps of one call in several parts, in order."""
    current, shape = _current.get(), x.shape[:2]
    if (
        current is None
        or current.shape[:1] != shape[:1]
        or current.shape[1] <= shape[1]
        or not current.holds_for(module)
    ):
        return of(module, x)
    if current.cu_seqlens is not None:
        raise ConfigError(
            f"{type(module).__name__}: packed sequences of {current.shape[1]} tokens come in parts of {shape[1]}, "
            "expected one part; raise the chunk size of the model's config (max_inference_chunksize)"
        )
    start = current.fed.get(module, 0)
    current.fed[module] = start + shape[1]
    assert current.mask is not None
    return ModelCall(shape, valid(current.mask[:, start : start + shape[1]], shape[1]))


def valid(attention_mask: Any, steps: int) -> Tensor | None:
    """Return the last T columns of a padding mask as bool; None when they mask nothing.

    An attention mask (B, 1, T, S) does not say which tokens are padding, and is ignored. For a static cache `generate`
    makes a dict of masks; the padding mask in it is used.
    """
    if isinstance(attention_mask, dict):
        masks = (mask for mask in attention_mask.values() if isinstance(mask, Tensor) and mask.ndim == 2)
        attention_mask = next(masks, None)
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2 or steps == 0:
        return None
    mask = attention_mask[:, -steps:].bool()
    return None if mask.shape[1] == steps and bool(mask.all()) else mask


def within(
    names: Sequence[str],
    needs_call: frozenset[str],
    tokens: token_calls.TokenCalls,
    model: nn.Module,
    original: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the forward of a model, while its padding and packing are known to the patches inside.

    names: names of the forward's parameters, in order.   needs_call: see `_begun`.   tokens: what runs its calls for
    one token of each row.
    """
    outer = _current.get()
    arguments = dict(zip(names, args, strict=False)) | kwargs
    call = _begun(model, arguments, outer, needs_call)
    try:
        _current.set(call)
        if not call.is_token:
            with large_products(math.prod(call.shape)):
                return original(*args, **kwargs)
        if outer is None:
            return tokens.within(model, original, arguments, call.shape[0])
        return token_calls.of_part(names, None, model, original, *args, **kwargs)
    finally:  # not a hook of torch, which an interrupt by the user skips
        _current.set(outer)


def _begun(
    model: nn.Module, arguments: dict[str, Any], outer: ModelCall | None, needs_call: frozenset[str]
) -> ModelCall:
    """Return the call of a model with these arguments, inside the call `outer`.

    needs_call: facts that the patches inside read from the call alone, "padding" or "packing". Gradient checkpointing
    runs modules again after the call has ended, so it cannot be used together with these.
    """
    tokens = arguments.get("input_ids")
    tokens = arguments.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        return ModelCall(torch.Size(), model=model)
    shape = tokens.shape[:2]
    mask, cu_seqlens = valid(arguments.get("attention_mask"), shape[1]), _packed(arguments, shape)
    if outer is not None and outer.shape == shape and outer.holds_for(model):
        # an inner model, which does not get all arguments
        mask = outer.mask if mask is None else mask
        cu_seqlens = outer.cu_seqlens if cu_seqlens is None else cu_seqlens
    who = type(model).__name__
    if cu_seqlens is not None and mask is not None:
        raise ConfigError(
            f"{who}: attention_mask marks padding in packed sequences, expected padding or packing, not both; pack "
            "without padding"
        )
    lost = "padding" if mask is not None else "packing" if cu_seqlens is not None else ""
    if lost in needs_call and model.training and _checkpoints(model):
        raise ConfigError(
            f"{who}: {lost} cannot be combined with gradient checkpointing; call gradient_checkpointing_disable()"
        )
    return ModelCall(shape, mask, cu_seqlens, model)


def _checkpoints(model: nn.Module) -> bool:
    """Whether some modules of the model run again in the backward pass."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _packed(arguments: dict[str, Any], shape: torch.Size) -> Tensor | None:
    cu_seqlens, index = arguments.get("cu_seq_lens_q"), arguments.get("seq_idx")
    if cu_seqlens is not None:
        if shape[0] != 1:
            raise ShapeError(
                f"cu_seq_lens_q is given for input_ids of batch {shape[0]}, expected a batch of 1: packed sequences "
                "are one row"
            )
        return cu_seqlens
    if index is None:
        return None
    if index.shape != shape:
        raise ShapeError(f"seq_idx has shape {tuple(index.shape)}, expected {tuple(shape)} of input_ids")
    starts = torch.zeros_like(index, dtype=torch.bool)
    starts[:, 1:] = index[:, 1:] != index[:, :-1]
    return offsets(starts)


def offsets(starts: Tensor) -> Tensor:
    """Return `cu_seqlens` of sequences that begin where `starts` (B, T) is True, and at each row."""
    starts = starts.clone()
    starts[:, 0] = True
    return F.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=starts.numel())


class TokenRows(NamedTuple):
    """Layout of a call's tokens for the ops: unchanged, or all sequences packed into one row."""

    shape: torch.Size
    mask: Tensor | None
    cu_seqlens: Tensor | None

    @classmethod
    def lay(cls, call: ModelCall, x: Tensor) -> "tuple[TokenRows, Tensor]":
        """Return the layout, and x (B, T, D) in that layout."""
        if call.cu_seqlens is not None:
            return cls(x.shape[:2], None, call.cu_seqlens), x.flatten(0, 1)[None]
        if call.mask is not None:
            packed, cu_seqlens = pack(x, call.mask)
            return cls(x.shape[:2], call.mask, cu_seqlens), packed
        return cls(x.shape[:2], None, None), x

    @property
    def packed(self) -> bool:
        """Whether a row holds several sequences. Each of them starts from an empty state."""
        return self.cu_seqlens is not None and self.mask is None

    def start_anew(self, has_state: bool) -> None:
        """Raise ConfigError when the sequences are packed and the cache has a state to start from."""
        if has_state and self.packed:
            raise ConfigError(
                "packed sequences are given with a cache that holds a state, expected an empty cache: each of them "
                "starts from an empty state"
            )

    def back(self, y: Tensor) -> Tensor:
        """Return the ops' output y in the layout of the tokens, zero at padding."""
        return y.view(*self.shape, *y.shape[2:]) if self.mask is None else unpack(y, self.mask)

    def last(self, state: Tensor) -> Tensor:
        """Return the states (B, ...) for a cache: the last sequence's state in each row, from all states (N, ...)."""
        if self.cu_seqlens is None or not self.packed:
            return state
        batch, steps = self.shape
        ends = torch.arange(1, batch + 1, device=state.device) * steps
        return state[torch.searchsorted(self.cu_seqlens, ends) - 1]
