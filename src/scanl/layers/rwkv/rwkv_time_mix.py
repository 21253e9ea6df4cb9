"""Base class of the time mixes of RWKV-6 and RWKV-7: a state with a matrix for each head, and its readout."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from scanl.layers.base import Layer
from scanl.layers.state import Device, DType


class RWKVState(NamedTuple):
    """State of `RWKV6` and `RWKV7`.

    recurrent: S (B, H, N, N), keys by values.   shift: the last input (B, 1, D).
    """

    recurrent: Tensor
    shift: Tensor


class MatrixTimeMix(Layer):
    """H = D/N heads of N keys and N values. `ln_x`, with epsilon 64e-5, norms each head separately."""

    head_size: int
    ln_x: nn.GroupNorm

    @property
    def heads(self) -> tuple[int, int]:
        """Number of heads and their size, (H, N)."""
        return self.dim // self.head_size, self.head_size

    def normed(self, o: Tensor) -> Tensor:
        """Norm each head of o (B, T, H, N). Return (B, T, D)."""
        return self.ln_x(o.reshape(-1, self.dim)).view(*o.shape[:2], self.dim)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> RWKVState:
        kind = {"device": device, "dtype": dtype, "at_least": torch.float32}
        return RWKVState(
            self._zeros(batch_size, *self.heads, self.head_size, **kind), self._zeros(batch_size, 1, self.dim, **kind)
        )
