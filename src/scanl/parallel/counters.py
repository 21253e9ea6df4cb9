"""Tensors of a layer's state that depend on the number of steps alone, such as a position: no rank waits for them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from scanl.layers import initial_state
from scanl.layers.base import Layer
from scanl.layers.state import leaves, map_leaves
from scanl.ops.offsets import sequences
from scanl.parallel.ranks import Ranks


def later(layer: Layer, state: Any, steps: int) -> Any:
    """Return these tensors as they are `steps` later, and None in place of all others."""
    device = next((leaf.device for _, leaf in leaves(state)), None)
    return initial_state.later(layer, layer.state, state, torch.tensor([steps], device=device))


def replaced(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state with other tensors at these paths."""
    paths = (path for path, _ in leaves(state))
    return map_leaves(lambda leaf: tensors.get(next(paths), leaf), state)


def entering(ranks: Ranks, layer: Layer, x: Tensor, state: Any, cu_seqlens: Tensor | None) -> Any:
    """Return the state with these tensors as the rank before leaves them; the ops of the layer fill in the others.

    state: that of this rank, or None. It is None again for a layer that counts nothing.
    """
    start = layer.init_state(sequences(x, cu_seqlens)) if state is None else state
    paths = dict(leaves(later(layer, start, 0)))
    if not paths:
        return state
    goes_on = cu_seqlens is None or len(cu_seqlens) == 2  # the sequences that enter are those that leave
    rows = len(x) if cu_seqlens is None else 1
    begins, steps = ranks.rank == 0 or not goes_on, x.shape[1] if cu_seqlens is None else int(cu_seqlens.diff()[-1])
    last = map_leaves(lambda leaf: leaf[-rows:].detach(), start)
    heads = ranks.everyone(torch.tensor([begins, steps], device=x.device))
    values = {path: ranks.everyone(leaf.contiguous()) for path, leaf in leaves(last) if path in paths}
    for rank, (begun, count) in enumerate(head.tolist() for head in heads[: ranks.rank]):
        if begun:
            last = replaced(last, {path: value[rank] for path, value in values.items()})
        last = replaced(last, dict(leaves(later(layer, last, count))))
    if ranks.rank == 0:
        return start
    first, all_rows = dict(leaves(last)), dict(leaves(start))
    return replaced(start, {path: torch.cat([first[path], all_rows[path][rows:]]) for path in paths})
