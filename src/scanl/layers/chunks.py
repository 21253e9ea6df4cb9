"""A layer or a model over a long sequence in pieces, so that memory is bounded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from scanl.errors import ConfigError
from scanl.layers import auxiliary
from scanl.layers.state import State


def in_chunks(
    layer: Callable[..., tuple[Tensor, State]], x: Tensor, state: State = None, *, size: int = 1024, **more: Any
) -> tuple[Tensor, State]:
    """Compute `layer(x, state)` in pieces of `size` steps with the state carried over.

    layer: any layer, stack or model that maps x (B, T, ...) and a state to y (B, T, ...) and the next state.
    more: further arguments of the layer; a tensor (B, T, ...) such as timespans is cut like x.

    Beside x and y, memory holds the values of one piece and a state for each piece. With gradients, the backward pass
    runs each piece forward once more, as `torch.utils.checkpoint` does. Raises ConfigError for a size below 1, a layer
    that reads future steps, and packed sequences, which the pieces would cut.
    """
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"in_chunks: size is {size!r}, expected a whole number of at least 1")
    if getattr(layer, "bidirectional", False):
        raise ConfigError("in_chunks: the layer is bidirectional, expected a causal one: a piece needs steps to come")
    if more.get("cu_seqlens") is not None:
        raise ConfigError("in_chunks: cu_seqlens is given, expected none; run each sequence alone")
    steps, pieces = x.shape[1], []
    for begin in range(0, max(steps, 1), size):
        arguments = {name: _cut(value, x, slice(begin, begin + size)) for name, value in more.items()}

        def run(piece: Tensor, carried: State, arguments: dict[str, Any] = arguments) -> tuple[Tensor, State]:
            return layer(piece, carried, **arguments)

        piece = x[:, begin : begin + size]
        if torch.is_grad_enabled():
            y, state = checkpoint(  # pyright: ignore[reportGeneralTypeIssues]
                run, piece, state, use_reentrant=False, context_fn=auxiliary.checkpoint_contexts
            )
        else:
            y, state = run(piece, state)
        pieces.append(y)
    return torch.cat(pieces, 1), state


def _cut(value: Any, x: Tensor, steps: slice) -> Any:
    timed = isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == x.shape[:2]
    return value[:, steps] if timed else value
