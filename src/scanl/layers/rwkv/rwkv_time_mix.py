"""Base classes of the time mixes of RWKV-5, RWKV-6 and RWKV-7: a state with a matrix for each head, and its readout."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from scanl.layers.base import Layer
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.depth import channel_ramp, channel_shares, relative_depth, remaining_depth
from scanl.layers.parts.norm import HeadGroupNorm


class RWKVState(NamedTuple):
    """State of `RWKV5`, `RWKV6` and `RWKV7`."""

    recurrent: Annotated[Tensor, StateAxes("*heads, head_dim", "S, keys by values")]
    shift: Annotated[Tensor, StateAxes("1, dim", "the last input")]


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


class BonusTimeMix(MatrixTimeMix):
    """Base class of the time mixes of RWKV-5 and RWKV-6, with a bonus u for the present token.

    They share the maps, `ln_x`, and the initial values of the decay, of u and of the token shift.
    """

    time_decay: nn.Parameter
    time_faaaa: nn.Parameter

    def add_maps(self) -> None:
        """Make receptance, key, value, gate, output and ln_x."""
        dim, heads = self.dim, self.heads[0]
        self.receptance, self.key, self.value, self.gate, self.output = (
            nn.Linear(dim, dim, bias=False) for _ in range(5)
        )
        for linear, gain in ((self.receptance, 1.0), (self.key, 0.1), (self.value, 1.0), (self.gate, 0.1)):
            nn.init.orthogonal_(linear.weight, gain=gain)
        nn.init.zeros_(self.output.weight)
        self.ln_x = HeadGroupNorm(heads, dim, eps=64e-5)

    @torch.no_grad()
    def begin_at(self, index: int, layers: Sequence[Layer]) -> dict[str, Tensor]:
        """Set the decay, u and ln_x of a layer of a stack. Return the shares of x_t in the inputs of k, v, r and g."""
        a, c = relative_depth(index, len(layers)), remaining_depth(index, len(layers))
        share, height = channel_shares(self.dim), channel_ramp(self.dim)
        zigzag = 0.1 * ((torch.arange(self.dim) + 1) % 3 - 1)
        self.time_decay.copy_((-6 + 5 * height ** (0.7 + 1.3 * a)).view_as(self.time_decay))
        self.time_faaaa.copy_((a * (1 - height) + zigzag).view_as(self.time_faaaa))
        self.ln_x.weight.fill_(((1 + index) / len(layers)) ** 0.7)
        return {"k": share**c, "v": share**c + 0.3 * a} | dict.fromkeys("rg", share ** (0.5 * c))
