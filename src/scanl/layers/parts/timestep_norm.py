"""Timestep normalisation: a group norm with the mean and variance of all steps so far."""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from scanl.layers.base import widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.module import Module
from scanl.layers.parts.positions import positions
from scanl.ops import linear_scan
from scanl.ops.offsets import sequences


class TimestepNormState(NamedTuple):
    """State of `TimestepNorm`, of a layer with `num_groups`.

    `rest` is what `sums` are less than the exact sums, for else the new steps of a long sequence would be rounded away.
    """

    steps: Annotated[Tensor, StateAxes("1", "number of steps read", dtype=torch.int64, after=torch.add)]
    sums: Annotated[
        Tensor, StateAxes("2, num_groups", "over the steps, of the mean and of the mean square of each group")
    ]
    rest: Annotated[Tensor, StateAxes("2, num_groups", "the part of the sums that is rounded away")]


class TimestepNorm(Module):
    r"""y_t = (x_t - mean_t) / sqrt(var_t + eps) ⊙ (1 + weight) + bias, over all channels of a group in steps 1 to t.

    groups: G, equal parts of the channels.   weight, bias: (D), initially 0. The variance is that of a population.
    Source: Ma et al., "Megalodon", arXiv:2404.08801, section 3.2, and its code, where the state has the mean and the
    variance instead of the sums.
    """

    def __init__(self, dim: int, groups: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight, self.bias = (nn.Parameter(torch.zeros(dim)) for _ in range(2))

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, groups={self.groups}, eps={self.eps}"

    def forward(
        self, x: Tensor, state: TimestepNormState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, TimestepNormState]:
        """Return y (B, T, D) in float32 or wider, and the state. state: None for no steps."""
        rows = sequences(x, cu_seqlens)
        past = x.new_zeros(rows, 1, dtype=torch.int64) if state is None else state.steps
        earlier = None if state is None else state.sums.double() + state.rest.double()
        steps, past = positions(past, x.shape[1], cu_seqlens)
        parts = widen(x).unflatten(-1, (self.groups, -1))
        mean = parts.mean(-1)
        var = (parts - mean[..., None]).square().mean(-1).double()
        mean = mean.double()
        one = torch.ones((), dtype=torch.float64, device=x.device)
        sums, last = linear_scan(torch.stack([mean, var + mean.square()], 2), one, earlier, cu_seqlens=cu_seqlens)
        mean, square = (sums / (steps + 1)[..., None, None]).unbind(2)
        rate = torch.rsqrt((square - mean.square()).clamp_min(0) + self.eps)
        y = (parts - mean[..., None].to(parts.dtype)) * rate[..., None].to(parts.dtype)
        y = y.flatten(-2) * (1 + widen(self.weight)) + widen(self.bias)
        rounded = last.to(y.dtype)
        return y, TimestepNormState(past, rounded, (last - rounded.double()).to(y.dtype))
