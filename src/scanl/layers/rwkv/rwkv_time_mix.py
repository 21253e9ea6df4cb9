"""Base class of the time mixes of RWKV-6 and RWKV-7: a state with a matrix for each head, and its readout."""

from typing import Annotated, ClassVar, NamedTuple

from torch import Tensor, nn

from scanl.layers.base import Layer
from scanl.layers.initial_state import Axes


class RWKVState(NamedTuple):
    """State of `RWKV6` and `RWKV7`."""

    recurrent: Annotated[Tensor, Axes("*heads, head_dim", "S, keys by values")]
    shift: Annotated[Tensor, Axes("1, dim", "the last input")]


class MatrixTimeMix(Layer):
    """H = D/N heads of N keys and N values. `ln_x`, with epsilon 64e-5, norms each head separately."""

    state: ClassVar = RWKVState

    head_dim: int
    ln_x: nn.GroupNorm

    @property
    def heads(self) -> tuple[int, int]:
        """Number of heads and their size, (H, N)."""
        return self.dim // self.head_dim, self.head_dim

    def normed(self, o: Tensor) -> Tensor:
        """Norm each head of o (B, T, H, N). Return (B, T, D)."""
        return self.ln_x(o.reshape(-1, self.dim)).view(*o.shape[:2], self.dim)
