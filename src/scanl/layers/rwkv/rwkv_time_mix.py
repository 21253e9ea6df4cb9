"""The common part of the time mixes of RWKV-6 and RWKV-7: a state with a matrix for each head, and its readout."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from scanl.layers.base import Layer
from scanl.layers.state import Device, DType


class RWKVState(NamedTuple):
    """recurrent: S (B, H, N, N), keys by values.   shift: the last input (B, 1, D)."""

    recurrent: Tensor
    shift: Tensor


class MatrixTimeMix(Layer):
    """H = D/N heads of N keys and N values, normed each by itself: `ln_x`, epsilon 64e-5."""

    head_size: int
    ln_x: nn.GroupNorm

    @property
    def heads(self) -> tuple[int, int]:
        """(H, N)."""
        return self.dim // self.head_size, self.head_size

    def normed(self, o: Tensor) -> Tensor:
        """(B, T, H, N) to (B, T, D)."""
        return self.ln_x(o.reshape(-1, self.dim)).view(*o.shape[:2], self.dim)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> RWKVState:
        kind = {"device": device, "dtype": dtype, "at_least": torch.float32}
        return RWKVState(
            self._zeros(batch_size, *self.heads, self.head_size, **kind), self._zeros(batch_size, 1, self.dim, **kind)
        )
