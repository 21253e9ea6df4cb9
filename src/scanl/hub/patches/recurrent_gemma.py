"""RecurrentGemma's recurrent block: a convolution and the RG-LRU."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.hub import call
from scanl.hub.patches.base import Patch, given_cache, layer_index, read, register, write
from scanl.layers.base import widen
from scanl.layers.packing import sequence_index
from scanl.layers.parts.short_convolution import convolve
from scanl.ops import linear_scan
from scanl.ops.fused.rglru_gates import BoundedSqrt

CACHED_NUMBERS = 1 << 18  # numbers in a piece of a tensor; several pieces fit the L2 cache


@register("recurrent_gemma")
class RecurrentGemmaPatch(Patch):
    """Keeps the state in the cache of the call; the original keeps it in the module.

    The model does not return its cache. To read a prompt in pieces, pass one `DynamicCache(config=model.config)` to
    every call. A static cache comes with prepared masks, which do not distinguish padding from the window; padding is
    then ignored, as in the original. The first input of a sequence has the factor 1 in place of sqrt(1 - a²). Position
    0 begins a sequence, and drops the cache's state of another prompt.
    """

    modules: ClassVar = ("recurrent_gemma.RecurrentGemmaRecurrentBlock",)
    original: ClassVar = "a Python loop over the steps"
    runs: ClassVar = "short_convolution, linear_scan"
    corrects: ClassVar = (
        "a prompt in several pieces keeps its state",
        "the cache holds the state, so beam search reorders it",
        "padding is left out",
        "packed sequences are kept apart",
    )
    reads: ClassVar = ("conv_1d", "rg_lru")
    needs_call: ClassVar = ("padding", "packing")

    @staticmethod
    def forward(
        module: Any,
        input_states: Tensor,
        position_ids: Tensor,
        attention_mask: Any = None,
        use_cache: bool = True,
        cache: Any = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        layout = call.of(module, input_states)
        if layout.mask is None and layout.cu_seqlens is None and position_ids.shape[1] > 1:
            starts = position_ids == 0
            if bool(starts[:, 1:].any()):
                layout = replace(layout, cu_seqlens=call.offsets(starts.expand(layout.shape)))
        rows, x = call.TokenRows.lay(layout, input_states)
        cache = given_cache(cache, others) if use_cache else None
        conv = recurrent = layer = None
        if cache is not None:
            layer = _layer(cache, module)
            conv, recurrent = read(cache, layer_index(module))
            rows.start_anew(recurrent is not None)
        fresh = None if recurrent is None or layer is None else layer.__dict__.get("_scanl_fresh")
        if conv is not None and recurrent is not None:
            anew = _anew(position_ids, rows)
            conv, recurrent = conv.masked_fill(anew[:, None, None], 0), recurrent.masked_fill(anew[:, None], 0)
            fresh = anew if fresh is None else fresh | anew
        inputs = module.linear_x(x)
        u, conv = convolve(module.conv_1d, inputs, conv, cu_seqlens=rows.cu_seqlens)
        if rows.cu_seqlens is None:
            first = position_ids == 0
            if fresh is not None:
                first = F.pad(fresh[:, None], (0, x.shape[1] - 1)) | first
                fresh = None
        else:
            first, fresh = _first(rows.cu_seqlens, x.shape[1], fresh, recurrent is None)
        h, recurrent = _rg_lru(module.rg_lru, u, first, recurrent, rows.cu_seqlens)
        if cache is not None and layer is not None:
            write(cache, module, rows, inputs, conv, recurrent)
            layer.__dict__["_scanl_fresh"] = None if rows.mask is None else fresh
        return rows.back(module.linear_out(h * module.act_fn(module.linear_y(x)))), None


def _layer(cache: Any, module: Any) -> Any:
    """Return this layer's part of the cache. Its attribute `_scanl_fresh` marks rows that had only padding so far.

    Beam search need not reorder `_scanl_fresh`, because the beams of one prompt have the same padding.
    """
    index = layer_index(module)
    if index >= len(cache.layers) or not hasattr(cache.layers[index], "recurrent_states"):
        raise ConfigError(f"cache has no recurrent state for layer {index}, expected DynamicCache(config=model.config)")
    return cache.layers[index]


def _anew(position_ids: Tensor, rows: call.TokenRows) -> Tensor:
    """Return whether each row's first token after padding has position 0, (B,). It then ignores the cached state."""
    positions = position_ids.expand(rows.shape)
    if rows.mask is None:
        return positions[:, 0] == 0
    begins = rows.mask.int().argmax(1, keepdim=True)
    return (positions.gather(1, begins)[:, 0] == 0) & rows.mask.any(1)


def _first(cu_seqlens: Tensor, length: int, fresh: Tensor | None, start: bool) -> tuple[Tensor, Tensor | None]:
    """Return the steps (1, T) that begin a sequence, and the sequences (N,) that have not begun after them, or None.

    fresh: sequences that had not begun before. None means all of them if `start`, and otherwise none.
    """
    owner = sequence_index(cu_seqlens, length)
    first = cu_seqlens[owner] == torch.arange(length, device=cu_seqlens.device)
    if fresh is None:
        fresh = torch.full_like(cu_seqlens[1:], start, dtype=torch.bool)
    after = fresh & (cu_seqlens.diff() == 0)
    return (first & fresh[owner])[None], after if bool(after.any()) else None


def _rg_lru(
    module: Any, u: Tensor, first: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    # The gates take a dozen operations. In pieces, their operands stay in the L2 cache.
    steps = max(1, CACHED_NUMBERS // max(1, u.shape[0] * u.shape[2]))
    pieces = [_gated(module, *piece) for piece in zip(u.split(steps, 1), first.split(steps, 1), strict=True)]
    entering, a = (torch.cat(values, 1) for values in zip(*pieces, strict=True))
    y, last = linear_scan(entering, a, state, cu_seqlens=cu_seqlens)
    return y.to(u.dtype), last


def _gated(module: Any, u: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input of the recurrence at every step, and the decay."""
    heads = u.reshape(-1, module.num_attention_heads, module.block_width).transpose(0, 1)
    enter, forget = (
        torch.baddbmm(bias[:, None], heads, weight).transpose(0, 1).reshape(u.shape).sigmoid()
        for bias, weight in (
            (module.input_gate_bias, module.input_gate_weight),
            (module.recurrent_gate_bias, module.recurrent_gate_weight),
        )
    )
    log_a = widen(forget) * (-8 * F.softplus(widen(module.recurrent_param)))
    square = 1 - (2 * log_a).exp()  # rounds as the original does, which matters for a near 1
    scale = BoundedSqrt.apply(square) if square.requires_grad else square.sqrt()
    return u * enter * scale.masked_fill(first[..., None], 1), log_a.exp()
