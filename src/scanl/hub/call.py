"""What every mixer of a model needs to know of one call: which tokens are padding, and where packed sequences begin."""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError, ShapeError
from scanl.layers.packing import pack, unpack


class Call(NamedTuple):
    """shape: (B, T) of its tokens.

    mask: (B, T) bool, False at padding; None without any padding.   cu_seqlens: offsets of the sequences among all B T
    tokens, row after row; None where every row is one.   outer: the call within which this one was made.
    fed: how many steps `part` gave each module.
    """

    shape: torch.Size
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    outer: "Call | None" = None
    fed: "dict[nn.Module, int] | None" = None


_current: ContextVar[Call | None] = ContextVar("call", default=None)


def of(x: Tensor, attention_mask: Tensor | None = None) -> Call:
    """The call in progress; for a mixer called by itself, what its own arguments say of x (B, T, D)."""
    found, shape = _current.get(), x.shape[:2]
    return found if found is not None and found.shape == shape else Call(shape, valid(attention_mask, shape[1]))


def part(module: nn.Module, x: Tensor) -> Call:
    """As `of`, for a module that its model may feed the steps of one call in several parts, in their order."""
    found, shape = _current.get(), x.shape[:2]
    if found is None or found.shape[:1] != shape[:1] or found.shape[1] <= shape[1] or found.fed is None:
        return of(x)
    if found.cu_seqlens is not None:
        raise ConfigError(f"packed sequences of {found.shape[1]} tokens come in parts of {shape[1]}, expected one part")
    start = found.fed.get(module, 0)
    found.fed[module] = start + shape[1]
    return Call(shape, None if found.mask is None else valid(found.mask[:, start : start + shape[1]], shape[1]))


def valid(attention_mask: Any, steps: int) -> Tensor | None:
    """The last T columns of a padding mask as bool; None when nothing is masked there.

    Masks of attention, (B, 1, T, S), say nothing of padding to a recurrence; of a dict of masks, which `generate`
    makes beside static caches, one that does is taken.
    """
    if isinstance(attention_mask, dict):
        masks = (mask for mask in attention_mask.values() if isinstance(mask, Tensor) and mask.ndim == 2)
        attention_mask = next(masks, None)
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2 or steps == 0:
        return None
    mask = attention_mask[:, -steps:].bool()
    return None if mask.shape[1] == steps and bool(mask.all()) else mask


def begin(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    names: Sequence[str],
    alone: frozenset[str] = frozenset(),
) -> None:
    """A hook before the forward of a model: what it is given holds for every mixer inside it.

    names: of the forward's parameters, in order.   alone: what its mixers know from here only, and so not when
    checkpointing runs them once more: "padding", "packing".
    """
    given = dict(zip(names, args, strict=False)) | kwargs
    outer = _current.get()
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        _current.set(Call(torch.Size(), outer=outer))
        return
    shape = tokens.shape[:2]
    mask, cu_seqlens = valid(given.get("attention_mask"), shape[1]), _packed(given, shape)
    if outer is not None and outer.shape == shape:  # a model inside the model, which is not told all
        mask = outer.mask if mask is None else mask
        cu_seqlens = outer.cu_seqlens if cu_seqlens is None else cu_seqlens
    who = type(model).__name__
    if cu_seqlens is not None and mask is not None:
        raise ConfigError(f"{who}: attention_mask marks padding beside packed sequences, expected one of the two")
    lost = "padding" if mask is not None else "packing" if cu_seqlens is not None else ""
    if lost in alone and model.training and any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        raise ConfigError(f"{who}: {lost} with gradient checkpointing, expected one of the two")
    _current.set(Call(shape, mask, cu_seqlens, outer, {}))


def end(*_: object) -> None:
    """A hook after the forward of a model, even when it failed."""
    found = _current.get()
    _current.set(None if found is None else found.outer)


def _packed(given: dict[str, Any], shape: torch.Size) -> Tensor | None:
    cu_seqlens, index = given.get("cu_seq_lens_q"), given.get("seq_idx")
    if cu_seqlens is not None:
        if shape[0] != 1:
            raise ShapeError(f"cu_seq_lens_q is given for input_ids of batch {shape[0]}, expected a batch of 1")
        return cu_seqlens
    if index is None:
        return None
    if index.shape != shape:
        raise ShapeError(f"seq_idx has shape {tuple(index.shape)}, expected {tuple(shape)} of input_ids")
    starts = torch.zeros_like(index, dtype=torch.bool)
    starts[:, 1:] = index[:, 1:] != index[:, :-1]
    return offsets(starts)


def offsets(starts: Tensor) -> Tensor:
    """`cu_seqlens` of sequences that begin where `starts` (B, T) says so, and with each row."""
    starts = starts.clone()
    starts[:, 0] = True
    return F.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=starts.numel())


class Rows(NamedTuple):
    """How the tokens of a call were laid out for the ops: as they came, or one sequence after the other in one row."""

    shape: torch.Size
    mask: Tensor | None
    cu_seqlens: Tensor | None

    @classmethod
    def lay(cls, call: Call, x: Tensor) -> "tuple[Rows, Tensor]":
        """x (B, T, D) as the ops take it."""
        if call.cu_seqlens is not None:
            return cls(x.shape[:2], None, call.cu_seqlens), x.flatten(0, 1)[None]
        if call.mask is not None:
            packed, cu_seqlens = pack(x, call.mask)
            return cls(x.shape[:2], call.mask, cu_seqlens), packed
        return cls(x.shape[:2], None, None), x

    @property
    def packed(self) -> bool:
        """Whether a row holds several sequences, each of which starts from nothing."""
        return self.cu_seqlens is not None and self.mask is None

    def start_anew(self, held: bool) -> None:
        """ConfigError where packed sequences meet a state that is held for their row."""
        if held and self.packed:
            raise ConfigError("packed sequences start from nothing, but the cache holds a state")

    def back(self, y: Tensor) -> Tensor:
        """What the ops gave, as the tokens came; zero at padding."""
        return y.view(*self.shape, *y.shape[2:]) if self.mask is None else unpack(y, self.mask)

    def last(self, state: Tensor) -> Tensor:
        """Of the states of all sequences (N, ...) that of the last in each row (B, ...): what a cache keeps."""
        if self.cu_seqlens is None or not self.packed:
            return state
        batch, steps = self.shape
        ends = torch.arange(1, batch + 1, device=state.device) * steps
        return state[torch.searchsorted(self.cu_seqlens, ends) - 1]
