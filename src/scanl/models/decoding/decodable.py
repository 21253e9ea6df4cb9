"""The interface of a model that decoding needs."""

from typing import Any, Protocol

import torch
from torch import Tensor

from scanl.layers.state import Device, DType, State


class Decodable(Protocol):
    """A language model as decoding sees it. tokens: (B, T) int64; V = vocab_size."""

    vocab_size: int

    @property
    def device(self) -> torch.device:
        """The device on which it reads tokens."""
        ...

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> State:
        """Return the state before any token."""
        ...

    def next_logits(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Read tokens. Return the logits (B, V) of those that follow, and the state."""
        ...

    def decode_logits(self, tokens: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Compute `next_logits` by the fastest way for one token of each row."""
        ...

    def logits_at(self, tokens: Tensor, places: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Read tokens. Return the logits (n, V) where the mask `places` (B, T) is True, and the state."""
        ...

    def state_dict(self) -> Any:
        """Return the weights by name, for the digest of the model."""
        ...
